"""Where `headway launch` starts a run."""

from typing import Any

from headway.cli._launch import JobOptions
from headway.config.load import load
from headway.launch.targets.ssh import plan_ssh
from headway.train.config import Recipe
from support.setting_runs import Row

HERE = ("launch.ssh.hosts=[a]", "launch.ssh.master=a")


def ssh(overrides: tuple[str, ...]) -> Any:
    settings = load(Recipe, None, list(overrides)).launch.ssh
    return plan_ssh(settings), settings.nproc, JobOptions.named(settings.env, "launch.ssh.env")


ROWS: dict[str, Row] = {
    "launch.ssh.hosts": (HERE[1:], ["a"], ["a", "me@b:2222"], ssh),
    "launch.ssh.nproc": (HERE, None, 4, ssh),
    "launch.ssh.python": (HERE, None, "/opt/python", ssh),
    "launch.ssh.workdir": (HERE, None, "/data/me", ssh),
    "launch.ssh.config": (HERE, None, __file__, ssh),
    "launch.ssh.master": (HERE[:1], "10.0.0.1", "10.0.0.1:29500", ssh),
    "launch.ssh.env": (HERE, [], ["PATH"], ssh),
}
