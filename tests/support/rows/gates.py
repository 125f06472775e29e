"""Settings of head gates and of the objective that trains them."""

from typing import Any

from support.setting_runs import Row, data_folder, loss_numbers, numbers_or_refusal, trained_run

TRAINED = ("objective.kind=head_sparsity",)
OPEN = (*TRAINED, "model.head_gates.init_mean=0", "steps=5")
"""Gates that are undecided from the start, so that everything about them shows."""
NEAR = (
    *TRAINED,
    "model.head_gates.init_mean=-4",
    "model.head_gates.sinks=1",
    "model.head_gates.window=4",
)


def masked(overrides: tuple[str, ...]) -> Any:
    """The gates' sparsity in a run that may start from a mask file of soft values."""
    (data_folder() / "soft.tsv").write_text("0.9\t0.6\n0.2\t0.7\n")
    return [(r["loss"], r["sparsity"]) for r in trained_run(overrides).records]


def without(path: str) -> tuple[str, ...]:
    return tuple(text for text in NEAR if not text.startswith(path))


ROWS: dict[str, Row] = {
    "model.head_gates.window": (without("model.head_gates.window"), 4, 16, loss_numbers),
    "model.head_gates.sinks": (without("model.head_gates.sinks"), 1, 8, loss_numbers),
    "model.head_gates.init_mean": (TRAINED, 4.0, -4.0, loss_numbers),
    "model.head_gates.init_std": (OPEN, 0.01, 3.0, loss_numbers),
    "model.head_gates.stripe": (TRAINED, False, True, loss_numbers),
    "init.masks": (TRAINED, None, "$/soft.tsv", masked),
    "init.masks_sparsity": ((*TRAINED, "init.masks=$/soft.tsv"), None, 0.5, masked),
    "objective[head_sparsity].kind": ((), "head_sparsity", "nothing", numbers_or_refusal),
    "objective[head_sparsity].control": (OPEN, "lagrangian", "hold", loss_numbers),
    "objective[head_sparsity].start": (TRAINED, 0.0, 0.5, loss_numbers),
    "objective[head_sparsity].target": (TRAINED, 0.7, 0.3, loss_numbers),
    "objective[head_sparsity].warmup": (TRAINED, 0.8, 1, loss_numbers),
    "objective[head_sparsity].warmup_shape": (TRAINED, "linear", "logarithmic", loss_numbers),
    "objective[head_sparsity].measure": (OPEN, "sampled", "expected_l0", loss_numbers),
    "objective[head_sparsity].linear_term": (TRAINED, True, False, loss_numbers),
    "objective[head_sparsity].window": (without("model.head_gates.window"), 4, 16, loss_numbers),
    "objective[head_sparsity].sinks": (without("model.head_gates.sinks"), 1, 8, loss_numbers),
    "objective[head_sparsity].mask_lr": (OPEN, 1.0, 0.1, loss_numbers),
    "objective[head_sparsity].reg_lr": (OPEN, 1.0, 0.1, loss_numbers),
    "objective[head_sparsity].mask_weight_decay": (
        (*TRAINED, "model.head_gates.init_mean=1", "steps=5"),
        0.1,
        0.9,
        loss_numbers,
    ),
    "objective[head_sparsity].reg_weight_decay": (OPEN, 0.1, 0.0, loss_numbers),
    "objective[head_sparsity].mask_betas": (OPEN, [0.7, 0.95], [0.9, 0.95], loss_numbers),
    "objective[head_sparsity].reg_betas": (OPEN, [0.0, 0.99], [0.9, 0.95], loss_numbers),
}
