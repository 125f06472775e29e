"""`STEP_RECORD`: the numbers of one step as a run hands them to its trackers."""

from typing import Any

STEP_RECORD: dict[str, Any] = {
    "step": 120, "loss": 3.41234, "lr": 3e-4, "grad_norm": 0.912, "inf_nan_skip_batches": 0, "valid": {"loss": 3.2, "code/loss": None},
    "time": {
        "tokens_per_second": 12345.6, "mfu_full": 0.412, "mfu_causal": 0.38, "memory_bytes": 12.1e9, "eta_seconds": 185.0,
        "gpu_power_watts": None, "data_wait_seconds": 0.001,
    },
}  # fmt: skip
