"""Daemons of the cluster tests: `slurm` is a real SLURM on loopback, `ssh` two real ssh servers. Run by `make test-cluster`.

Where they cannot be had, pytest ends with the reason in one line. Under HEADWAY_CLUSTER_OPTIONAL=1, which .ci/run sets, they are skipped.
"""

import os
from collections.abc import Iterator, Mapping

import pytest
from support import slurm_cluster as slurm_daemons
from support import ssh_servers as ssh_daemons
from support.daemons import why_not
from support.slurm_jobs import JobRoom


def need(packages: Mapping[str, str]) -> None:
    """Have the packages, or end with one line."""
    reason = why_not(packages)
    if reason is not None and os.environ.get("HEADWAY_CLUSTER_OPTIONAL") == "1":
        pytest.skip(reason)
    if reason is not None:
        pytest.exit(f"make test-cluster cannot run here: {reason}", returncode=1)


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurm_daemons.Cluster]:
    """A SLURM with two nodes."""
    need(slurm_daemons.PACKAGES)
    with slurm_daemons.slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def ssh() -> Iterator[ssh_daemons.SshHosts]:
    """Two ssh servers."""
    need(ssh_daemons.PACKAGES)
    with ssh_daemons.ssh_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="session")
def room(
    slurm: slurm_daemons.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JobRoom]:
    """Data and the command line for jobs of that SLURM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield JobRoom(tmp_path_factory.mktemp("jobs"), slurm)
