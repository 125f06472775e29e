"""Speculative decoding gives the text of single steps: greedy and sampled, in a batch, under head masks, with reused prefixes."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineEvent, EngineOptions, EngineRequest, Speculation
from headway.infer.engine.sequence import EngineSequence
from headway.infer.engine.speculate import NgramProposer, Speculator
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.model.head_masks.masks import HeadMasks

LONG = CONFIG.with_(max_seq_len=160)
MASKS = {
    "dense": None,
    "masks": HeadMasks(((True, False), (False, False)), window=6, sinks=2),
    "nothing full": HeadMasks(((False, False), (False, False)), window=10, sinks=3),
}
THREE = ((64, 30.0), (65, 30.0), (66, 30.0))
"""Biases that leave three tokens, so that runs of them come again."""
SAMPLINGS = (
    Sampling(logit_bias=THREE),
    Sampling(1.0, seed=5, logit_bias=THREE),
    Sampling(0.6, top_k=5, top_p=0.9, seed=6),
    Sampling(),
)
OPTIONS = EngineOptions(max_running=4, prefill_tokens=32, page_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), LONG)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the model: it agrees now and then."""
    return write_model(tmp_path_factory.mktemp("draft"), LONG.with_(num_layers=1))


def requests(loaded: LoadedModel, count: int = 16) -> list[EngineRequest]:
    """Rows of different lengths, greedy and sampled ones in one batch."""
    assert loaded.tokenizer is not None
    texts = [
        "abcabcabcabcabc",
        "the cat sat on the mat, the cat sat",
        "x",
        "abcabcabcabcabcab",
        "one two three one two",
        "zzzzzzzzzz",
    ]
    return [
        EngineRequest(
            tuple(loaded.tokenizer.encode(text)),
            count - number,
            SAMPLINGS[number % 4],
            key=str(number),
        )
        for number, text in enumerate(texts)
    ]


def collect(
    engine: InferenceEngine, wanted: Sequence[EngineRequest]
) -> list[tuple[list[int], EngineEvent]]:
    numbers = [engine.submit(request) for request in wanted]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    last: dict[int, EngineEvent] = {}
    while engine.busy:
        for event in engine.step():
            tokens[event.request] += event.tokens
            if event.finished is not None:
                last[event.request] = event
    return [(tokens[number], last[number]) for number in numbers]


def spoken(answers: Sequence[tuple[list[int], EngineEvent]]) -> list[tuple[list[int], str | None]]:
    return [(tokens, event.finished) for tokens, event in answers]


def with_(options: EngineOptions, **changes: object) -> EngineOptions:
    from dataclasses import replace

    return replace(options, **changes)  # pyright: ignore[reportArgumentType]


