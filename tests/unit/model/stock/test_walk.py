"""Every decoder of transformers is used and trained exactly, or refused with a reason: docs/support.md has the list, made by this walk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.stock_walk import GRADIENTS, LOGITS, Verdict, judge, kinds, page

pytest.importorskip("transformers", minversion="5.0")
SUPPORT = Path(__file__).parents[4] / "docs/support.md"
BEGIN = "<!-- made by tests/unit/model/stock/test_walk.py: begin -->\n"
END = "<!-- end -->\n"
QUICK = (
    "apertus",  # numbers that are stored and never trained
    "bert",  # a head between other modules, its bias shared
    "dbrx",  # experts that ask for values
    "diffllama",  # two calls of attention in a layer
    "gemma4_text",  # heads of two widths, keys of another layer
    "gpt_oss",  # sinks, stacked experts with biases
    "longcat_flash",  # two attentions and experts of no work in a layer
    "qwen2_moe",  # experts one by one in the folder
    "roberta",  # positions that do not begin at 0
)


def check(verdict: Verdict) -> None:
    assert verdict.use is None, verdict.use
    assert verdict.train is None, verdict.train
    assert verdict.logits < LOGITS
    assert verdict.gradients < GRADIENTS


@pytest.mark.parametrize("kind", QUICK)
def test_a_class_with_an_unusual_form_is_used_and_trained_exactly(kind: str) -> None:
    check(judge(kind))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_list_of_classes_in_the_documentation_is_what_the_walk_finds() -> None:
    import transformers

    verdicts = [judge(kind) for kind in kinds()]
    for verdict in verdicts:
        sys.stdout.write(
            f"{verdict.kind:24} logits {verdict.logits:.1e}, gradients {verdict.gradients:.1e}\n"
        )
        if verdict.use is None:
            assert verdict.logits < LOGITS
    text = SUPPORT.read_text(encoding="utf-8")
    listed = text.partition(BEGIN)[2].partition(END)[0]
    if f"transformers {transformers.__version__} has" not in listed:
        pytest.skip("the list is of another version of transformers")
    made = page(verdicts)
    sys.stdout.write(made)
    assert listed == made
