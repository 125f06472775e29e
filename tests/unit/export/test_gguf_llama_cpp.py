"""llama.cpp computes the same logits and greedy text from a GGUF file as headway does; where llama-cpp-python is at hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.gguf_cases import CASES, WHOLE_BLOCKS, gguf_config, gguf_folder
from support.llama_cpp import judge_python, judged

from headway.export.gguf_writer import GgufType, export_gguf
from headway.infer.load import load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(judge_python() is None, reason="no llama-cpp-python: support/llama_cpp.py"),
]
PROMPT = [(index * 7) % 300 + 3 for index in range(30)]
NEW = 8
PLAIN = 1e-3
"""Of fp32 files: ggml computes gelu from a table of 16 bits."""
QUANTISED = 0.05
"""llama.cpp rounds activations to 8 bits, too."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@torch.no_grad()
def ours(file: Path) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt, and the greedy tokens behind it."""
    model = load_model(file).model
    ids = list(PROMPT)
    first = torch.zeros(0)
    for step in range(NEW):
        position = torch.arange(len(ids))[None]
        logits = model.logits(model.hidden_states(torch.tensor([ids]), position))[0]
        if step == 0:
            first = logits
        ids.append(int(logits[-1].argmax()))
    return first, ids[len(PROMPT) :]


def compare(file: Path, label: str) -> float:
    """How far logits are apart, relative to the largest; greedy text must be the same."""
    theirs, text = judged(file, PROMPT, NEW)
    logits, mine = ours(file)
    wanted = torch.tensor(theirs)
    gap = float((logits - wanted).abs().max() / wanted.abs().max())
    sys.stdout.write(f"{label:24} logits {gap:.1e}\n")
    assert mine == text
    return gap


@pytest.mark.parametrize("family", CASES)
def test_llama_cpp_computes_the_same_text(family: str, tmp_path: Path) -> None:
    folder = gguf_folder(gguf_config(family), tmp_path)
    assert compare(export_gguf(folder, tmp_path / "m.gguf", kind="f32").out, family) < PLAIN


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("kind", ["q4_k_m", "q5_k_m", "q6_k", "q8_0"])
def test_llama_cpp_reads_quantised_files_as_they_were_meant(
    kind: GgufType, family: str, tmp_path: Path
) -> None:
    folder = gguf_folder(gguf_config(family, **WHOLE_BLOCKS), tmp_path, spread=0.04)
    file = export_gguf(folder, tmp_path / "m.gguf", kind=kind).out
    assert compare(file, f"{family} {kind}") < QUANTISED
