"""Every Triton kernel equals its plain reference, in Triton's interpreter; on a GPU tests/gpu has the same claims for the compiled ones."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

NAMES = (
    "adamw",
    "paged_attention",
    "cached_chunk",
    "softmax_gradient",
    "vocab_loss",
    "merge",
    "unpack",
)


def missing() -> str:
    """Why the interpreter cannot run here; empty if it can."""
    try:
        number = tuple(map(int, version("triton").split(".")[:2]))
    except PackageNotFoundError:
        return "triton is not installed: pip install -e '.[triton-test]'"
    if number < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return "the interpreter of triton before 3.7 cannot loop with numpy 2.4"
    return ""


@pytest.fixture(scope="module")
def differences() -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "support.triton_cases"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("name", NAMES)
def test_the_triton_form_equals_its_reference_in_the_interpreter(
    differences: dict[str, str], name: str
) -> None:
    assert set(differences) == set(NAMES)
    assert differences[name] == ""
