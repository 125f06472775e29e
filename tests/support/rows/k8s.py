"""What `headway launch k8s` asks of a cluster; the manifest shows each."""

from typing import Any

from headway.config.load import load
from headway.launch.k8s_manifest import ManifestParts, make_manifest
from headway.launch.targets.k8s import kubectl_words
from headway.train.config import Recipe
from support.setting_runs import Row


def manifest(overrides: tuple[str, ...]) -> Any:
    settings = load(Recipe, None, list(overrides)).launch.k8s
    parts = ManifestParts(settings, "run-123456", "steps: 1\n")
    return kubectl_words(settings.context, settings.namespace), make_manifest(parts)


NEEDED = ("launch.k8s.image=headway:1", "launch.k8s.volumes=[team:/data]")

ROWS: dict[str, Row] = {
    "launch.k8s.image": (NEEDED, "headway:1", "headway:2", manifest),
    "launch.k8s.namespace": (NEEDED, None, "team-a", manifest),
    "launch.k8s.context": (NEEDED, None, "prod", manifest),
    "launch.k8s.nodes": (NEEDED, 1, 2, manifest),
    "launch.k8s.gpus_per_node": (NEEDED, None, 8, manifest),
    "launch.k8s.gpu_resource": ((*NEEDED, "launch.k8s.gpus_per_node=8"), "nvidia.com/gpu", "amd.com/gpu", manifest),
    "launch.k8s.nproc": (NEEDED, None, 4, manifest),
    "launch.k8s.cpus": (NEEDED, None, "32", manifest),
    "launch.k8s.mem": (NEEDED, None, "500Gi", manifest),
    "launch.k8s.shared_memory": (NEEDED, "8Gi", "64Gi", manifest),
    "launch.k8s.volumes": (NEEDED, ["team:/data"], ["team:/data", "runs:/runs"], manifest),
    "launch.k8s.workdir": (NEEDED, None, "/data/me", manifest),
    "launch.k8s.secrets": (NEEDED, [], ["hub-token"], manifest),
    "launch.k8s.node_selector": (NEEDED, [], ["gpu=h100"], manifest),
    "launch.k8s.tolerations": (NEEDED, [], ["nvidia.com/gpu"], manifest),
    "launch.k8s.queue": (NEEDED, None, "research", manifest),
    "launch.k8s.service_account": (NEEDED, None, "trainer", manifest),
    "launch.k8s.port": ((*NEEDED, "launch.k8s.nodes=2"), 29500, 12345, manifest),
    "launch.k8s.max_restarts": (NEEDED, 5, 9, manifest),
}  # fmt: skip
