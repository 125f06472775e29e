"""A real SLURM on loopback: munge, slurmctld and two slurmd, with their own configuration, key, ports and folder.

A SLURM that runs on this machine already is never touched: nothing is read from /etc, and every command gets SLURM_CONF.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.daemons import Daemons, find_program, free_ports, short_folder, wait_until

PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
}
NODES = ("hwnode1", "hwnode2")
DOWN_SECONDS = 10
HOLD_SECONDS = 2.5
KILL_SECONDS = 5
"""KillWait: between SIGTERM and SIGKILL."""

CONFIG = """\
ClusterName=headwaytest
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmctldTimeout=30
SlurmdTimeout={down}
KillWait={kill}
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def neighbouring_ports() -> tuple[int, int]:
    """Two free ports side by side: slurmd's ports are given as a range."""
    for _ in range(200):
        (first,) = free_ports(1)
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.1", first + 1))
            except OSError:
                continue
        return first, first + 1
    raise OSError("no two neighbouring ports are free")


class Cluster:
    """Controller and nodes of one test session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waiting: dict[str, float] = {}
        """Since when a job waits after it was queued again."""
        self.daemons = Daemons(folder)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in [
            name
            for name in self.environment
            if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"
        ]:
            del self.environment[name]

    def start(self) -> None:
        """Write the configuration and start everything; returns when both nodes are idle."""
        (self.folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        first, last = neighbouring_ports()
        names = f"{NODES[0][:-1]}[1-2]"
        filled = CONFIG.format(
            host=host,
            folder=self.folder,
            port=free_ports(1)[0],
            nodes=names,
            first=first,
            last=last,
            down=DOWN_SECONDS,
            kill=KILL_SECONDS,
        )
        (self.folder / "slurm.conf").write_text(filled)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        options = [
            f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")
        ]
        self.daemons.start(
            "munged",
            ["munged", "--foreground", f"--socket={self.folder}/munge.socket", *options],
            self.environment,
        )
        wait_until((self.folder / "munge.socket").exists, "munge")
        self.daemons.start("slurmctld", ["slurmctld", "-D", "-c"], self.environment)
        for node in NODES:
            self.start_node(node)
        try:
            wait_until(lambda: self.states().count("idle") == len(NODES), "both nodes idle")
        except TimeoutError as problem:
            raise TimeoutError(f"{problem}\n{self.daemons.output()}") from None

    def start_node(self, node: str) -> None:
        self.daemons.start(f"slurmd-{node}", ["slurmd", "-D", "-N", node], self.environment)

    def kill_node(self, node: str) -> None:
        """What a power cut does: the daemon of the node and every process of its jobs end at once."""
        daemon = self.daemons.running[f"slurmd-{node}"]
        doomed = [daemon.pid, *self.job_processes(node)]
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.daemons.running.pop(f"slurmd-{node}").wait()

    def job_processes(self, node: str) -> list[int]:
        """The processes of jobs on a node, by the variable that SLURM gives them, and the slurmstepd above them."""
        processes = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if (
                f"SLURMD_NODENAME={node}".encode() in variables
                and f"SLURM_CONF={self.folder}/slurm.conf".encode() in variables
            ):
                processes.append(int(path.parent.name))
        above = {
            int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            for pid in processes
            if Path(f"/proc/{pid}").exists()
        }
        return processes + [pid for pid in above if _program(pid) == "slurmstepd"]

    def run(self, *command: str, seconds: float = 60.0) -> str:
        """The output of a command of SLURM, which must succeed."""
        program = find_program(command[0])
        assert program is not None
        done = subprocess.run(
            [program, *command[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def states(self) -> list[str]:
        """The state of each node; empty while the controller does not answer."""
        try:
            return self.run("sinfo", "--noheader", "-N", "--partition=main", "--format=%T").split()
        except AssertionError:
            return []

    def job(self, job: str) -> dict[str, str]:
        """The fields of a job as scontrol shows them; empty for one that is forgotten."""
        try:
            shown = self.run("scontrol", "--oneliner", "show", "job", job)
        except AssertionError:
            return {}
        return dict(word.split("=", 1) for word in shown.splitlines()[0].split() if "=" in word)

    def state(self, job: str) -> str:
        return self.job(job).get("JobState", "")

    def wait_state(self, job: str, *wanted: str, seconds: float = 120.0) -> float:
        """Wait until a job is in one of these states; a requeued job need not wait its two minutes."""

        def reached() -> bool:
            shown = self.job(job)
            if shown.get("JobState") == "PENDING" and shown.get("Reason") == "BeginTime":
                self.release(job)
            return shown.get("JobState") in wanted

        try:
            return wait_until(reached, f"job {job} {' or '.join(wanted)}", seconds)
        except TimeoutError as problem:
            raise TimeoutError(f"{problem}: {self.job(job)}") from None

    def release(self, job: str) -> None:
        """Let a requeued job start now; not in the very second in which it ended, or its nodes still refuse it."""
        if time.monotonic() - self.waiting.setdefault(job, time.monotonic()) < HOLD_SECONDS:
            return
        del self.waiting[job]
        try:
            self.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        except AssertionError:
            pass  # it has started, or is still ending

    def stop(self) -> None:
        """Cancel what still runs and end the daemons."""
        if "slurmctld" in self.daemons.running and (self.folder / "slurm.conf").exists():
            try:
                self.run(
                    "scancel",
                    "--full",
                    "--signal=KILL",
                    "--state=RUNNING",
                    f"--user={os.geteuid()}",
                )
                self.run("scancel", f"--user={os.geteuid()}")
                wait_until(
                    lambda: not self.run("squeue", "--noheader", "--format=%A").split(),
                    "jobs end",
                    KILL_SECONDS + 5.0,
                )
            except (AssertionError, TimeoutError, subprocess.TimeoutExpired):
                pass
        left = [pid for node in NODES for pid in self.job_processes(node)]
        self.daemons.stop()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """A cluster that runs for the length of a with block; what it wrote is removed."""
    folder = short_folder()
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)
