"""Settings of objectives beside next_token."""

from support.observe import Row, numbers, observed, refused

DPO = ("data.train=[$/pairs]", "data.seq_len=64", "objective.kind=dpo")
ROWS: dict[str, Row] = {
    "objective[dpo].kind": (DPO[:2], "dpo", "nothing", refused),
    "objective[dpo].loss_type": (DPO, "sigmoid", "kto_pair", numbers),
    "objective[dpo].beta": (DPO, 0.1, 0.5, numbers),
    "objective[dpo].label_smoothing": (DPO, 0.0, 0.3, numbers),
    "objective[dpo].reference_free": (DPO, False, True, numbers),
    "objective[dpo].reference": (DPO, None, "$/nowhere", refused),
    "objective[dpo].reference_logps": (DPO, "live", "cached", lambda o: "second model" in observed(o).log),
    "objective[orpo].kind": (DPO[:2], "orpo", "nothing", refused),
    "objective[orpo].beta": ((*DPO[:2], "objective.kind=orpo"), 0.1, 0.5, numbers),
    "objective[simpo].kind": (DPO[:2], "simpo", "nothing", refused),
    "objective[simpo].beta": ((*DPO[:2], "objective.kind=simpo"), 2.0, 1.0, numbers),
    "objective[simpo].gamma": ((*DPO[:2], "objective.kind=simpo"), 1.0, 0.2, numbers),
    "objective[simpo].label_smoothing": ((*DPO[:2], "objective.kind=simpo"), 0.0, 0.3, numbers),
}
