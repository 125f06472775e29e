"""Kubernetes as a target: one JobSet per job, submitted and followed with kubectl.

In: a job and settings. Out: a handle with the name of the JobSet, its namespace and context; status
from the JobSet's conditions and its pods; lines from the pods' logs. The first `cancel` suspends
the JobSet, whose pods then save and end; the second deletes it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.load import dump_yaml, load
from headway.config.regular_file import regular_only
from headway.errors import ConfigError, LaunchError
from headway.launch.k8s_manifest import (
    JOBSET_LABEL,
    ManifestParts,
    job_name,
    make_manifest,
)
from headway.launch.targets.base import (
    FINAL,
    Job,
    JobHandle,
    JobStatus,
    Target,
    newest_step,
    refuse_second,
    write_handle,
)
from headway.launch.targets.ssh import needed_paths
from headway.runtime.storage import write_atomic, writing
from headway.train.check import check_for_ranks
from headway.train.config import Recipe
from headway.train.k8s_config import K8sConfig

KUBECTL_SECONDS = 60.0
"""How long kubectl may take: a busy API server answers late."""
POLL_SECONDS = 5.0
MARK = Path("launch") / "k8s-cancelled"
"""Written by `cancel`, with the name of the JobSet: a suspended job without it waits in a queue."""
NOT_FOUND = "NotFound"
"""What kubectl says of an object that is not there."""
MAX_PODS = 1000
"""Pods whose logs are followed at the same time."""


@dataclass(frozen=True)
class K8sPlan:
    """A job that can be shown, written or submitted."""

    run_dir: Path
    name: str
    manifest: dict[str, Any]
    settings: K8sConfig
    not_here: tuple[str, ...] = ()
    """Paths of the recipe that this machine does not have: the recipe was not checked against them."""


def plan_k8s(job: Job, settings: K8sConfig) -> K8sPlan:
    """Check a job and make its manifest; nothing is written or submitted."""
    if job.environment:
        raise ConfigError(
            f"--env names {', '.join(job.environment)}; a manifest would store the value in the "
            "cluster. Put it into a Secret (kubectl create secret generic NAME "
            "--from-literal=KEY=VALUE) and name that in launch.k8s.secrets."
        )
    run_dir = Path(os.path.abspath(job.run_dir))
    recipe = load(Recipe, job.recipe, job.overrides)
    # The data may be on a volume of the cluster alone; then the pods check the recipe.
    not_here = tuple(path for path in needed_paths(job, recipe) if not os.path.exists(path))
    if not not_here:
        check_for_ranks(recipe, settings.nodes * settings.ranks)

    words: list[str] = []
    if job.resume != "auto":
        words += ["--resume", job.resume]
    if job.gpus is not None:
        words += ["--gpus", job.gpus]
    name = job_name(recipe.run.name or run_dir.name, f"{run_dir} {time.time_ns()}")
    parts = ManifestParts(
        settings,
        name,
        dump_yaml(recipe, only_given=True),
        tuple(words),
        int(recipe.run.grace_seconds) + 1,
    )
    return K8sPlan(run_dir, name, make_manifest(parts), settings, not_here)


class K8sTarget:
    """Jobs of a Kubernetes cluster with JobSet. `settings` are needed to submit."""

    def __init__(self, settings: K8sConfig | None = None) -> None:
        self.settings = settings if settings is not None else K8sConfig()

    def submit(self, job: Job) -> JobHandle:
        """Create the JobSet of a job."""
        return self.submit_plan(plan_k8s(job, self.settings), job)

    def submit_plan(self, plan: K8sPlan, job: Job) -> JobHandle:
        """Create what was planned."""
        refuse_second(self, "k8s", plan.run_dir)
        cluster = _Cluster(plan.settings.context, plan.settings.namespace)
        handle = JobHandle(
            "k8s",
            plan.run_dir,
            tuple(job.train_arguments),
            {"job": plan.name},
            options={"context": cluster.context, "namespace": cluster.namespace},
        )
        with writing(plan.run_dir):
            plan.run_dir.mkdir(parents=True, exist_ok=True)
        cluster.call("create", "-f", "-", text=json.dumps(plan.manifest))
        write_handle(handle)
        return handle

    def status(self, handle: JobHandle) -> JobStatus:
        """Where the job is, by the conditions of its JobSet and the phases of its pods."""
        name = handle.ids["job"]
        cluster = _Cluster.of(handle)
        step = newest_step(handle.run_dir)
        is_cancelled = _cancelled(handle)
        jobset = cluster.get("jobset", name)
        if jobset is None:
            if is_cancelled:
                return JobStatus("cancelled", step=step, message="it was deleted")
            return JobStatus(
                "unknown", step=step, message=f"the cluster has no JobSet {name}: it was deleted"
            )

        status: Any = jobset.get("status") or {}
        attempt = 1 + int(status.get("restarts") or 0)
        pods = cluster.pods(name)
        hosts = tuple(sorted({pod.node for pod in pods if pod.node}))
        for condition in status.get("conditions") or []:
            if condition.get("status") != "True":
                continue
            message = str(condition.get("message") or "")
            if condition.get("type") == "Completed":
                return JobStatus("done", attempt, hosts, 0, step, message)
            if condition.get("type") == "Failed":
                code = next((pod.exit_code for pod in pods if pod.exit_code), None)
                return JobStatus("failed", attempt, hosts, code, step, message)

        if (jobset.get("spec") or {}).get("suspend"):
            if not is_cancelled:
                return JobStatus("queued", attempt, hosts, None, step, "waits in its queue")
            # Pods of a suspended job save before they end.
            if any(pod.phase == "Running" for pod in pods):
                return JobStatus("stopping", attempt, hosts, None, step)
            return JobStatus("cancelled", attempt, hosts, None, step, "it is suspended")
        if pods and all(pod.phase == "Running" for pod in pods):
            return JobStatus("running", attempt, hosts, None, step)
        reason = next((pod.reason for pod in pods if pod.reason), "its pods are not created yet")
        return JobStatus("queued", attempt, hosts, None, step, reason)

    def logs(self, handle: JobHandle, *, lines: int, follow: bool) -> Iterator[str]:
        """The lines of every pod, with its name in front."""
        cluster = _Cluster.of(handle)
        name = handle.ids["job"]
        words = ["logs", "-l", f"{JOBSET_LABEL}={name}", "--prefix", "--timestamps"]
        words += [f"--max-log-requests={MAX_PODS}", "--ignore-errors"]
        shown = _ShownLines()

        began = _utc_now()
        yield from shown.new(cluster.lines(*words, f"--tail={lines}"))
        while follow:
            # Asked before the lines are: what a job prints before its end is shown then.
            ended = self.status(handle).state in (*FINAL, "unknown")
            since = f"--since-time={began}"
            began = _utc_now()
            if ended:
                yield from shown.new(cluster.lines(*words, since))
                return
            # kubectl returns when the pods end; those of the next start are other ones. A pod that
            # is not ready yet has no log, which is no error here.
            yield from shown.new(cluster.lines(*words, "--follow", since))
            time.sleep(POLL_SECONDS)

    def cancel(self, handle: JobHandle) -> None:
        """Suspend the JobSet, so that its pods save and end; the second call deletes it."""
        status = self.status(handle)
        name = handle.ids["job"]
        cluster = _Cluster.of(handle)
        if status.state in ("done", "failed", "unknown") or status.message == "it was deleted":
            text = (
                f"{handle.run_dir}: the job is {status.state}, so there is nothing to cancel. "
                f"{status.message}"
            )
            raise LaunchError(text.rstrip())
        if _cancelled(handle):
            cluster.call("delete", "jobset", name, "--wait=false")
            return

        mark = handle.run_dir / MARK
        with writing(mark):
            mark.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(mark, f"{name}\n")
        patch = json.dumps({"spec": {"suspend": True}})
        cluster.call("patch", "jobset", name, "--type=merge", "-p", patch)


class _ShownLines:
    """Which lines of a job's pods were shown already: calls of kubectl overlap, so that no line
    falls between two of them."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        """By pod and container, the time stamp of the newest line shown."""

    def new(self, lines: Iterable[str]) -> Iterator[str]:
        """Those not shown before, without their time stamps. A line is `[POD/CONTAINER] TIME TEXT`
        with times of one width, so that their order is that of their letters."""
        newest: dict[str, str] = {}
        for line in lines:
            pod, _, stamped = line.partition(" ")
            stamp, _, text = stamped.partition(" ")
            if stamp > self._last.get(pod, ""):
                # Several lines of one call may share a time.
                newest[pod] = stamp
                yield f"{pod} {text}"
        self._last |= newest


def _utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def kubectl_words(context: str | None, namespace: str | None) -> list[str]:
    """kubectl with the options that name a cluster and a namespace."""
    words = ["kubectl"]
    if context is not None:
        words.append(f"--context={context}")
    if namespace is not None:
        words.append(f"--namespace={namespace}")
    return words


def _cancelled(handle: JobHandle) -> bool:
    """Whether `cancel` was called for this job, and not for an earlier one of the run."""
    try:
        with open(handle.run_dir / MARK, encoding="utf-8", opener=regular_only) as file:
            text = file.read()
    except OSError:
        return False
    return text.strip() == handle.ids["job"]


@dataclass(frozen=True)
class _Pod:
    """What is asked of a pod."""

    phase: str
    node: str | None
    reason: str
    """Why it does not run, as one line; empty where nothing is said."""
    exit_code: int | None


@dataclass(frozen=True)
class _Cluster:
    """kubectl with a context and a namespace."""

    context: str | None = None
    namespace: str | None = None

    @property
    def words(self) -> list[str]:
        """The beginning of every command."""
        return kubectl_words(self.context, self.namespace)

    @staticmethod
    def of(handle: JobHandle) -> _Cluster:
        """The cluster of a job."""
        values: Mapping[str, Any] = handle.options
        return _Cluster(values.get("context"), values.get("namespace"))

    def call(self, *arguments: str, text: str | None = None) -> str:
        """What kubectl prints; a LaunchError with its last line where it fails."""
        process = self._run(arguments, text)
        if process.returncode != 0:
            raise LaunchError(f"kubectl {arguments[0]}: {_last_line(process.stderr)}")
        return process.stdout

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object; None if it does not exist."""
        process = self._run(("get", kind, name, "-o", "json"), None)
        if process.returncode != 0:
            if NOT_FOUND in process.stderr:
                return None
            raise LaunchError(f"kubectl get {kind}: {_last_line(process.stderr)}")
        return _parsed(process.stdout)

    def pods(self, name: str) -> list[_Pod]:
        """The pods of a JobSet that exist now."""
        text = self.call("get", "pods", "-l", f"{JOBSET_LABEL}={name}", "-o", "json")
        return [_pod(entry) for entry in _parsed(text).get("items") or []]

    def lines(self, *arguments: str) -> Iterator[str]:
        """What kubectl prints, line by line."""
        self._require()
        process = subprocess.Popen(
            [*self.words, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
        finally:
            # A reader that stops early leaves no kubectl behind.
            process.terminate()
            process.wait()
            process.stdout.close()

    def _run(self, arguments: Sequence[str], text: str | None) -> subprocess.CompletedProcess[str]:
        self._require()
        try:
            return subprocess.run(
                [*self.words, *arguments],
                input=text or "",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=KUBECTL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"kubectl {arguments[0]}: no answer within {KUBECTL_SECONDS:.0f} s. Is the API "
                "server of the cluster reachable?"
            ) from None

    @staticmethod
    def _require() -> None:
        if shutil.which("kubectl") is None:
            raise LaunchError(
                "kubectl is not on the PATH, and a job is submitted with it. Install it, or write "
                "the manifest with --dry-run and submit it where kubectl is."
            )


def _parsed(text: str) -> dict[str, Any]:
    try:
        content: Any = json.loads(text)
    except ValueError:
        raise LaunchError(f"kubectl printed no JSON: {text[:200]!r}") from None
    if not isinstance(content, dict):
        raise LaunchError(f"kubectl printed no object: {text[:200]!r}")
    return content


def _pod(entry: Mapping[str, Any]) -> _Pod:
    status: Any = entry.get("status") or {}
    reason = ""
    exit_code: int | None = None
    for container in status.get("containerStatuses") or []:
        state: Any = container.get("state") or {}
        waiting = state.get("waiting")
        if waiting and waiting.get("reason") != "ContainerCreating":
            reason = f"{waiting.get('reason')}: {waiting.get('message', '')}".rstrip(": ")
        if state.get("terminated"):
            exit_code = state["terminated"].get("exitCode")
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = str(condition.get("message") or condition.get("reason") or "")
    node = (entry.get("spec") or {}).get("nodeName")
    return _Pod(str(status.get("phase")), node, " ".join(reason.split())[:300], exit_code)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it failed without a message."
    return lines[-1][:500]


def build() -> Target:
    """The target, for status, logs and cancel."""
    return K8sTarget()
