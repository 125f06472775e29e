"""llama.cpp as a judge of GGUF files: greedy tokens and logits of a file, computed by llama-cpp-python.

Its build takes minutes, so it is no package of the developers. `LLAMA_CPP_PYTHON` names a Python that has it:

    python3 -m venv /tmp/judge && /tmp/judge/bin/pip install llama-cpp-python
    LLAMA_CPP_PYTHON=/tmp/judge/bin/python pytest tests/unit/export/test_gguf_llama_cpp.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SCRIPT = """
import json, sys
import numpy as np
from llama_cpp import Llama
path, ids, new = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = Llama(path, n_ctx=len(ids) + new, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0, flash_attn=False)
model.eval(ids)
prompt = np.array(model.scores[: len(ids)]).tolist()
text = []
for _ in range(new):
    text.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    model.eval(text[-1:])
print(json.dumps({"logits": prompt, "text": text}))
"""


def judge_python() -> str | None:
    """A Python with llama-cpp-python; None: there is none."""
    named = os.environ.get("LLAMA_CPP_PYTHON")
    if named:
        return named
    return sys.executable if find_spec("llama_cpp") is not None else None


def judged(file: Path, ids: list[int], new: int) -> tuple[list[list[float]], list[int]]:
    """Logits of a prompt, and the greedy tokens behind it."""
    python = judge_python()
    assert python is not None, "llama-cpp-python is missing"
    done = subprocess.run(
        [python, "-c", SCRIPT, str(file), json.dumps(ids), str(new)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    return result["logits"], result["text"]
