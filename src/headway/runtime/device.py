"""The device of this process and how exactly it computes, settled once before anything is
allocated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headway.errors import ConfigError, LaunchError
from headway.runtime.process import LAUNCHERS

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "mps")
CHOSEN_GPUS = "HEADWAY_GPUS"
"""Environment variable: the GPUs that were requested and found, as the user named them."""


@dataclass(frozen=True)
class Compute:
    """Where and in which dtype a run computes."""

    device: torch.device
    name: str
    dtype: torch.dtype
    precision: Literal["fp32", "bf16", "fp16", "fp8"]


def choose_compute(device: str, precision: str, local_rank: int = 0) -> Compute:
    """Resolve `auto`, and refuse what this machine cannot do."""
    import torch

    if device not in DEVICES:
        raise ConfigError(
            f"device is {device!r}; it must be {', '.join(DEVICES[:-1])} or {DEVICES[-1]}."
        )
    if device == "mps":
        return _on_apple_gpu(precision, local_rank)
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError(
            "device is 'cuda'; torch sees no CUDA device here. Use device=auto or device=cpu; "
            "`headway doctor` shows more."
        )
    if device == "auto" and not has_cuda and (chosen_gpus := os.environ.get(CHOSEN_GPUS)):
        raise LaunchError(
            f"gpus is {chosen_gpus!r}; torch {torch.__version__} finds no CUDA device. "
            "`headway doctor` shows why; update the driver or check the container's GPU access, "
            "or use --gpus none to compute on the CPU."
        )

    kind = device
    if device == "auto":
        kind = "cuda" if has_cuda else "cpu"

    gpu = 0
    if kind == "cuda":
        gpu = gpu_of_rank(local_rank, torch.cuda.device_count(), os.environ)
        torch.cuda.set_device(gpu)
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(gpu)
        torch_device = torch.device("cuda", gpu)
    else:
        has_bf16 = True
        name = "cpu"
        torch_device = torch.device("cpu")
        if precision == "bf16":
            avoid_broken_amx()

    if precision == "bf16" and not has_bf16:
        raise ConfigError(
            f"precision is 'bf16'; {name} has no bf16 arithmetic. Use precision=fp32."
        )
    # Compute capability 8.9 is Ada, the first with fp8 matrix products.
    if precision == "fp8" and (kind != "cuda" or torch.cuda.get_device_capability(gpu) < (8, 9)):
        raise ConfigError(
            f"precision is 'fp8'; {name} has no fp8 matrix products (Ada, Hopper and newer GPUs "
            "have). Use precision=auto."
        )

    # auto means bf16 on a GPU that has it, and fp32 elsewhere.
    chosen: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    if precision == "fp16" or precision == "fp8" or precision == "bf16":
        chosen = precision
    elif precision == "auto" and kind == "cuda" and has_bf16:
        chosen = "bf16"
    dtypes = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8": torch.bfloat16,  # only matrix products are in fp8
    }
    return Compute(torch_device, name, dtypes[chosen], chosen)


def gpu_of_rank(local_rank: int, num_visible: int, environment: Mapping[str, str]) -> int:
    """The number of a rank's GPU among those it sees.

    `srun --gpus-per-task=1` and MPI launchers that bind GPUs show each rank one GPU, which is
    number 0 there. torchrun and headway show all ranks the same GPUs: one GPU for two ranks is a
    mistake.
    """
    if local_rank < num_visible:
        return local_rank
    launcher = None
    for variables in LAUNCHERS:
        if variables.rank in environment and variables.world in environment:
            launcher = variables.program
            break
    if num_visible == 1 and launcher not in (None, "torchrun"):
        return 0
    raise LaunchError(
        f"this is rank {local_rank} of its machine, and torch sees {num_visible} "
        f"GPU{'s' if num_visible != 1 else ''} here; a GPU takes "
        "one rank. Start fewer ranks, or show each rank its GPU: `srun --gpus-per-task=1`."
    )


def _on_apple_gpu(precision: str, local_rank: int) -> Compute:
    """One process on the GPU of an Apple processor, in fp32: its other dtypes are not covered by
    tests.
    """
    import torch

    if not torch.backends.mps.is_available():
        raise ConfigError(
            "device is 'mps'; torch sees no Apple GPU here (macOS 14 or newer on Apple silicon "
            "has one). Use device=cpu."
        )
    if precision not in ("auto", "fp32"):
        raise ConfigError(f"precision is {precision!r}; on mps it must be auto or fp32.")
    if local_rank > 0:
        raise LaunchError(
            "device is 'mps'; an Apple GPU takes one rank. Leave --nproc out, or use device=cpu."
        )
    return Compute(torch.device("mps"), "mps", torch.float32, "fp32")


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64. Apple GPUs have none: from there it comes to the CPU."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.double()


def backend_of(device: str) -> Literal["gloo", "nccl"]:
    """How the ranks of a recipe's `device` talk to each other."""
    import torch

    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return "nccl"
    return "gloo"


def set_arithmetic(*, tf32: bool, deterministic: bool) -> None:
    """Process-wide switches: TF32 in fp32 products, and kernels that are deterministic."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        # cuBLAS reads this when it starts, so it must be set before the first matrix product on
        # the GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The call loads the compiler, which takes seconds: not where it changes nothing.
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = (
        "can't allocate memory",
        "out of memory",
        "alloc_failed",
    )  # CPU, CUDA, and libraries with their own
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def avoid_broken_amx() -> None:
    """Some virtual machines announce AMX and then die on its instructions.

    Try one bf16 product in a child and do without AMX if so.
    """
    import torch

    # macOS has no AMX, and a fork after threads were started may abort there.
    if "DNNL_MAX_CPU_ISA" in os.environ or not sys.platform.startswith("linux"):
        return

    # In a child, because an illegal instruction ends the process that tries it.
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        _ = torch.ones(37, 16, dtype=torch.bfloat16) @ torch.ones(16, 50, dtype=torch.bfloat16)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        # oneDNN reads this when it is first used.
        os.environ["DNNL_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
