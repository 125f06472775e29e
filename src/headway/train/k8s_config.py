"""`launch.k8s`: what `headway launch k8s` asks of a Kubernetes cluster with JobSet.

Options of the command line win over it. Imports without torch.

Every value becomes a field of one manifest, so it is checked here: Kubernetes would refuse a wrong
name only when the job is submitted.
"""

from __future__ import annotations

import re

from pydantic import field_validator

from headway.config.section import Section, setting

SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
"""A key of a label, a taint or a resource, such as nvidia.com/gpu."""
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kKMGTPE]i?)?")
SHOWN = 80
"""Characters of a wrong value in a message."""


class K8sConfig(Section):
    """The JobSet of `headway launch k8s`. Its options override these."""

    image: str | None = setting(None, "Image with headway in it; the Dockerfile makes one.")
    namespace: str | None = setting(None, "Namespace; null = that of the kubectl context.")
    context: str | None = setting(None, "Context of kubectl; null = the current one.")
    nodes: int = setting(1, "Number of nodes: pods of the job.", gt=0)
    gpus_per_node: int | None = setting(None, "GPUs of each node; null = no GPUs.", gt=0)
    gpu_resource: str = setting("nvidia.com/gpu", "What the cluster calls a GPU.")
    nproc: int | None = setting(None, "Ranks on each node; null = one for each GPU, or one.", gt=0)
    cpus: str | None = setting(None, "CPU cores of each node, e.g. 32 or 500m.")
    mem: str | None = setting(None, "Memory of each node, e.g. 500Gi.")
    shared_memory: str = setting(
        "8Gi", "Size of /dev/shm, which ranks and data workers use; it counts as memory."
    )
    volumes: tuple[str, ...] = setting(
        (),
        "Persistent volume claims and where they are mounted, CLAIM:/PATH; "
        "the run folder must be in one that all nodes share.",
    )
    workdir: str | None = setting(
        None,
        "Working directory; relative paths of the recipe begin there. null = the first volume.",
    )
    secrets: tuple[str, ...] = setting(
        (), "Secrets whose entries become environment variables, e.g. one with HF_TOKEN."
    )
    node_selector: tuple[str, ...] = setting((), "Labels that a node must have, KEY=VALUE.")
    tolerations: tuple[str, ...] = setting((), "Taints that are tolerated, by their key.")
    queue: str | None = setting(None, "Local queue of Kueue; null = the job starts at once.")
    service_account: str | None = setting(None, "Service account; null = the namespace's default.")
    port: int = setting(29500, "Port at which node 0 listens.", ge=1024, le=65535)
    max_restarts: int = setting(
        5, "How often all nodes are started again after a failure; each start resumes.", ge=0
    )

    @field_validator("cpus", mode="before")
    @classmethod
    def _numbers_are_words(cls, value: object) -> object:
        """`cpus: 32` is a number in YAML."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        return value

    @field_validator("namespace", "queue", "service_account")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is not None and SUBDOMAIN.fullmatch(value) is None:
            raise ValueError(f"is {value[:SHOWN]!r}; it must be a name in lower case, e.g. team-a")
        return value

    @field_validator("image", "context")
    @classmethod
    def _is_one_word(cls, value: str | None) -> str | None:
        # A word that begins with a hyphen would be an option of kubectl.
        if value is not None and re.fullmatch(r"[^\s-]\S*", value) is None:
            raise ValueError(f"is {value[:SHOWN]!r}; it must be one word without spaces")
        return value

    @field_validator("cpus", "mem", "shared_memory")
    @classmethod
    def _is_a_quantity(cls, value: str | None) -> str | None:
        if value is not None and QUANTITY.fullmatch(value) is None:
            raise ValueError(
                f"is {value[:SHOWN]!r}; it must be a quantity of Kubernetes, e.g. 32, 500m or 500Gi"
            )
        return value

    @field_validator("gpu_resource")
    @classmethod
    def _is_a_resource(cls, value: str) -> str:
        if "/" not in value or KEY.fullmatch(value) is None:
            raise ValueError(
                f"is {value[:SHOWN]!r}; it must be the name of a resource, e.g. nvidia.com/gpu"
            )
        return value

    @field_validator("volumes")
    @classmethod
    def _are_mounts(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            claim, _, path = value.partition(":")
            if SUBDOMAIN.fullmatch(claim) is None or not re.fullmatch(r"/[^:\s]+", path):
                raise ValueError(f"has {value[:SHOWN]!r}; write CLAIM:/PATH, e.g. team-data:/data")
        paths = [value.partition(":")[2] for value in values]
        if len(set(paths)) < len(paths):
            raise ValueError("mounts two claims at the same path")
        return values

    @field_validator("workdir")
    @classmethod
    def _is_absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"is {value[:SHOWN]!r}; it must be an absolute path in the pods")
        return value

    @field_validator("secrets")
    @classmethod
    def _are_names(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if SUBDOMAIN.fullmatch(value) is None:
                raise ValueError(
                    f"has {value[:SHOWN]!r}; it must be the name of a Secret, which holds the "
                    "values (kubectl create secret generic NAME --from-literal=HF_TOKEN=...)"
                )
        return values

    @field_validator("node_selector")
    @classmethod
    def _are_labels(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            key, equals, label = value.partition("=")
            if not equals or KEY.fullmatch(key) is None or LABEL_VALUE.fullmatch(label) is None:
                raise ValueError(f"has {value[:SHOWN]!r}; write KEY=VALUE, e.g. gpu=h100")
        return values

    @field_validator("tolerations")
    @classmethod
    def _are_keys(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if KEY.fullmatch(value) is None:
                raise ValueError(
                    f"has {value[:SHOWN]!r}; write the key of a taint, e.g. nvidia.com/gpu"
                )
        return values

    @property
    def ranks(self) -> int:
        """Ranks on each node."""
        return self.nproc or self.gpus_per_node or 1