class Wrong:
    """Guesses that are never right: the token before, plus one."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def propose(self, rows: Sequence[EngineSequence], counts: Sequence[int]) -> list[list[int]]:
        self.counts += counts
        return [
            [(row.tokens[-1] + 1) % 250] * count for row, count in zip(rows, counts, strict=True)
        ]

    def warm_up(self) -> None: ...


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> dict[str, list[tuple[list[int], str | None]]]:
    """What single steps give, under each of the masks."""
    wanted = requests(loaded)
    return {
        name: spoken(collect(InferenceEngine(loaded.with_masks(masks), OPTIONS), wanted))
        for name, masks in MASKS.items()
    }


@pytest.mark.parametrize(
    ("kind", "masks"),
    [
        *((kind, masks) for kind in ("ngram", "draft") for masks in MASKS),
        ("itself", "dense"),
        ("wrong", "masks"),
    ],
)
def test_the_tokens_are_those_of_single_steps(
    loaded: LoadedModel,
    folder: Path,
    draft: Path,
    plain: dict[str, list[tuple[list[int], str | None]]],
    kind: str,
    masks: str,
) -> None:
    wanted = requests(loaded)
    path = {"draft": str(draft), "itself": str(folder)}.get(kind)
    engine = InferenceEngine(
        loaded.with_masks(MASKS[masks]), with_(OPTIONS, speculation=Speculation(path, 5))
    )
    if kind == "wrong":
        engine._speculator = Speculator(Wrong(), 8)  # pyright: ignore[reportPrivateUsage]
    answers = collect(engine, wanted)
    assert spoken(answers) == plain[masks]
    for _ in range(
        2
    ):  # the second time its prompt comes from the prefix cache, with the rings that were kept there
        again = collect(engine, [wanted[1]])
        assert spoken(again) == plain[masks][1:2]
        answers += again
    stats = engine.stats()
    assert stats.cached_tokens > 0
    assert stats.proposed_tokens > 0
    assert stats.proposed_tokens == sum(event.proposed_tokens for _, event in answers)
    assert stats.accepted_tokens == sum(event.accepted_tokens for _, event in answers)
    if kind == "itself":  # the same logits and the same draws: every guess is right
        assert stats.accepted_tokens == stats.proposed_tokens
        assert stats.steps < 0.6 * stats.generated_tokens


def test_guesses_become_fewer_where_they_are_wrong(loaded: LoadedModel) -> None:
    engine = InferenceEngine(loaded, with_(OPTIONS, speculation=Speculation(None, 8)))
    wrong = Wrong()
    engine._speculator = Speculator(wrong, 8)  # pyright: ignore[reportPrivateUsage]
    collect(engine, [EngineRequest((1, 2, 3), 14)])
    assert wrong.counts[:4] == [8, 4, 2, 1]
    assert max(wrong.counts[3:]) == 1


def test_preempted_requests_are_the_same(loaded: LoadedModel, draft: Path) -> None:
    wanted = requests(loaded, 32)
    plain = collect(InferenceEngine(loaded, OPTIONS), wanted)
    page = InferenceEngine(loaded, OPTIONS).cache.shape.page_bytes
    for path in (None, str(draft)):
        budget = with_(
            OPTIONS,
            cache_bytes=(10 if path is None else 15) * page,
            prefix_reuse=False,
            speculation=Speculation(path, 4),
        )
        engine = InferenceEngine(loaded, budget)
        assert spoken(collect(engine, wanted)) == spoken(plain)
        assert engine.stats().preempted > 0
        held = engine.cache.num_bytes
        if path is not None:
            held += engine._speculator.proposer._cache.num_bytes  # pyright: ignore
        assert held <= (budget.cache_bytes or 0)


def test_requests_that_need_more_than_a_draw_have_no_guesses(loaded: LoadedModel) -> None:
    base = requests(loaded)[0]
    special = [
        EngineRequest(base.prompt, 12, Sampling(1.0, repetition_penalty=1.3, seed=2), key="a"),
        EngineRequest(base.prompt, 12, Sampling(), key="b", logprobs=2),
        EngineRequest(base.prompt, 12, Sampling(), key="c"),
    ]
    plain = collect(InferenceEngine(loaded, OPTIONS), special)
    engine = InferenceEngine(loaded, with_(OPTIONS, speculation=Speculation(None, 4)))
    engine._speculator = Speculator(Wrong(), 4)  # pyright: ignore[reportPrivateUsage]
    answers = collect(engine, special)
    assert spoken(answers) == spoken(plain)
    assert [event.proposed_tokens > 0 for _, event in answers] == [False, False, True]


def test_the_distribution_is_the_models(tmp_path: Path) -> None:
    """Chi-square of three sampled tokens, two of them guessed, over the eight outcomes that a top-k of 2 leaves."""

    class Likeliest:
        def propose(self, rows: Sequence[EngineSequence], counts: Sequence[int]) -> list[list[int]]:
            begun = [row.tokens[len(prompt) :] for row in rows]
            paths = [
                next(path for path in outcomes if list(path[: len(some)]) == some) for some in begun
            ]
            return [
                list(path[len(some) :])[:count]
                for path, some, count in zip(paths, begun, counts, strict=True)
            ]

        def warm_up(self) -> None: ...

    model = load_model(write_model(tmp_path, LONG.with_(init_std=0.2)))
    assert model.tokenizer is not None
    prompt = tuple(model.tokenizer.encode("abab"))
    count = 600
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for path, chance in outcomes.items():
            ids = torch.tensor([[*prompt, *path]])
            hidden = model.model.hidden_states(ids, torch.arange(ids.shape[1])[None])[0, -1]
            top = model.model.logits(hidden[None])[0, : model.tokenizer.vocab_size].float().topk(2)
            longer |= {
                (*path, int(t)): chance * float(p)
                for t, p in zip(top.indices, top.values.softmax(-1), strict=True)
            }
        outcomes = longer
    options = EngineOptions(
        max_running=64,
        page_tokens=8,
        speculation=Speculation(None, 2),
        max_context=16,
        prefix_reuse=False,
    )
    engine = InferenceEngine(model, options)
    engine._speculator = Speculator(Likeliest(), 2)  # pyright: ignore[reportPrivateUsage]
    wanted = [
        EngineRequest(prompt, 3, Sampling(1.0, top_k=2), key=str(number), ignore_eos=True)
        for number in range(count)
    ]
    seen = Counter(tuple(tokens) for tokens, _ in collect(engine, wanted))
    assert set(seen) <= set(outcomes)
    chi = sum(
        (seen[path] - count * chance) ** 2 / (count * chance) for path, chance in outcomes.items()
    )
    assert chi < 24.3  # 7 degrees of freedom, p = 0.001
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.proposed_tokens


def test_ngrams_continue_what_repeats() -> None:
    def guess(tokens: list[int], count: int) -> list[int]:
        engine_sequence = EngineSequence(0, EngineRequest(tuple(tokens), 9), 99, frozenset())
        return NgramProposer().propose([engine_sequence], [count])[0]

    assert guess([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5]
    assert guess([7, 8, 7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]
    assert guess([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 1) == [9]  # the longest match first
    assert guess([1, 2, 3], 4) == []
    assert guess([5], 4) == []


def test_ngrams_find_the_same_token_by_token() -> None:
    tokens = torch.randint(0, 3, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    engine_sequence = EngineSequence(0, EngineRequest((tokens[0],), 99), 99, frozenset())
    slow = NgramProposer()
    for token in tokens[1:]:
        engine_sequence.tokens.append(token)
        fresh = EngineSequence(0, EngineRequest(tuple(engine_sequence.tokens), 9), 99, frozenset())
        assert slow.propose([engine_sequence], [4]) == NgramProposer().propose([fresh], [4])


def test_a_draft_of_another_tokenizer_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    other = write_model(tmp_path, LONG, byte_tokenizer("<|im_end|>"))
    with pytest.raises(ConfigError, match="tokenizer is not that of"):
        InferenceEngine(loaded, with_(OPTIONS, speculation=Speculation(str(other), 4)))
    for tokens in (0, 33):
        with pytest.raises(ConfigError, match="--speculate-tokens"):
            Speculation(None, tokens)
