"""The daemons that the other cluster tests use."""

import subprocess

import pytest
from support.daemons import find_program
from support.slurm_cluster import Cluster
from support.ssh_servers import SshHosts

pytestmark = pytest.mark.cluster


def test_slurm_runs_a_task_on_each_of_two_nodes(slurm: Cluster) -> None:
    shown = slurm.run("srun", "--nodes=2", "--ntasks-per-node=1", "printenv", "SLURMD_NODENAME")
    assert sorted(shown.split()) == ["hwnode1", "hwnode2"]


def test_an_ssh_server_lets_this_user_in_with_a_key_alone(ssh: SshHosts) -> None:
    program = find_program("ssh")
    assert program is not None
    for name in ssh.names:
        host, _, port = name.partition(":")
        done = subprocess.run(
            [program, "-F", str(ssh.config), "-p", port, host, "echo here"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
