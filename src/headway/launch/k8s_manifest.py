"""The JobSet of a job: a recipe and settings come in, one object of Kubernetes goes out.

    JobSet NAME                        restarts all nodes together after a failure
      └ job NAME-node-0                one pod for each node, with an index
          └ container headway          headway train /headway/recipe.yaml --nnodes N --node-rank INDEX

The recipe travels in an annotation of the pods, which a volume shows as a file: one object is the
whole job. Invariant: the manifest holds no value of an environment variable of this shell; secrets
are named and stay in the cluster.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.config.load import dump_yaml
from headway.errors import ConfigError
from headway.train.k8s_config import K8sConfig

API_VERSION = "jobset.x-k8s.io/v1alpha2"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""The label that JobSet gives to the pods of a job."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
RECIPE_ANNOTATION = "headway/recipe"
RECIPE_FOLDER = "/headway"
REPLICATED_JOB = "node"
CONTAINER = "headway"
MAX_NAME = 40
"""Characters of a job's name: pods add -node-0-N-xxxxx, and 63 are a host name."""
MAX_ANNOTATION_BYTES = 200 * 1024
"""Kubernetes takes 256 KiB for all annotations of an object together."""
NOT_AGAIN = (2, 3)
"""Exit codes after which a start would fail in the same way: a mistake, and giving up."""


@dataclass(frozen=True)
class ManifestParts:
    """What a manifest is made from."""

    settings: K8sConfig
    name: str
    recipe: str
    """The recipe as YAML."""
    arguments: tuple[str, ...] = ()
    """Further words after the recipe of `headway train`."""
    grace_seconds: int = 120


def job_name(run_name: str, salt: str) -> str:
    """A name for the objects of a job: that of its run in the letters of Kubernetes, and six digits
    that make it unique.
    """
    digits = hashlib.sha256(salt.encode()).hexdigest()[:6]
    plain = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-") or "run"
    # A name begins with a letter: it is also the name of a service.
    if not plain[0].isalpha():
        plain = f"run-{plain}"
    return f"{plain[: MAX_NAME - 7].rstrip('-')}-{digits}"


def make_manifest(parts: ManifestParts) -> dict[str, Any]:
    """The JobSet as plain data."""
    settings = parts.settings
    if settings.image is None:
        raise ConfigError(
            "launch.k8s.image is not set: the pods need an image with headway. Set it, or give "
            "--image; docs/cluster.md says how the Dockerfile makes one."
        )
    if not settings.volumes:
        raise ConfigError(
            "launch.k8s.volumes is empty: the run folder would vanish with the pods. Give a "
            "claim that all nodes share, e.g. launch.k8s.volumes=[team-data:/data]."
        )
    if len(parts.recipe.encode()) > MAX_ANNOTATION_BYTES:
        raise ConfigError(
            f"the recipe has {len(parts.recipe.encode())} bytes; a job of Kubernetes carries at "
            f"most {MAX_ANNOTATION_BYTES}."
        )

    job = {
        # A pod that fails ends its job, and the JobSet starts all nodes again.
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": settings.nodes,
        "parallelism": settings.nodes,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": CONTAINER,
                        "operator": "In",
                        "values": list(NOT_AGAIN),
                    },
                }
            ]
        },
        "template": _pod(parts),
    }
    labels = {"app.kubernetes.io/managed-by": "headway"}
    if settings.queue is not None:
        labels[QUEUE_LABEL] = settings.queue
    metadata: dict[str, Any] = {"name": parts.name, "labels": labels}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": settings.max_restarts,
                "rules": [
                    {
                        "name": "not_again",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
            "successPolicy": {"operator": "All"},
        },
    }


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The manifest as YAML, with the recipe as a block of lines that a person can read."""
    from ruamel.yaml.scalarstring import LiteralScalarString

    content = copy.deepcopy(dict(manifest))
    pods = content["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    annotations = pods["metadata"]["annotations"]
    annotations[RECIPE_ANNOTATION] = LiteralScalarString(annotations[RECIPE_ANNOTATION])
    return dump_yaml(content)


def _pod(parts: ManifestParts) -> dict[str, Any]:
    settings = parts.settings
    spec: dict[str, Any] = {
        "containers": [_container(parts)],
        "restartPolicy": "Never",
        # How long a node may save after it was asked to stop.
        "terminationGracePeriodSeconds": parts.grace_seconds,
        "volumes": _volumes(settings),
    }
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if settings.node_selector:
        spec["nodeSelector"] = dict(label.split("=", 1) for label in settings.node_selector)
    if settings.tolerations:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in settings.tolerations]
    return {"metadata": {"annotations": {RECIPE_ANNOTATION: parts.recipe}}, "spec": spec}


def _container(parts: ManifestParts) -> dict[str, Any]:
    settings = parts.settings
    words = ["headway", "train", f"{RECIPE_FOLDER}/recipe.yaml", *parts.arguments]
    words += ["--nproc", str(settings.ranks)]
    if settings.nodes > 1:
        # Kubernetes puts the index of the pod into its environment and replaces $(NAME) in words;
        # the first pod has a host name that all others know before it runs.
        master = f"{parts.name}-{REPLICATED_JOB}-0-0.{parts.name}:{settings.port}"
        words += ["--nnodes", str(settings.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        words += ["--master", master]

    mounts = [
        {"name": f"volume-{index}", "mountPath": volume.partition(":")[2]}
        for index, volume in enumerate(settings.volumes)
    ]
    mounts += [
        {"name": "recipe", "mountPath": RECIPE_FOLDER},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": settings.image,
        "command": words,
        "ports": [{"containerPort": settings.port, "protocol": "TCP"}],
        "volumeMounts": mounts,
        "workingDir": settings.workdir or settings.volumes[0].partition(":")[2],
    }
    if settings.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in settings.secrets]
    resources = _resources(settings)
    if resources:
        container["resources"] = resources
    return container


def _resources(settings: K8sConfig) -> dict[str, Any]:
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if settings.cpus is not None:
        # No limit of CPU: a rank that is throttled delays all others.
        requests["cpu"] = settings.cpus
    if settings.mem is not None:
        requests["memory"] = settings.mem
        limits["memory"] = settings.mem
    if settings.gpus_per_node is not None:
        limits[settings.gpu_resource] = str(settings.gpus_per_node)
    resources: dict[str, Any] = {}
    if requests:
        resources["requests"] = requests
    if limits:
        resources["limits"] = limits
    return resources


def _volumes(settings: K8sConfig) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {
            "name": f"volume-{index}",
            "persistentVolumeClaim": {"claimName": volume.partition(":")[0]},
        }
        for index, volume in enumerate(settings.volumes)
    ]
    annotation = f"metadata.annotations['{RECIPE_ANNOTATION}']"
    item = {"path": "recipe.yaml", "fieldRef": {"fieldPath": annotation}}
    volumes.append({"name": "recipe", "downwardAPI": {"items": [item]}})
    # The default of 64 MiB is too small for ranks that exchange tensors.
    memory = {"medium": "Memory", "sizeLimit": settings.shared_memory}
    volumes.append({"name": "shared-memory", "emptyDir": memory})
    return volumes
