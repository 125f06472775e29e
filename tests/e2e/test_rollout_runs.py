"""Learning from rewards as whole runs: sampler and trainer agree, every way of using answers does what it says, mistakes are one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.ranks import start_processes
from support.rollout_runs import (
    SAME,
    journal_of,
    rollout_recipe,
    sampled_ids,
    train_with_a_spike,
    write_rollout_inputs,
)
from support.runs import headway

from headway.checkpoint.stored_model import find_model
from headway.cli import GAVE_UP
from headway.data.batch import KEPT
from headway.errors import GaveUpError, HeadwayError
from headway.model.base import build_frozen_model
from headway.rollout.journal import FILE, RolloutJournal, read_journal
from headway.rollout.rows import AnswerSource, TrainedAnswer, answer_step
from headway.rollout.sampler import PolicySampler
from headway.tasks.grpo import Config as PolicyConfig
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.rollout_comparison import RolloutComparison, compare_rollouts

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollout_inputs(tmp_path_factory.mktemp("rollouts"))


def run(folder: Path, name: str, *overrides: str, world: int = 1) -> Records:
    recipe = rollout_recipe(folder, name, *overrides)
    if world == 1:
        train(recipe)
    else:
        start_processes(lambda: train(recipe), world, timeout=120)
    return read_metrics(recipe.run.folder / "metrics.jsonl")


def log_of(folder: Path, name: str) -> str:
    return (folder / "runs" / name / "train.log").read_text(encoding="utf-8")


def assert_near(comparison: RolloutComparison) -> None:
    """Before the first difference, if there is one, two fp32 runs differ by roundings alone."""
    assert comparison.steps
    # Of single tokens; tensor parallelism adds products up in another order.
    assert comparison.logprob_difference < 1e-4
    if comparison.worst_metric is not None:
        assert comparison.worst_metric.difference < 1e-5


@pytest.fixture(scope="module")
def plain(folder: Path) -> Records:
    return run(folder, "plain")


# ---- sampler, trainer, journal


def test_sampler_and_trainer_agree_and_the_journal_has_every_answer(
    folder: Path, plain: Records
) -> None:
    assert len(plain) == 4
    for record in plain:
        assert record["agreement/mean"] < 1e-5
        assert record["agreement/max"] < 1e-4
        assert record["agreement/cut"] == 0
    batches = list(read_journal(folder / "runs" / "plain"))
    assert [sampled.batch for sampled, _ in batches] == [0, 1, 2, 3]
    assert [sampled.version for sampled, _ in batches] == [0, 1, 2, 3]
    for sampled, rewarded in batches:
        assert len(sampled.answers) == 16
        assert len(sampled.prompts) == 4
        # What made the ids: the tokenizer, the template of every prompt, the seed of the draws.
        assert len(sampled.tokenizer) == 64
        assert len(sampled.templates) == 4
        assert len(set(sampled.templates)) == 1
        assert sampled.seed is not None
        assert sampled.first_step == sampled.version + 1
        assert rewarded is not None
        for answer, total in zip(sampled.answers, rewarded.totals, strict=True):
            assert 1 <= len(answer.ids) <= 8
            assert len(answer.logprobs) == len(answer.ids)
            # 257 ends an answer, and belongs to it.
            assert answer.is_cut == (answer.ids[-1] != 257)
            assert 257 not in answer.ids[:-1]
            letters = [letter.isascii() for letter in answer.text]
            assert total == pytest.approx(sum(letters) / max(1, len(letters)))
    for record, (_, rewarded) in zip(plain, batches, strict=True):
        assert rewarded is not None
        assert record["reward"] == pytest.approx(sum(rewarded.totals) / 16)
    assert "WAITS FOR DATA" not in log_of(folder, "plain")
    assert "waited for data" not in log_of(folder, "plain")
    # 16 prompts train, and one pass reads each once.
    seen = [answer.prompt for sampled, _ in batches for answer in sampled.answers]
    assert sorted(set(seen)) == sorted(seen[::4])
    assert len(set(seen)) == 16


def test_a_run_that_is_repeated_has_the_same_numbers(folder: Path, plain: Records) -> None:
    again = run(folder, "again", "rollout.at_once=3", "data.workers=0")
    assert sampled_ids(folder / "runs" / "again") == sampled_ids(folder / "runs" / "plain")
    for got, expected in zip(again, plain, strict=True):
        assert {key: got[key] for key in SAME} == pytest.approx(
            {key: expected[key] for key in SAME}, rel=1e-5, abs=1e-6
        )


def test_rows_and_microbatches_change_no_answer_before_rounding_does(
    folder: Path, plain: Records
) -> None:
    packed = run(folder, "packed", "data.seq_len=256", "batch.micro_rows=5")
    for got, expected in zip(packed, plain, strict=True):
        assert {key: got[key] for key in SAME} == pytest.approx(
            {key: expected[key] for key in SAME}, rel=1e-4, abs=1e-5
        )
    assert_near(compare_rollouts(folder / "runs/packed", folder / "runs/plain"))


def test_a_run_that_rolls_back_samples_the_batch_that_takes_the_place_of_the_skipped_one(
    folder: Path,
) -> None:
    recipe = rollout_recipe(folder, "back", "heal.on_spike=rollback", "checkpoint.every=1")
    steps = train_with_a_spike(recipe)
    assert steps == [1, 2, 2, 3, 4]
    # The second batch was skipped: its answers are gone, and the third is of its weights.
    batches = [(sampled.batch, sampled.version) for sampled in journal_of(recipe.run.folder)]
    assert batches == [(0, 0), (1, 1), (2, 1), (3, 2), (4, 3)]
    records = read_metrics(recipe.run.folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert max(record["agreement/mean"] for record in records) < 1e-5


def test_stale_weights_end_the_run_with_the_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(self: PolicySampler, weights: object, version: int) -> None:
        self.version = version

    monkeypatch.setattr(PolicySampler, "refresh", forget)
    with pytest.raises(GaveUpError, match=r"rollout.difference_limit is 0\.01") as refusal:
        run(folder, "stale", "optim.lr=0.05", "rollout.difference_limit=0.01", "steps=8")
    assert "drawn by other weights" in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    differences = [r["agreement/mean"] for r in read_metrics(folder / "runs/stale/metrics.jsonl")]
    assert differences[0] < 1e-5
    assert max(differences) > 0.01
    assert len(differences) < 8


def test_the_command_says_so_in_one_line_and_ends_with_the_code_of_giving_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PolicySampler, "refresh", lambda self, weights, version: None)
    rollout_recipe(folder, "command")
    settings = ("optim.lr=0.05", "rollout.difference_limit=0.01", "steps=8")
    ended = headway("train", str(folder / "command.yaml"), *settings)
    assert ended.returncode == GAVE_UP
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "rollout.difference_limit is 0.01" in errors[0]


def test_without_a_bound_stale_weights_train_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PolicySampler, "refresh", lambda self, weights, version: None)
    records = run(folder, "unbounded", "optim.lr=0.05", "rollout.difference_limit=null")
    assert records[-1]["agreement/mean"] > 0.01


@pytest.mark.slow
def test_the_reward_rises(folder: Path) -> None:
    records = run(folder, "rising", "steps=24", "optim.lr=1e-2", "eval.every=null")
    rewards = [record["reward"] for record in records]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.1
    assert max(record["agreement/mean"] for record in records) < 1e-5


# ---- cuts of the distribution

CUT = ("rollout.top_k=20", "rollout.top_p=0.8", "rollout.min_p=0.01", "optim.lr=1e-2")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alone", "tensor"])
def test_with_cuts_trainer_and_sampler_agree_on_what_could_be_drawn(
    folder: Path, layout: str
) -> None:
    """The loss uses the kept ids of the journal, also where the reference and later updates read
    them, and where a rank has half of the vocabulary."""
    more = ("rollout.updates=2", "objective.beta=0.05", "objective.kl_in=reward")
    name = f"cut-{layout}"
    if layout == "alone":
        records = run(folder, name, *CUT, *more)
    else:
        records = run(folder, name, *CUT, *more, "parallel.tensor=2", world=2)
    assert max(record["agreement/mean"] for record in records) < 1e-5
    assert max(record["agreement/max"] for record in records) < 1e-4
    for sampled in journal_of(folder / "runs" / name):
        for answer in sampled.answers:
            assert answer.kept is not None
            assert answer.kept.counts.max() <= 20
            for token, kept in zip(answer.ids, answer.kept.of_tokens(), strict=True):
                assert token in kept.tolist()


def test_without_the_kept_ids_trainer_and_sampler_would_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_fill = AnswerSource.fill_columns

    def without(self: AnswerSource, columns: Any, pieces: Any, layout: Any) -> None:
        plain_fill(self, columns, pieces, layout)
        columns[KEPT][:] = -1

    monkeypatch.setattr(AnswerSource, "fill_columns", without)
    records = run(folder, "unkept", *CUT, "steps=1", "rollout.difference_limit=null")
    assert records[0]["agreement/mean"] > 0.1


# ---- several updates, refill, masks


def test_several_updates_train_on_parts_of_the_answers_and_passes_on_all_again(
    folder: Path,
) -> None:
    records = run(
        folder, "updates", "rollout.updates=2", "rollout.passes=2", "steps=8", "optim.lr=1e-2"
    )
    assert [record["rollout/staleness"] for record in records] == [0, 1, 2, 3] * 2
    assert [record["num_samples_in_batch"] for record in records] == [8] * 8
    assert [sampled.version for sampled in journal_of(folder / "runs/updates")] == [0, 4]
    # What the sampler drew is compared with the trainer before the first update, in all of them.
    assert max(record["agreement/mean"] for record in records) < 1e-5
    is_clipped = [r["clipped/low"] + r["clipped/high"] > 0 for r in records]
    assert not is_clipped[0]
    assert any(is_clipped)


def test_epochs_whose_last_batch_has_fewer_prompts_than_updates_end(folder: Path) -> None:
    """16 prompts in batches of 3 leave one for the last batch, which has three updates."""
    records = run(folder, "short", "rollout.prompts=3", "rollout.updates=3", "steps=null", "epochs=1")  # fmt: skip
    assert len(records) == 18
    assert all(record["num_samples_in_batch"] == 4 for record in records)


def test_prompts_without_signal_are_replaced(folder: Path) -> None:
    """Half of the prompts earn the same whatever the answer is."""
    source = (
        "def reward(prompt, answer, record):\n"
        "    if int(record['answer']) % 2:\n"
        "        return 1.0\n"
        "    return float(sum(map(ord, answer)) % 7)\n"
    )
    (folder / "half.py").write_text(source, encoding="utf-8")
    half = "reward=$/half.py"
    records = run(folder, "refilled", half, "rollout.refill=3", "steps=3")
    without = run(folder, "unfilled", half, "steps=3")
    assert any(record["rollout/no_signal"] > 0 for record in records)
    assert max(record["rollout/prompts"] for record in records) > 4
    assert {record["rollout/prompts"] for record in without} == {4}
    by_prompt = {}
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    numbers = [int(json.loads(line)["answer"]) for line in lines]
    for sampled in journal_of(folder / "runs/refilled"):
        by_prompt |= {answer.prompt: numbers[answer.prompt] for answer in sampled.answers}
    assert any(value % 2 for value in by_prompt.values())
    for record in records:
        # Groups that train all have a signal, unless refilling found too few.
        assert record["num_samples_in_batch"] in (4, 8, 12, 16)


def test_answers_that_were_cut_carry_no_loss(folder: Path) -> None:
    records = run(folder, "uncut", "rollout.mask_cut=true", "steps=2")
    sampled = journal_of(folder / "runs/uncut")
    for record, batch in zip(records, sampled, strict=True):
        cut = sum(answer.is_cut for answer in batch.answers)
        assert record["answer/cut"] == cut / 16
        if cut == 16:
            assert record["loss"] == 0
            assert record["grad_norm"] == 0
    assert sum(record["answer/cut"] for record in records) > 1.5


def test_groups_without_any_signal_change_nothing(folder: Path) -> None:
    (folder / "same.py").write_text("def reward(prompt, answer, record):\n    return 0.5\n")
    records = run(folder, "same", "reward=$/same.py", "optim.weight_decay=0", "steps=2")
    for record in records:
        assert record["rollout/no_signal"] == 1
        assert record["grad_norm"] == 0
    refilled = run(folder, "same2", "reward=$/same.py", "rollout.refill=2", "steps=2")
    assert [record["rollout/prompts"] for record in refilled] == [12, 12]
    assert [record["grad_norm"] for record in refilled] == [0, 0]


# ---- reference and teacher


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_reference_is_a_second_model_of_full_weights(folder: Path, kl_in: str) -> None:
    name = f"beta-{kl_in}"
    records = run(folder, name, "objective.beta=0.1", f"objective.kl_in={kl_in}", "optim.lr=1e-2")
    assert "second model" in log_of(folder, name)
    journal = RolloutJournal.open(folder / "runs" / name)
    if kl_in == "loss":
        # The reference is the start, from which nothing differs yet.
        assert records[0]["kl"] == pytest.approx(0, abs=1e-6)
        assert records[-1]["kl"] > 1e-4
        assert journal.scores(0) is None
    else:
        first = journal.scores(0)
        last = journal.scores(3)
        assert first is not None
        assert last is not None
        assert max(map(abs, first.divergence)) < 1e-4
        assert max(map(abs, last.divergence)) > 1e-3


def test_a_divergence_in_the_reward_is_subtracted_before_answers_are_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """reward - beta * sum of (log p - log p of the reference) over an answer, both by a plain
    forward of the two models."""
    write_model(folder / "teacher", CONFIG.with_(max_seq_len=256, init_std=0.25))
    trained: list[TrainedAnswer] = []

    def note(answers: Any, *more: Any) -> Any:
        trained[:] = answers
        return answer_step(answers, *more)

    monkeypatch.setattr("headway.train.rollouts.answer_step", note)
    settings = ("objective.beta=0.3", "objective.kl_in=reward", "objective.reference=$/teacher/out")
    run(folder, "charged", *settings, "steps=1", "eval.every=null")

    scored: dict[str, list[float]] = {}
    for name in ("model", "teacher"):
        stored = find_model(folder / name / "out")
        model = build_frozen_model(
            stored.config, stored.weights(), torch.device("cpu"), torch.float32
        )
        scored[name] = [sum_of_log_probs(model, answer) for answer in trained]
    ((_, rewarded),) = read_journal(folder / "runs/charged")
    assert rewarded is not None
    totals = [
        total - 0.3 * (mine - theirs)
        for total, mine, theirs in zip(
            rewarded.totals, scored["model"], scored["teacher"], strict=True
        )
    ]
    charges = [abs(a - b) for a, b in zip(totals, rewarded.totals, strict=True)]
    assert max(charges) > 0.05
    for first in range(0, 16, 4):
        expected = PolicyConfig().advantages(totals[first : first + 4])
        assert [answer.advantage for answer in trained[first : first + 4]] == pytest.approx(
            expected, rel=1e-3, abs=1e-4
        )


@torch.no_grad()
def sum_of_log_probs(model: Any, answer: TrainedAnswer) -> float:
    ids = torch.tensor([answer.prompt + answer.ids])
    hidden = model.hidden_states(ids, torch.arange(ids.shape[1])[None])
    vocab = byte_tokenizer().vocab_size
    log_p = model.logits(hidden)[0, len(answer.prompt) - 1 : -1, :vocab].log_softmax(-1)
    return float(log_p.gather(1, torch.tensor(answer.ids)[:, None]).sum())


@pytest.mark.parametrize("base", ["null", "nf4"])
def test_the_reference_of_an_adapter_is_its_base_without_a_second_copy(
    folder: Path, base: str
) -> None:
    name = f"lora-{base}"
    records = run(
        folder,
        name,
        "objective.beta=0.1",
        "adapter.rank=4",
        f"adapter.base={base}",
        "optim.lr=1e-2",
    )
    assert "second model" not in log_of(folder, name)
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert records[-1]["kl"] > 1e-6
    assert max(record["agreement/mean"] for record in records) < 1e-5


@pytest.mark.slow
def test_a_teacher_alone_brings_the_student_nearer(folder: Path) -> None:
    write_model(folder / "teacher", CONFIG.with_(max_seq_len=256, init_std=0.25))
    records = run(
        folder, "taught", "objective.teacher=$/teacher/out", "reward=[]", "rollout.prompts=8", "rollout.samples=8",
        "rollout.at_once=64", "batch.micro_rows=16", "optim.lr=1e-3", "steps=16", "eval.every=8",
    )  # fmt: skip
    # The divergence from the teacher, by the estimate k3.
    divergence = [record["kl"] for record in records]
    assert sum(divergence[-4:]) < 0.7 * sum(divergence[:4])
    assert records[-1]["valid"]["valid"]["answer/tokens"] > 0


def test_one_answer_of_each_prompt_is_enough_for_a_teacher(folder: Path) -> None:
    write_model(folder / "teacher", CONFIG.with_(max_seq_len=256, init_std=0.25))
    records = run(
        folder, "single", "objective.teacher=$/teacher/out", "reward=[]", "rollout.samples=1"
    )
    assert all(record["grad_norm"] > 0 for record in records)
    assert all(record["reward"] == 0 for record in records)


# ---- ranks

LAYOUTS = {
    "ddp": ("parallel.zero1.size=1",),
    "zero1": (),
    "fsdp": ("parallel.strategy=fsdp",),
    "tensor": ("parallel.tensor=2",),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_sample_the_answers_and_have_the_losses_of_one_process(
    folder: Path, plain: Records, layout: str
) -> None:
    records = run(folder, layout, *LAYOUTS[layout], world=2)
    assert sampled_ids(folder / "runs" / layout) == sampled_ids(folder / "runs" / "plain")
    for got, expected in zip(records, plain, strict=True):
        assert {key: got[key] for key in SAME} == pytest.approx(
            {key: expected[key] for key in SAME}, rel=1e-4, abs=1e-5
        )
        assert got.get("valid") == expected.get("valid")
    comparison = compare_rollouts(folder / "runs" / layout, folder / "runs" / "plain")
    assert comparison.equal
    assert_near(comparison)


@pytest.mark.slow
def test_the_first_draw_that_falls_between_two_roundings_is_reported(folder: Path) -> None:
    """Roundings of bf16 are large enough for one within a few steps."""
    run(folder, "halves", "precision=bf16")
    run(folder, "halves-packed", "precision=bf16", "data.seq_len=256", "batch.micro_rows=5")
    comparison = compare_rollouts(folder / "runs/halves", folder / "runs/halves-packed")
    first = comparison.first
    assert first is not None
    assert first.first_step > 1
    assert comparison.worst_metric is not None
    assert comparison.worst_metric.difference < 1e-2
    assert comparison.logprob_difference < 0.2

    # Looked up in the journals themselves.
    pairs = list(zip(sampled_ids(folder / "runs/halves"), sampled_ids(folder / "runs/halves-packed"), strict=True))  # fmt: skip
    place = next(index for index, (answer, other) in enumerate(pairs) if answer != other)
    answer, other = pairs[place]
    assert place // 16 == first.first_step - 1
    assert (first.prompt, first.sample) == answer[:2]
    assert first.position is not None
    assert answer[2][: first.position] == other[2][: first.position]
    assert first.drawn is not None
    assert first.other_drawn is not None
    assert first.drawn.id == answer[2][first.position]
    assert first.other_drawn.id == other[2][first.position]
    assert first.drawn.id != first.other_drawn.id


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "fsdp", "tensor"])
def test_two_ranks_with_several_updates_and_a_reference_are_one_process(
    folder: Path, layout: str
) -> None:
    more = ("rollout.updates=2", "rollout.passes=2", "objective.beta=0.05", "objective.kl_in=reward")  # fmt: skip
    alone = run(folder, f"alone-{layout}", *more)
    records = run(folder, f"{layout}-several", *more, *LAYOUTS[layout], world=2)
    assert sampled_ids(folder / f"runs/{layout}-several") == sampled_ids(
        folder / f"runs/alone-{layout}"
    )
    for got, expected in zip(records, alone, strict=True):
        assert {key: got[key] for key in SAME} == pytest.approx(
            {key: expected[key] for key in SAME}, rel=1e-3, abs=2e-5
        )


def test_a_rank_without_answers_takes_part(folder: Path) -> None:
    """Two short answers fit into one row, which one of the ranks has."""
    small = (
        "rollout.prompts=1", "rollout.samples=2", "rollout.passes=2", "data.seq_len=256", "steps=2", "eval.every=null",
    )  # fmt: skip
    alone = run(folder, "little", *small, "batch.micro_rows=1")
    both = run(folder, "little2", *small, "batch.micro_rows=1", world=2)
    assert sampled_ids(folder / "runs/little") == sampled_ids(folder / "runs/little2")
    for got, expected in zip(both, alone, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], abs=1e-5)


# ---- mistakes


MISTAKES = {
    "reward is set, but objective next_token": ("objective.kind=next_token",),
    "reward is empty": ("reward=[]",),
    "rollout.samples is 1": ("rollout.samples=1",),
    "data.train is null": ("data.train=null", "data.valid=null"),
    "data.seq_len is 8": ("data.seq_len=8",),
    "batch.rows is set": ("batch.rows=8",),
    "batch.tokens is set": ("batch.tokens=800",),
    "batch.accumulate is set": ("batch.accumulate=2",),
    "batch.micro_rows=auto": ("batch.micro_rows=auto",),
    "rollout.refill is set": ("rollout.refill=2", "steps=null", "epochs=1"),
    "heal rolls back": ("rollout.updates=2", "heal.on_spike=rollback"),
    "other weights than it gives out": ("optim.kind=schedule_free",),
    "compares with the base under the adapter": (
        "objective.beta=0.1",
        "adapter.rank=4",
        "train=[model.norm]",
    ),
    "prompts=4 and updates=3": ("rollout.updates=3",),
    "valid_samples=2 and valid_temperature=0": ("rollout.valid_samples=2",),
    "algorithm": ("objective.algorithm=ppo",),
    "rollout.top_k": ("rollout.top_k=1025",),
    "rollout.top_p": ("rollout.top_p=0",),
    "rollout.min_p": ("rollout.min_p=1.5",),
    "has no prompt of at most": ("data.seq_len=24", "rollout.max_new_tokens=16"),
    "must not exceed model.max_seq_len": ("rollout.max_new_tokens=300", "data.seq_len=512"),
    "needs whole rows": ("parallel.context=2",),
    "objective.teacher": ("objective.teacher=$/nowhere",),
    "objective.reference": ("objective.reference=$/nowhere", "objective.beta=0.1"),
    "nowhere.jsonl": ("data.train=[{path: $/nowhere.jsonl, kind: prompt}]",),
    "nowhere.py": ("reward=$/nowhere.py",),
    "checkpoint.metric is 'loss2'": ("checkpoint.metric=loss2",),
    "gold": ("reward=[{kind: math, column: gold}]",),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_sampled(folder: Path, words: str) -> None:
    with pytest.raises(HeadwayError) as refusal:
        run(folder, "mistaken", *MISTAKES[words])
    assert words in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    assert not (folder / "runs" / "mistaken" / FILE).exists()


def test_a_schedule_that_begins_between_updates_is_refused(folder: Path, plain: Records) -> None:
    begin = ("init.from=$/runs/plain/checkpoints/step-00000002", "init.content=[model, scheduler]")
    with pytest.raises(HeadwayError, match="the run begins at step 2; a rollout has 3 updates"):
        run(folder, "between", *begin, "rollout.passes=3", "steps=8")
    records = run(folder, "continued", *begin, "rollout.passes=2", "steps=4")
    assert [record["step"] for record in records] == [3, 4]
    assert [sampled.version for sampled in journal_of(folder / "runs/continued")] == [2]


def test_an_empty_file_of_prompts_is_refused(folder: Path) -> None:
    (folder / "none.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(HeadwayError, match=r"none\.jsonl"):
        run(folder, "none", "data.train=[{path: $/none.jsonl, kind: prompt}]")


def test_prompts_longer_than_a_row_are_left_out_with_a_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"question": "1" * 400, "answer": "1"}
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8") + json.dumps(long) + "\n"
    (folder / "long.jsonl").write_text(lines, encoding="utf-8")
    run(folder, "long", "data.train=[{path: $/long.jsonl, kind: prompt, chat_template: alpaca}]", "steps=1")  # fmt: skip
    assert "1 prompts are left out: 1 leave no room" in caplog.text
