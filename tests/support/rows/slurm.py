"""What `headway launch slurm` asks of SLURM; the sbatch script shows each."""

from pathlib import Path
from typing import Any

from headway.config.load import load
from headway.launch.slurm_script import ScriptParts, write_script
from headway.train.config import Recipe
from support.setting_runs import Row


def script(overrides: tuple[str, ...]) -> Any:
    settings = load(Recipe, None, list(overrides)).launch.slurm
    return write_script(ScriptParts(settings, "run", Path("/runs/run"), Path("/home/me")))


IMAGE = ("launch.slurm.container=/images/headway.sif",)

ROWS: dict[str, Row] = {
    "launch.slurm.partition": ((), None, "gpu", script),
    "launch.slurm.account": ((), None, "lab", script),
    "launch.slurm.qos": ((), None, "high", script),
    "launch.slurm.nodes": ((), 1, 2, script),
    "launch.slurm.gpus_per_node": ((), None, 8, script),
    "launch.slurm.nproc": ((), None, 4, script),
    "launch.slurm.time": ((), None, "48:00:00", script),
    "launch.slurm.cpus": ((), None, 16, script),
    "launch.slurm.mem": ((), None, "500G", script),
    "launch.slurm.setup": ((), [], ["module load cuda"], script),
    "launch.slurm.container": ((), None, "/images/headway.sif", script),
    "launch.slurm.container_runtime": (IMAGE, "apptainer", "pyxis", script),
    "launch.slurm.container_mounts": (IMAGE, [], ["/data"], script),
    "launch.slurm.python": ((), None, "/opt/python3", script),
    "launch.slurm.signal_seconds": ((), 300, 120, script),
    "launch.slurm.requeue": ((), True, False, script),
    "launch.slurm.max_restarts": ((), 5, 9, script),
    "launch.slurm.sbatch": ((), [], ["constraint=h100"], script),
}  # fmt: skip
