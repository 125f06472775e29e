"""Settings of rollouts and of objective grpo: what one small run with them leaves."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError
from headway.train import train
from headway.train.build import build
from headway.train.resolve import resolve
from headway.train.start import decide_start
from support.byte_model import CONFIG, write_model
from support.rollout_runs import rollout_recipe, sampled_ids, write_mixture, write_rollout_inputs
from support.runs import deterministic
from support.setting_runs import Row, data_folder

SHORT = ("steps=2", "eval.every=2")
"""Of all runs: two updates, then a validation."""
FAST = ("optim.lr=1e-2",)
"""Weights that differ after one update."""
SEVERAL = ("rollout.updates=2", "optim.lr=5e-2")
"""The second update meets other probabilities than those that the answers were drawn with."""
LONG = ("rollout.max_new_tokens=60", "data.seq_len=256")
"""Some answers end by themselves, and so differ in their lengths."""
TAUGHT = ("reward=[]", "objective.teacher=$/teacher/out", *SEVERAL)


@functools.cache
def _inputs() -> Path:
    folder = data_folder() / "rollouts"
    folder.mkdir()
    (folder / "same.py").write_text("def reward(prompt, answer, record):\n    return 0.5\n")
    write_model(folder / "teacher", CONFIG.with_(max_seq_len=256, init_std=0.25))
    write_mixture(folder / "ties", near_ties=True)
    return write_rollout_inputs(folder)


def _recipe(overrides: tuple[str, ...]) -> Any:
    name = Path(tempfile.mkdtemp(dir=_inputs())).name
    # The paths of rows are those of all rows; the inputs of these have a folder of their own.
    texts = [text.replace(str(data_folder()), str(_inputs())) for text in overrides]
    return rollout_recipe(_inputs(), name, *SHORT, *texts)


@functools.cache
def policy_run(overrides: tuple[str, ...]) -> Any:
    """Numbers and answers of a run, or why it is refused."""
    try:
        recipe = _recipe(overrides)
        train(recipe)
    except HeadwayError as refusal:
        return str(refusal)
    return deterministic(recipe.run.folder / "metrics.jsonl"), sampled_ids(recipe.run.folder)


def validation(overrides: tuple[str, ...]) -> Any:
    """The numbers of the validation."""
    return policy_run(overrides)[0][-1]["valid"]


def rollouts(look: Callable[[Any], Any]) -> Callable[[tuple[str, ...]], Any]:
    """Something of the rollouts of a run that does not begin."""

    def see(overrides: tuple[str, ...]) -> Any:
        resolved = resolve(_recipe(overrides))
        run = build(resolved, decide_start(resolved.recipe, "never"))
        seen = look(run.rollouts)
        run.loader.close()
        return seen

    return see


ROWS: dict[str, Row] = {
    "rollout.prompts": ((), 4, 2, policy_run),
    "rollout.samples": ((), 4, 2, policy_run),
    "rollout.max_new_tokens": ((), 8, 4, policy_run),
    "rollout.temperature": ((), 1.0, 0.5, policy_run),
    "rollout.top_k": ((), None, 3, policy_run),
    "rollout.top_p": ((), None, 0.5, policy_run),
    "rollout.min_p": ((), None, 0.5, policy_run),
    "rollout.updates": ((), 1, 2, policy_run),
    "rollout.passes": ((), 1, 2, policy_run),
    "rollout.ahead": ((), 0, 1, policy_run),
    "rollout.refill": (("reward=$/same.py",), 0, 1, policy_run),
    "rollout.mask_cut": ((), False, True, policy_run),
    "rollout.at_once": ((), 8, 3, rollouts(lambda r: r.sampler(0)._engine.options.max_running)),
    "rollout.cache_gib": ((), None, 0.001, rollouts(lambda r: r.sampler(0)._engine.stats().cache_bytes_budget)),
    "rollout.workers": ((), 1, 2, rollouts(lambda r: len(r.panel._members[0].source._workers))),
    "rollout.difference_limit": (FAST, 0.5, 1e-12, policy_run),
    "rollout.routes": (("init.from=$/ties/out",), "replay", "own", policy_run),
    "rollout.exact": ((), False, True, policy_run),
    "rollout.valid_samples": (("rollout.valid_temperature=1",), 1, 2, validation),
    "rollout.valid_temperature": ((), 0.0, 1.0, validation),
    "rollout.pass_at": ((), 1.0, 2.0, validation),
    "objective[grpo].kind": ((), "grpo", "nothing", policy_run),
    "objective[grpo].algorithm": ((), "grpo", "dr_grpo", policy_run),
    "objective[grpo].ratio": (SEVERAL, "token", "sequence", policy_run),
    "objective[grpo].clip_low": (SEVERAL, 0.2, 0.001, policy_run),
    "objective[grpo].clip_high": (SEVERAL, 0.2, 0.001, policy_run),
    "objective[grpo].weighting": (LONG, "answer", "token", policy_run),
    "objective[grpo].advantage": ((), "std", "mean", policy_run),
    "objective[grpo].beta": (FAST, 0.0, 0.1, policy_run),
    "objective[grpo].kl": ((*FAST, "objective.beta=0.5"), "k1", "k2", policy_run),
    "objective[grpo].kl_in": ((*FAST, "objective.beta=0.5"), "loss", "reward", policy_run),
    "objective[grpo].reference": (("objective.beta=0.1",), None, "$/nowhere", policy_run),
    "objective[grpo].teacher": (("reward=[]",), "$/model/out", "$/nowhere", policy_run),
    "objective[grpo].teacher_weight": (TAUGHT, 1.0, 0.1, policy_run),
    "objective[grpo].entropy": ((), 0.0, 0.1, policy_run),
    "objective[grpo].importance": ((), "token", "off", policy_run),
    "objective[grpo].importance_cap": ((), 2.0, 0.5, policy_run),
}  # fmt: skip
