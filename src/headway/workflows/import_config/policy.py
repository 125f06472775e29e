"""Reinforcement learning of other trainers. In: how they count prompts, answers and updates; out: the
settings of headway's rollouts.

They count a batch in answers or in prompts, and steps in rollouts or in updates; headway counts
prompts of a rollout, and steps are updates. Invariant: what cannot be carried over exactly is
named in the report.
"""

from __future__ import annotations

from typing import Any

from headway.config.kinds import kind_names
from headway.rollout.config import MOST_KEPT
from headway.workflows.import_config.rules import ImportDraft, Rule, integer, number

PROMPT_TOKENS = 512
"""Room for a prompt where a file gives none."""
THINK = "(?s)<think>.*</think>.*"
"""The format that names such as think_format_reward stand for."""
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"kind": "math"},
    "reasoning_accuracy_reward": {"kind": "math"},
    "think_format_reward": {"kind": "format", "pattern": THINK},
    "math": {"kind": "math"},
}
"""Reward functions of others by name -> ours."""
NAME_A_REWARD = "reward: math, or ./mine.py with `def reward(prompt, answer, record)`"
STEPS = ("steps", "eval.every", "checkpoint.every")
"""Settings that count updates here."""


def counted(path: str) -> Rule:
    """A number that `set_rollouts` reads together with others."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        # `settle` writes the value, which other keys decide as well.
        draft.paths[len(draft.report)] = path
        draft.tell(key, number(key, value), "set", path, "computed from several keys")

    return rule


def cut(path: str) -> Rule:
    """A bound on the tokens that answers are drawn from: top_k, top_p or min_p."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        # How systems write that nothing is left out: none, 1 for top_p, 0 or -1 for top_k.
        is_off = value is None or number(key, value) <= 0
        if path == "rollout.top_p" and not is_off:
            is_off = number(key, value) >= 1
        if is_off:
            draft.tell(key, value, "automatic", note="answers are drawn from all tokens")
        elif path == "rollout.top_k" and number(key, value) > MOST_KEPT:
            note = f"the journal keeps the ids of at most {MOST_KEPT} tokens"
            draft.tell(key, value, "missing", f"{path}: {MOST_KEPT}", note)
        else:
            draft.write(key, value, path, value)

    return rule


def every(path: str) -> Rule:
    """Rollouts between two events; 0 and below mean never."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        steps = integer(key, value)
        draft.write(key, value, path, steps if steps > 0 else None)

    return rule


def set_rollouts(draft: ImportDraft, prompts: int, updates: int, key: str) -> None:
    """Prompts of a rollout and its updates; `key` is named where they do not divide."""
    prompts = max(1, prompts)
    updates = max(1, updates)
    if prompts % updates:
        fitting = max(number for number in range(1, updates + 1) if prompts % number == 0)
        draft.tell(
            key,
            updates,
            "missing",
            f"rollout.updates: {fitting}",
            f"{updates} updates of equally many prompts do not divide {prompts} prompts",
        )
        updates = fitting
    draft.set("rollout.prompts", prompts)
    if updates > 1:
        draft.set("rollout.updates", updates)


def set_length(draft: ImportDraft, prompt_tokens: Any) -> None:
    """The row holds a prompt and an answer."""
    answer_tokens = draft.get("rollout.max_new_tokens") or 256
    draft.set("data.seq_len", int(prompt_tokens or PROMPT_TOKENS) + int(answer_tokens))


def rollouts_to_updates(draft: ImportDraft) -> None:
    """Steps of a system that counts rollouts become updates."""
    rollout = draft.get("rollout") or {}
    factor = rollout.get("updates", 1) * rollout.get("passes", 1)
    for path in STEPS:
        value = draft.get(path)
        if value and factor > 1:
            draft.set(path, value * factor)


def finish_policy(draft: ImportDraft) -> None:
    """What every imported recipe of this objective needs."""
    draft.default("objective.kind", "grpo")
    draft.set("checkpoint.metric", "reward")
    # Both are the same thing here, and a recipe gives one of them.
    for name in ("rows_per_rank", "accumulate", "rows", "tokens"):
        draft.recipe.get("batch", {}).pop(name, None)
    if draft.get("objective.algorithm") == "cispo":
        draft.recipe["objective"].pop("clip_low", None)
    if draft.get("objective.beta") == 0:
        draft.recipe["objective"].pop("kl", None)
    if draft.get("steps"):
        draft.recipe.pop("epochs", None)
    elif draft.get("rollout.refill"):
        draft.recipe["rollout"].pop("refill")
        draft.tell(
            "dynamic sampling",
            True,
            "missing",
            "steps: N, rollout.refill: 4",
            "how much data it reads depends on rewards, so the run needs steps instead of epochs",
        )
    if draft.get("eval.at_start") and not draft.get("data.valid"):
        draft.recipe["eval"].pop("at_start")
    if not draft.get("data.train"):
        draft.set("data.train", [{"path": "prompts.jsonl", "kind": "prompt"}])
        draft.tell(
            "data", None, "missing", "data.train: FILE", "the file names no data; prompts.jsonl"
        )
    if not draft.get("reward"):
        draft.tell("reward", None, "missing", NAME_A_REWARD, "the file names no reward of headway")


def add_reward(draft: ImportDraft, key: str, name: Any, weight: float | None = None) -> None:
    """A reward by the name that another system has for it."""
    settings = REWARDS.get(str(name).rpartition(".")[2])
    if settings is None:
        draft.tell(key, name, "missing", NAME_A_REWARD, "a function of Python, which is not read")
        return
    entry = dict(settings)
    if weight is not None and weight != 1:
        entry["weight"] = weight
    draft.set("reward", [*(draft.get("reward") or []), entry])
    draft.tell(key, name, "set", f"reward: {entry['kind']}")


def reward_model(draft: ImportDraft, key: str, value: Any) -> None:
    """A model that gives an answer a number."""
    if "model" not in kind_names("headway.rewards"):
        draft.tell(key, value, "missing", NAME_A_REWARD, "there is no reward of kind model")
        return
    entry = {"kind": "model", "path": str(value)}
    draft.set("reward", [*(draft.get("reward") or []), entry])
    draft.tell(key, value, "set", f"reward: [{{kind: model, path: {value}}}]")
