"""The decode kernel equals the plain reference, in Triton's interpreter; on a GPU tests/gpu has the same claim for the compiled one."""

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from support.decode_case import case

from headway.kernels.decode_attention import DecodePlan, decode_reference


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter cannot loop with numpy 2.4")
def test_the_kernel_equals_the_reference_in_the_interpreter() -> None:
    code = "from support.decode_case import REGIONS, gaps\n" + (
        "for name in REGIONS:\n"
        "    for head_size, groups in ((16, 1), (24, 3), (64, 4)):\n"
        "        gap, same = gaps(name, head_size, groups)\n"
        "        assert gap < 1e-5 and same, (name, head_size, groups, gap, same)\n"
        "gap, same = gaps('mixed', 16, 1, shared=True)\n"
        "assert gap < 1e-5 and same, ('shared', gap, same)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_plan_covers_every_slot_once_and_cuts_long_regions() -> None:
    regions = [(0, 1, 4, 1000, 1 << 30), (8000, 0, 0, 300_000, 1 << 30)]
    plan = DecodePlan.of(regions, 8, 2, 4, torch.device("cpu"))
    assert plan.stretch == 640
    assert plan.heads.tolist() == [[2, 469, 300_000, 0], [0, 2, 1004, 0]]
    assert plan.items[:, 5].tolist() == [0, 640, *range(0, 300_000, 640)]


def test_the_reference_sees_what_a_ring_keeps() -> None:
    q, k, v, keys, values, position, plan = case("mixed", 16, 1)
    o = decode_reference(q, k, v, keys, values, position, plan)
    assert torch.equal(o[0, 0], v[0, 0]), "a first token sees itself"
    assert not torch.isnan(o).any()
