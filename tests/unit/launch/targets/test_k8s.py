"""Kubernetes as a target, with a stand-in for kubectl that runs pods as processes. The manifest is compared with the published schema."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_kubectl import calls, change_pods, change_status, install
from support.runs import RECIPE, make_stores

from headway.cli import main
from headway.config.load import load
from headway.config.yaml_reader import parse_yaml
from headway.errors import ConfigError, LaunchError
from headway.launch.k8s_manifest import (
    RECIPE_ANNOTATION,
    ManifestParts,
    job_name,
    make_manifest,
    manifest_text,
)
from headway.launch.targets import k8s
from headway.launch.targets.base import FILE, Job, JobStatus, State, read_handle
from headway.launch.targets.k8s import K8sTarget, plan_k8s
from headway.train.config import Recipe
from headway.train.k8s_config import K8sConfig

SETTINGS = K8sConfig(image="headway:1", volumes=("team:/data",), namespace="lab", context="prod")
EVERYTHING = SETTINGS.model_copy(
    update={
        "nodes": 2,
        "gpus_per_node": 8,
        "cpus": "64",
        "mem": "500Gi",
        "secrets": ("hub",),
        "node_selector": ("gpu=h100",),
        "tolerations": ("nvidia.com/gpu",),
        "queue": "research",
        "service_account": "trainer",
        "volumes": ("team:/data", "runs:/runs"),
    }
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """kubectl on the PATH, a recipe with its stores, and a working folder."""
    programs = install(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headway.launch.targets.k8s.POLL_SECONDS", 0.05)
    one, two = make_stores(tmp_path)
    text = RECIPE.format(name="run", dir=tmp_path / "runs", one=one, two=two, steps=3)
    (tmp_path / "recipe.yaml").write_text(text)
    return tmp_path


def job(folder: Path, **changes: Any) -> Job:
    return Job(folder / "recipe.yaml", folder / "runs/run", **changes)


def pod_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_every_node_gets_the_recipe_its_index_and_the_address_of_the_first(folder: Path) -> None:
    plan = plan_k8s(job(folder), SETTINGS.model_copy(update={"nodes": 2, "nproc": 1}))
    words = pod_spec(plan.manifest)["containers"][0]["command"]
    assert words == [
        "headway", "train", "/headway/recipe.yaml", "--nproc", "1", "--nnodes", "2", "--node-rank", "$(JOB_COMPLETION_INDEX)",
        "--master", f"{plan.name}-node-0-0.{plan.name}:29500",
    ]  # fmt: skip
    spec = plan.manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    # The recipe of the pods is that of the command line.
    text = spec["template"]["metadata"]["annotations"][RECIPE_ANNOTATION]
    (folder / "again.yaml").write_text(text)
    assert load(Recipe, folder / "again.yaml") == load(Recipe, folder / "recipe.yaml")
    # What a person reads and submits by hand is the same object.
    assert parse_yaml(manifest_text(plan.manifest), "manifest") == plan.manifest


def test_the_manifest_is_a_jobset_of_the_published_schema() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for settings in (SETTINGS, EVERYTHING):
        manifest = make_manifest(ManifestParts(settings, "run-123456", "steps: 1\n"))
        # Fields that the schema does not have would be missing in what comes back.
        jobset = models.JobsetV1alpha2JobSet.from_dict(manifest)
        assert jobset.to_dict() == manifest


def test_what_the_api_server_checks_beyond_the_schema_holds() -> None:
    manifest = make_manifest(ManifestParts(EVERYTHING, "run-123456", "steps: 1\n"))
    pod = pod_spec(manifest)
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    # A podFailurePolicy needs pods that never restart by themselves, and names a container.
    assert pod["restartPolicy"] == "Never"
    rule = spec["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert 0 not in rule["onExitCodes"]["values"]
    # Every mount has its volume, and no two are at one path.
    mounts = pod["containers"][0]["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
    assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
    # GPUs are limits; Kubernetes takes no request without the same limit.
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["requests"]


@pytest.mark.parametrize("name", ["Run_1", "1b.tune", "x" * 100, "中文", "-a-"])
def test_names_are_those_of_kubernetes_and_unique(name: str) -> None:
    jobs = [job_name(name, salt) for salt in ("a", "b")]
    assert jobs[0] != jobs[1]
    for text in jobs:
        assert len(f"{text}-node-0-99-abcde") <= 63
        assert text[0].isalpha()
        assert text[-1].isalnum()
        assert text.replace("-", "").isalnum()
        assert text.isascii()
        assert text == text.lower()


def test_a_job_trains_to_its_end_and_its_lines_have_the_pod_in_front(folder: Path) -> None:
    (folder / "cluster/start").touch()
    target = K8sTarget(SETTINGS)
    handle = target.submit(job(folder))
    assert read_handle(folder / "runs/run") == handle
    lines = list(target.logs(handle, lines=5, follow=True))
    status = target.status(handle)
    assert (status.state, status.exit_code, status.step) == ("done", 0, 3)
    assert status.hosts == ("node-0",)
    assert (folder / "runs/run/final/config.json").is_file()
    assert lines
    assert all(line.startswith(f"[pod/{handle.ids['job']}-0/headway] ") for line in lines)
    # Every call names the cluster and the namespace.
    assert all(
        words[:2] == ["--context=prod", "--namespace=lab"] for words in calls(folder / "cluster")
    )
    with pytest.raises(LaunchError, match="is done, so there is nothing to cancel"):
        target.cancel(handle)


def test_lines_between_two_calls_of_kubectl_are_shown_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = "[pod/node-0/headway]"
    printed = [f"{pod} 2026-01-01T00:00:0{second}.000000000Z line {second}" for second in range(6)]
    answers = {"--tail=1": printed[1:2], "--follow": printed[:4]}

    def lines(cluster: object, *words: str) -> Iterator[str]:
        key = next((word for word in words if word in answers), "")
        yield from answers.get(key, printed)

    states: list[State] = ["running", "done"]
    monkeypatch.setattr(k8s._Cluster, "lines", lines)
    monkeypatch.setattr(k8s, "POLL_SECONDS", 0.0)
    target = K8sTarget(SETTINGS)
    handle = target.submit(job(folder))
    monkeypatch.setattr(K8sTarget, "status", lambda *_: JobStatus(states.pop(0)))
    shown = list(target.logs(handle, lines=1, follow=True))
    assert shown == [f"{pod} line {second}" for second in range(1, 6)]


@pytest.mark.slow
def test_two_nodes_train_together(folder: Path) -> None:
    (folder / "cluster/start").touch()
    target = K8sTarget(SETTINGS.model_copy(update={"nodes": 2, "port": 23456}))
    handle = target.submit(job(folder, overrides=("batch.micro_rows=2",)))
    list(target.logs(handle, lines=0, follow=True))
    assert target.status(handle).state == "done"
    assert target.status(handle).hosts == ("node-0", "node-1")


def test_cancel_saves_and_a_second_one_deletes(folder: Path) -> None:
    (folder / "cluster/start").touch()
    target = K8sTarget(SETTINGS)
    handle = target.submit(job(folder, overrides=("steps=100000", "checkpoint.every=100000")))
    deadline = time.monotonic() + 60
    while target.status(handle).step in (None, 0):
        assert time.monotonic() < deadline, list(target.logs(handle, lines=20, follow=False))
        time.sleep(0.1)
    assert target.status(handle).state == "running"
    with pytest.raises(ConfigError, match="is in use by process"):
        target.submit(job(folder))

    target.cancel(handle)
    while target.status(handle).state == "stopping":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert target.status(handle).state == "cancelled"
    assert json.loads((folder / "runs/run/saved.json").read_text())
    target.cancel(handle)
    assert target.status(handle).message == "it was deleted"
    with pytest.raises(LaunchError, match="nothing to cancel"):
        target.cancel(handle)


def test_states_are_told_apart_by_conditions_and_pods(folder: Path) -> None:
    target = K8sTarget(SETTINGS)
    handle = target.submit(job(folder))
    name = handle.ids["job"]
    cluster = folder / "cluster"
    status = target.status(handle)
    assert status.state == "queued"
    assert "Insufficient nvidia.com/gpu" in status.message
    with pytest.raises(LaunchError, match=f"is queued already as {name}"):
        target.submit(job(folder))

    # A queue suspends a job before it starts it; that is no cancelled one.
    path = cluster / "objects" / f"{name}.json"
    jobset = json.loads(path.read_text())
    path.write_text(json.dumps({**jobset, "spec": {**jobset["spec"], "suspend": True}}))
    assert target.status(handle).state == "queued"
    path.write_text(json.dumps(jobset))

    change_pods(cluster, name, "Running")
    change_status(cluster, name, restarts=2)
    assert (target.status(handle).state, target.status(handle).attempt) == ("running", 3)
    change_pods(cluster, name, "Failed", 2)
    condition = {"type": "Failed", "status": "True", "message": "job node-0 failed"}
    change_status(cluster, name, conditions=[condition])
    status = target.status(handle)
    assert (status.state, status.exit_code, status.message) == ("failed", 2, "job node-0 failed")

    path.unlink()
    assert target.status(handle).state == "unknown"


def test_the_command_shows_writes_and_submits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "k8s", "recipe.yaml", "--image", "headway:1", "--volume", "team:/data"]
    assert main([*words, "--dry-run"]) == 0
    shown = parse_yaml(capsys.readouterr().out, "manifest")
    assert shown["kind"] == "JobSet"
    assert main([*words, "--out", "job.yaml"]) == 0
    assert parse_yaml((folder / "job.yaml").read_text(), "manifest")["kind"] == "JobSet"
    assert not calls(folder / "cluster")
    assert not (folder / "runs").exists()

    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    created = json.loads(capsys.readouterr().out)
    assert created["target"] == "k8s"
    assert created["state"] == "queued"
    assert main(["launch", "status", "runs/run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == created["ids"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--volume", "team:/data"], "launch.k8s.image is not set"),
        (["--image", "headway:1"], "launch.k8s.volumes is empty"),
        (["--image", "headway:1", "--volume", "team"], "write CLAIM:/PATH"),
        (["--image", "two words", "--volume", "team:/data"], "one word"),
        (
            ["--image", "headway:1", "--volume", "team:/data", "--mem", "lots"],
            "quantity of Kubernetes",
        ),
        (
            ["--image", "headway:1", "--volume", "team:/data", "-n", "Team A"],
            "launch.k8s.namespace",
        ),
        (["--image", "headway:1", "--volume", "team:/data", "--env", "A=b"], "launch.k8s.secrets"),
        (["--image", "headway:1", "--volume", "team:/data", "--secret", "A=b"], "name of a Secret"),
        (["--image", "headway:1", "--volume", "team:/data", "--nodes", "3"], "batch.rows is 4"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_submitted(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "k8s", "recipe.yaml", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not calls(folder / "cluster")
    assert not (folder / "runs").exists()


def test_what_kubectl_refuses_is_one_line_and_leaves_no_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "cluster/refuse").touch()
    with pytest.raises(LaunchError, match="jobsets is forbidden"):
        K8sTarget(SETTINGS).submit(job(folder))
    assert not (folder / "runs/run" / FILE).exists()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="kubectl is not on the PATH"):
        K8sTarget(SETTINGS).submit(job(folder))


def test_data_that_is_on_the_cluster_alone_is_named_and_a_large_recipe_refused(
    folder: Path,
) -> None:
    shutil.rmtree(folder / "store0")
    plan = plan_k8s(job(folder), SETTINGS)
    assert plan.not_here == (str(folder / "store0"),)
    with pytest.raises(ConfigError, match="at most"):
        make_manifest(ManifestParts(SETTINGS, "run-123456", "#" * 300_000))
