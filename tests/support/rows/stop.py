"""Settings of early stopping."""

from support.setting_runs import STORES, Row, trained_run

WORSE = (
    *STORES, "data.valid.fraction=0.4", "eval.every=1", "eval.rows=8", "steps=8", "optim.lr=1", "optim.schedule.kind=constant",
)  # fmt: skip


def steps(overrides: tuple[str, ...]) -> int:
    return len(trained_run(overrides).records)


ROWS: dict[str, Row] = {
    "eval.stop.patience": (WORSE, 1, 2, steps),
    "eval.stop.min_delta": ((*WORSE, "optim.lr=1e-2", "eval.stop.patience=3"), 0.0, 100.0, steps),
    "eval.stop.restore_best": (
        (*WORSE, "eval.stop.patience=2"),
        True,
        False,
        lambda o: "restored the weights of step" in trained_run(o).log,
    ),
}
