"""Which masks are exported and measured: what `workflows/sparsify.py` takes, and the options of
`headway sparsify`.

A module of its own, because the command line imports it for every help, without numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.config.options import inner_options, option
from headway.eval.options import LongQuestions, parse_lengths
from headway.model.head_masks.choice import (
    EQUAL_PER_LAYER,
    RANDOM_DRAWS,
    RANDOM_DRAWS_HELP,
    parse_sparsities,
)


def _lengths(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    return parse_lengths(text)


@dataclass(frozen=True)
class SparsifyPlan:
    """The masks to export and the measurements to make."""

    sparsities: tuple[float, ...] = option(
        (),
        "Shares of streaming heads to export and measure (0.5,0.7); default: objective.target.",
        written=None,
        read=parse_sparsities,
    )
    tasks: tuple[str, ...] = option(
        ("key_value",),
        "Tasks, comma separated; `headway eval long --help` lists them.",
        written="key_value",
        read=lambda text: tuple(text.split(",")),
    )
    lengths: tuple[int, ...] = option(
        (),
        "Tokens of the prompts (4096 or 4k), comma separated; default: data.seq_len.",
        written=None,
        read=_lengths,
    )
    random: bool = option(
        True,
        "Also measure random masks with as many heads.",
        "--random-masks/--no-random-masks",
    )
    random_draws: int = option(RANDOM_DRAWS, RANDOM_DRAWS_HELP)
    simple: bool = option(
        True,
        "Also measure simple masks: the best heads of each layer, the first of each, windows "
        "everywhere.",
        "--simple-masks/--no-simple-masks",
    )
    equal_per_layer: bool = option(False, *EQUAL_PER_LAYER)
    masks: str | None = option(
        None,
        "Also measure these masks: own (where the gates ended) or a file; default: none.",
        metavar="own|none|FILE",
    )
    data: tuple[str, ...] = option(
        (), "Also score this text by tokens of context; may be repeated.", "--data", "--input"
    )
    questions: LongQuestions = inner_options(LongQuestions())
