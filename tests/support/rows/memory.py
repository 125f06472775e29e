"""Settings of memory against time."""

from support.observe import Row, engine, numbers

ROWS: dict[str, Row] = {
    "optim[adamw].state_dtype": ((), "fp32", "8bit", numbers),
    "memory.offload": ((), [], ["optimizer"], engine(lambda run: run.engine.streamed is None)),
}
