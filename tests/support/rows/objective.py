"""Settings of objectives beside next_token."""

from typing import Any

from support.setting_runs import Row, data_folder, loss_numbers, numbers_or_refusal, trained_run

DPO = ("data.train=[$/pairs]", "data.seq_len=64", "objective.kind=dpo")
KTO = (*DPO[:2], "objective.kind=kto")
TAUGHT = ("run.name=x", "objective.kind=distill", "objective.teacher=$/runs1/run")


def taught(overrides: tuple[str, ...]) -> Any:
    trained_run((f"run.dir={data_folder()}/runs1",))
    return numbers_or_refusal(overrides)


ROWS: dict[str, Row] = {
    "objective[dpo].kind": (DPO[:2], "dpo", "nothing", numbers_or_refusal),
    "objective[dpo].loss_type": (DPO, "sigmoid", "kto_pair", loss_numbers),
    "objective[dpo].beta": (DPO, 0.1, 0.5, loss_numbers),
    "objective[dpo].label_smoothing": (DPO, 0.0, 0.3, loss_numbers),
    "objective[dpo].reference_free": (DPO, False, True, loss_numbers),
    "objective[dpo].reference": (DPO, None, "$/nowhere", numbers_or_refusal),
    "objective[dpo].reference_logps": (
        DPO,
        "live",
        "cached",
        lambda o: "second model" in trained_run(o).log,
    ),
    "objective[distill].kind": (
        (TAUGHT[0], "model.hidden_size=16", "init.from=$/runs1/run"),
        "distill",
        "nothing",
        taught,
    ),
    "objective[distill].teacher": (TAUGHT[:2], "$/runs1/run", "$/nowhere", taught),
    "objective[distill].cache": (TAUGHT[:2], None, "$/nowhere", numbers_or_refusal),
    "objective[distill].tail": (TAUGHT[:2], "bucket", "drop", numbers_or_refusal),
    "objective[distill].direction": (TAUGHT, "forward", "reverse", taught),
    "objective[distill].temperature": (TAUGHT, 1.0, 2.0, taught),
    "objective[distill].alpha": (TAUGHT, 0.5, 1.0, taught),
    "objective[kto].kind": (DPO[:2], "kto", "nothing", numbers_or_refusal),
    "objective[kto].beta": (KTO, 0.1, 0.5, loss_numbers),
    "objective[kto].desirable_weight": (KTO, 1.0, 0.5, loss_numbers),
    "objective[kto].undesirable_weight": (KTO, 1.0, 0.5, loss_numbers),
    "objective[kto].reference": (KTO, None, "$/nowhere", numbers_or_refusal),
    "objective[kto].reference_logps": (
        KTO,
        "live",
        "cached",
        lambda o: "second model" in trained_run(o).log,
    ),
    "objective[orpo].kind": (DPO[:2], "orpo", "nothing", numbers_or_refusal),
    "objective[orpo].beta": ((*DPO[:2], "objective.kind=orpo"), 0.1, 0.5, loss_numbers),
    "objective[reward].kind": (DPO[:2], "reward", "nothing", numbers_or_refusal),
    "objective[reward].margin": ((*DPO[:2], "objective.kind=reward"), 0.0, 1.0, loss_numbers),
    "objective[reward].center_rewards_coefficient": (
        (*DPO[:2], "objective.kind=reward"),
        0.0,
        1.0,
        loss_numbers,
    ),
    "model.score_head": ((), False, True, numbers_or_refusal),
    "objective[simpo].kind": (DPO[:2], "simpo", "nothing", numbers_or_refusal),
    "objective[simpo].beta": ((*DPO[:2], "objective.kind=simpo"), 2.0, 1.0, loss_numbers),
    "objective[simpo].gamma": ((*DPO[:2], "objective.kind=simpo"), 1.0, 0.2, loss_numbers),
    "objective[simpo].label_smoothing": (
        (*DPO[:2], "objective.kind=simpo"),
        0.0,
        0.3,
        loss_numbers,
    ),
}
