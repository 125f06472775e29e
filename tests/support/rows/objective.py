"""Settings of objectives beside next_token."""

from typing import Any

from support.observe import Row, numbers, observed, refused, root

DPO = ("data.train=[$/pairs]", "data.seq_len=64", "objective.kind=dpo")
KTO = (*DPO[:2], "objective.kind=kto")
TAUGHT = ("run.name=x", "objective.kind=distill", "objective.teacher=$/runs1/run")


def taught(overrides: tuple[str, ...]) -> Any:
    observed((f"run.dir={root()}/runs1",))
    return refused(overrides)


ROWS: dict[str, Row] = {
    "objective[dpo].kind": (DPO[:2], "dpo", "nothing", refused),
    "objective[dpo].loss_type": (DPO, "sigmoid", "kto_pair", numbers),
    "objective[dpo].beta": (DPO, 0.1, 0.5, numbers),
    "objective[dpo].label_smoothing": (DPO, 0.0, 0.3, numbers),
    "objective[dpo].reference_free": (DPO, False, True, numbers),
    "objective[dpo].reference": (DPO, None, "$/nowhere", refused),
    "objective[dpo].reference_logps": (
        DPO,
        "live",
        "cached",
        lambda o: "second model" in observed(o).log,
    ),
    "objective[distill].kind": (
        (TAUGHT[0], "model.hidden_size=16", "init.from=$/runs1/run"),
        "distill",
        "nothing",
        taught,
    ),
    "objective[distill].teacher": (TAUGHT[:2], "$/runs1/run", "$/nowhere", taught),
    "objective[distill].cache": (TAUGHT[:2], None, "$/nowhere", refused),
    "objective[distill].tail": (TAUGHT[:2], "bucket", "drop", refused),
    "objective[distill].direction": (TAUGHT, "forward", "reverse", taught),
    "objective[distill].temperature": (TAUGHT, 1.0, 2.0, taught),
    "objective[distill].alpha": (TAUGHT, 0.5, 1.0, taught),
    "objective[kto].kind": (DPO[:2], "kto", "nothing", refused),
    "objective[kto].beta": (KTO, 0.1, 0.5, numbers),
    "objective[kto].desirable_weight": (KTO, 1.0, 0.5, numbers),
    "objective[kto].undesirable_weight": (KTO, 1.0, 0.5, numbers),
    "objective[kto].reference": (KTO, None, "$/nowhere", refused),
    "objective[kto].reference_logps": (
        KTO,
        "live",
        "cached",
        lambda o: "second model" in observed(o).log,
    ),
    "objective[orpo].kind": (DPO[:2], "orpo", "nothing", refused),
    "objective[orpo].beta": ((*DPO[:2], "objective.kind=orpo"), 0.1, 0.5, numbers),
    "objective[reward].kind": (DPO[:2], "reward", "nothing", refused),
    "objective[reward].margin": ((*DPO[:2], "objective.kind=reward"), 0.0, 1.0, numbers),
    "objective[reward].center_rewards_coefficient": (
        (*DPO[:2], "objective.kind=reward"),
        0.0,
        1.0,
        numbers,
    ),
    "model.score_head": ((), False, True, refused),
    "objective[simpo].kind": (DPO[:2], "simpo", "nothing", refused),
    "objective[simpo].beta": ((*DPO[:2], "objective.kind=simpo"), 2.0, 1.0, numbers),
    "objective[simpo].gamma": ((*DPO[:2], "objective.kind=simpo"), 1.0, 0.2, numbers),
    "objective[simpo].label_smoothing": ((*DPO[:2], "objective.kind=simpo"), 0.0, 0.3, numbers),
}
