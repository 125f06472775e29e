"""What a run must not pay for at its start."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from headway.cli import main
code = main(sys.argv[1:])
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "transformers") if name in sys.modules])
sys.exit(code)
"""


def test_a_run_without_the_compiler_does_not_load_it(tmp_path: Path) -> None:
    small = (
        "model.hidden_size=16",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.ffn_size=16",
        "data.seq_len=32",
        "batch.rows=2",
    )
    given = ("train", *small, "steps=1", "device=cpu", f"run.dir={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-c", CODE, *given],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
