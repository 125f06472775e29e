"""What one run compiles, the next one finds: the kernels of `kernels.compile` stay in the cache folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import make_stores, tiny_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_a_second_run_compiles_nothing_anew(tmp_path: Path) -> None:
    make_stores(tmp_path)
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "kept")}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        variables.pop(name, None)

    def train(name: str) -> set[Path]:
        settings = [*tiny_settings(tmp_path, name), "kernels.compile=true", "steps=2"]
        command = [sys.executable, "-m", "headway", "train", *settings]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return set((tmp_path / "kept" / "headway" / "kernels").glob("*/**/*.so"))

    first = train("first")
    assert first, "no kernel was left in the cache folder"
    assert train("second") == first
