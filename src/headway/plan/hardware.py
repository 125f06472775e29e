"""GPUs that `headway plan` knows: memory, peaks and links. A name comes in, numbers go out; nothing
imports torch.

Peak arithmetic is that of runtime/machine.py (NVIDIA's data sheets, dense). Memory is what torch
reports as total, a little less than the name says. Bandwidths are data-sheet values, per direction
for links. What real work reaches of them is in plan/rates.py.

Sources: data sheets of H200, H100, A100, B200, A40, L40S; RTX 4090 and 3090 board specifications;
A800 and H800 = A100 and H100 with 400 GB/s of NVLink (both directions together). RTX 4090 has no
peer-to-peer copies: they pass through host memory. Network defaults: one 400 Gb/s adapter per GPU
(H and B), 200 Gb/s (A100), 100 Gb/s otherwise; give your own with --network-gbps.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from headway.errors import ConfigError
from headway.runtime.machine import peak_flops

GIB = 1 << 30
USABLE = 0.94
"""Share of the device's memory that a run is planned into; the rest goes to fragmentation and the
driver."""


@dataclass(frozen=True)
class GpuModel:
    """One kind of GPU in a node of several."""

    name: str
    device: str
    """The name torch gives it."""
    memory_bytes: int
    bandwidth: float
    """Bytes per second of device memory."""
    link: float
    """Bytes per second and direction to the other GPUs of the node."""
    is_nvlink: bool
    network: float
    """Bytes per second and GPU to other nodes."""
    generation: str
    """Which of the measured rates apply: hopper, ampere, ada, blackwell."""
    fp8_flops: float | None = None
    host: float = 25e9
    """Bytes per second and direction to host memory."""
    gpus_per_node: int = 8
    power: float = 1.0
    """Share of its full power that it is allowed; arithmetic slows down with it."""

    @property
    def flops(self) -> float:
        """Dense peak in bf16."""
        peak = peak_flops(self.device, "bf16")
        assert peak is not None, self.name
        return peak

    @property
    def usable_bytes(self) -> int:
        """Bytes a run is planned into."""
        return int(USABLE * self.memory_bytes)

    def with_network(self, gbps: float | None, gpus_per_node: int | None) -> GpuModel:
        """The same GPU in another cluster: Gbit/s per GPU between nodes, GPUs per node."""
        return replace(
            self,
            network=self.network if gbps is None else gbps * 1e9 / 8,
            gpus_per_node=self.gpus_per_node if gpus_per_node is None else gpus_per_node,
        )


CARDS_GB = (6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180)
"""Sizes that cards are sold in. torch reports a little less."""
REPORTED = 0.98
"""What torch reports as total, as a share of the size that a card is sold in."""


def smallest_card(total_bytes: int) -> int | None:
    """The smallest size of a card, in GB as it is sold, that a run of these bytes is planned into;
    None: no card is large enough."""
    return next((size for size in CARDS_GB if total_bytes <= USABLE * REPORTED * size * GIB), None)


def _gib(size: float) -> int:
    return int(size * GIB)


GPUS: dict[str, GpuModel] = {
    gpu.name: gpu
    for gpu in (
        GpuModel("b200", "B200", _gib(178.3), 8.0e12, 900e9, True, 50e9, "blackwell", 4.5e15, 55e9),
        GpuModel("h200", "H200", _gib(139.8), 4.8e12, 450e9, True, 50e9, "hopper", 1.979e15, 55e9),
        GpuModel(
            "h100",
            "H100 80GB HBM3",
            _gib(79.1),
            3.35e12,
            450e9,
            True,
            50e9,
            "hopper",
            1.979e15,
            55e9,
        ),
        GpuModel("h800", "H800", _gib(79.1), 3.35e12, 200e9, True, 50e9, "hopper", 1.979e15, 55e9),
        GpuModel("h20", "H20", _gib(95.6), 4.0e12, 450e9, True, 50e9, "hopper", 296e12, 55e9),
        GpuModel(
            "h100-pcie",
            "H100 PCIe",
            _gib(79.1),
            2.0e12,
            50e9,
            False,
            25e9,
            "hopper",
            1.513e15,
            50e9,
        ),
        GpuModel("a100", "A100-SXM4-80GB", _gib(79.2), 2.039e12, 300e9, True, 25e9, "ampere"),
        GpuModel("a100-40", "A100-SXM4-40GB", _gib(39.4), 1.555e12, 300e9, True, 25e9, "ampere"),
        GpuModel(
            "a100-pcie", "A100 80GB PCIe", _gib(79.2), 1.935e12, 25e9, False, 12.5e9, "ampere"
        ),
        GpuModel("a800", "A800-SXM4-80GB", _gib(79.2), 2.039e12, 200e9, True, 25e9, "ampere"),
        GpuModel("a40", "A40", _gib(44.4), 0.696e12, 25e9, False, 12.5e9, "ampere"),
        GpuModel("l40s", "L40S", _gib(44.4), 0.864e12, 25e9, False, 12.5e9, "ada", 733e12),
        GpuModel("4090", "RTX 4090", _gib(23.6), 1.008e12, 12e9, False, 12.5e9, "ada", 330e12),
        GpuModel(
            "3090", "RTX 3090", _gib(23.6), 0.936e12, 12e9, False, 12.5e9, "ampere", None, 12e9
        ),
    )
}


def find_gpu(name: str) -> GpuModel:
    """A GPU by its name; an unknown one is a ConfigError."""
    # As people write them: "NVIDIA H100", "RTX 4090", "a100 pcie".
    short = name.lower().removeprefix("nvidia ").removeprefix("rtx ").replace(" ", "-")
    if short in GPUS:
        return GPUS[short]
    near = difflib.get_close_matches(short, GPUS, n=1)
    hint = ""
    if near:
        hint = f" Did you mean {near[0]}?"
    raise ConfigError(f"--gpu is {name!r}; it must be one of {', '.join(GPUS)}.{hint}")
