"""The log line of InternLM's trainer: a record of metrics.jsonl comes in, its sixteen fields as
`key=value` go out, joined by commas.

tflops=190.99,step=2,loss=11.49,tgs
(tokens/gpu/second)=4300.69,lr=8e-07,loss_scale=65536.0,grad_norm=61.57,micro_num=4,...

Names and order are InternLM's, so that scripts that read its logs keep working. `step` counts from
0, as there. A field the run does not have (beta2 of an optimizer without one) is None.
"""

from collections.abc import Mapping

from headway.track.base import Value

FIELDS = {
    "tflops": "tflops",
    "step": "step",
    "loss": "loss",
    "tgs (tokens/gpu/second)": "tgs",
    "lr": "lr",
    "loss_scale": "loss_scale",
    "grad_norm": "grad_norm",
    "micro_num": "micro_num",
    "num_consumed_tokens": "num_consumed_tokens",
    "inf_nan_skip_batches": "inf_nan_skip_batches",
    "num_samples_in_batch": "num_samples_in_batch",
    "largest_length": "largest_length",
    "largest_batch": "largest_batch",
    "smallest_batch": "smallest_batch",
    "adam_beta2": "adam_beta2",
    "fwd_bwd_time": "fwd_bwd_time",
}
"""InternLM's name -> the name in metrics.jsonl."""
TWO_DIGITS = ("tgs (tokens/gpu/second)", "fwd_bwd_time")
"""Fields that InternLM rounds."""


def internlm_line(step: int, metrics: Mapping[str, Value]) -> str:
    """The line of one step from its flat metrics.

    `step` is the number of updates so far, at least 1.
    """
    values: dict[str, Value] = {name: metrics.get(key) for name, key in FIELDS.items()}
    # InternLM counts steps from 0.
    values["step"] = step - 1
    for name in TWO_DIGITS:
        value = values[name]
        if isinstance(value, float):
            values[name] = round(value, 2)
    return ",".join(f"{name}={value}" for name, value in values.items())
