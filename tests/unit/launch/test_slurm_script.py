"""The sbatch script and the settings it is made from."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headway.config.load import load
from headway.errors import ConfigError
from headway.launch.slurm_plan import Submission, plan_submission, read_elements
from headway.launch.slurm_script import ScriptParts, write_script
from headway.launch.targets.base import Job
from headway.train.config import Recipe
from headway.train.slurm_config import SlurmConfig, minutes_of

FULL = SlurmConfig(
    partition="gpu", account="lab", qos="high", nodes=4, gpus_per_node="h100:8", time="2-00:00:00", cpus=64, mem="500G",
    setup=("module load cuda", 'export GREETING="a b"'), sbatch=("constraint=h100", "exclusive"),
)  # fmt: skip


def words_of(text: str, begin: str) -> list[str]:
    """The words of the command that begins so, with continued lines joined."""
    joined = text.replace("\\\n", " ")
    return shlex.split(next(line for line in joined.splitlines() if line.startswith(begin)))


def script(settings: SlurmConfig, **changes: object) -> str:
    return write_script(
        ScriptParts(settings, "my/run", Path("/runs/run"), Path("/home/me"), **changes)
    )  # pyright: ignore[reportArgumentType]


def test_the_header_asks_slurm_for_what_the_settings_say() -> None:
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script(FULL), flags=re.M))
    assert asked == {
        "job-name": "my-run", "partition": "gpu", "account": "lab", "qos": "high", "nodes": "4", "ntasks-per-node": "1",
        "gpus-per-node": "h100:8", "cpus-per-task": "64", "mem": "500G", "time": "2-00:00:00", "output": "/runs/run/logs/slurm-%j.out",
        "open-mode": "append", "signal": "B:USR1@300", "requeue": "", "constraint": "h100", "exclusive": "",
    }  # fmt: skip


def test_a_script_is_valid_and_starts_one_launcher_per_node() -> None:
    text = script(FULL)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    words = words_of(text, "exec")
    srun = words[words.index("--") + 1 :]
    assert srun[:4] == ["srun", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1"]
    assert srun[srun.index("-P") - 1 :] == shlex.split(
        f"{sys.executable} -P -m headway train --nnodes 4 --nproc 8 '$recipe'"
    )
    lines = text.splitlines()
    assert lines.index("module load cuda") < lines.index("set -u"), (
        "module and conda read variables that are not set"
    )
    assert lines.index("set -eo pipefail") < lines.index("module load cuda")


def test_ranks_run_in_a_container_and_the_rest_outside() -> None:
    settings = {
        "container": "/images/hw.sif",
        "container_mounts": ("/data:/data",),
        "gpus_per_node": 8,
    }
    words = words_of(script(SlurmConfig(**settings)), "exec")  # pyright: ignore[reportArgumentType]
    index = words.index("apptainer")
    assert words[index : index + 11] == [
        "apptainer", "exec", "--nv", "--bind", "/home/me", "--bind", "/runs/run", "--bind", "/data:/data", "--pwd", "/home/me",
    ]  # fmt: skip
    assert words[index + 11 : index + 14] == ["/images/hw.sif", "python3", "-P"]
    assert words[1] == sys.executable
    pyxis = words_of(script(SlurmConfig(**settings, container_runtime="pyxis")), "exec")  # pyright: ignore[reportArgumentType]
    assert "--container-image=/images/hw.sif" in pyxis
    assert "apptainer" not in pyxis
    assert "--container-mounts=/home/me:/home/me,/runs/run:/runs/run,/data:/data" in pyxis


def test_an_element_of_an_array_has_its_own_recipe_and_run_folder() -> None:
    text = script(SlurmConfig(), num_elements=12, at_once=3)
    assert "#SBATCH --array=0-11%3" in text
    assert "slurm-%A_%a.out" in text
    assert 'recipe="/runs/run/launch/recipe-$SLURM_ARRAY_TASK_ID.yaml"' in text
    assert '"/runs/run/$SLURM_ARRAY_TASK_ID"' in text


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("2:30", 2.5),
        ("48:00:00", 2880),
        ("1-0", 1440),
        ("1-2:30", 1590),
        ("1-2:30:30", 1590.5),
        ("soon", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, minutes: float | None) -> None:
    assert minutes_of(text) == minutes


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launch.slurm.time=4", "signal_seconds is 300"),
        ("launch.slurm.time=tomorrow", "must be minutes"),
        ("launch.slurm.partition='a b'", "one word"),
        ("launch.slurm.partition='a\n#SBATCH --x'", "one word"),
        ("launch.slurm.gpus_per_node=many", "TYPE:NUMBER"),
        ("launch.slurm.gpus_per_node=0", "must be a number of GPUs"),
        ("launch.slurm.sbatch=['signal=USR2']", "has an option of its own"),
        ("launch.slurm.sbatch=['comment=a b']", "without spaces"),
        ('launch.slurm.setup=["a\\nb"]', "line break"),
    ],
)
def test_a_value_that_would_break_the_script_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(Recipe, None, [override])


def test_override_sets_come_from_words_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text(
        "# rates\noptim.lr=1e-3 seed=1\n\ndata.train='[a b]'  # one word\n"
    )
    assert read_elements(["seed=7", str(tmp_path / "sweep.txt")]) == (
        ("seed=7",),
        ("optim.lr=1e-3", "seed=1"),
        ("data.train=[a b]",),
    )
    for wrong, said in ((["seed"], "neither"), (["seed=1 fast"], "'fast'"), (["'seed=1"], "split")):
        with pytest.raises(ConfigError, match=said):
            read_elements(wrong)


def planned(tmp_path: Path, how: Submission, *overrides: str, text: str = "") -> dict[str, str]:
    recipe = tmp_path / "recipe.yaml"
    settings = f"run: {{dir: {tmp_path}/runs}}\nsteps: 2\nmodel: {{preset: laptop}}\ndata: {{seq_len: 64}}\nbatch: {{rows: 4}}\n"
    recipe.write_text(settings + text)
    plan = plan_submission(Job(recipe, tmp_path / "runs" / "run", overrides), how)
    return {str(path.relative_to(plan.run_dir)): content for path, content in plan.files.items()}


def test_a_plan_keeps_the_recipe_as_it_was_when_the_job_was_submitted(tmp_path: Path) -> None:
    files = planned(tmp_path, Submission(), "steps=7")
    (tmp_path / "kept.yaml").write_text(files["launch/recipe.yaml"])
    assert load(Recipe, tmp_path / "kept.yaml").steps == 7
    assert not (tmp_path / "runs").exists()


def test_a_chain_has_a_recipe_for_each_stage_that_ends_with_it(tmp_path: Path) -> None:
    stages = "stages: [{name: one, steps: 1}, {name: two, steps: 2}]\n"
    files = planned(tmp_path, Submission(chain=True), text=stages)
    for number, names in ((1, ["one"]), (2, ["one", "two"])):
        (tmp_path / "kept.yaml").write_text(files[f"launch/recipe-stage-{number}.yaml"])
        assert [stage.name for stage in load(Recipe, tmp_path / "kept.yaml").stages] == names


def test_what_does_not_fit_the_ranks_or_a_folder_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    for how, overrides, said in (
        (Submission(SlurmConfig(nodes=3)), (), "batch.rows"),
        (Submission(SlurmConfig(nodes=2)), ("parallel.tensor=3",), "parallel"),
        (Submission(), ("data.train=[/no/such]",), "no such file"),
        (Submission(elements=(("steps=1",), ("steps=x",))), (), "--array element 1"),
        (Submission(elements=(("run.name=x",),)), (), "its own run folder"),
        (Submission(chain=True), (), "stages"),
    ):
        with pytest.raises(Exception, match=re.escape(said)):
            planned(tmp_path, how, *overrides)
    with pytest.raises(ConfigError, match="Rename it"):
        plan_submission(Job(tmp_path / "recipe.yaml", tmp_path / "a b"), Submission())
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
