"""What a decode plan covers and what its reference sees; the Triton kernel is in test_triton_forms.py."""

import torch
from support.decode_case import case

from headway.kernels.decode_attention import DecodePlan, decode_reference


def test_a_plan_covers_every_slot_once_and_cuts_long_regions() -> None:
    regions = [(0, 1, 4, 1000, 1 << 30), (8000, 0, 0, 300_000, 1 << 30)]
    plan = DecodePlan.of(regions, 8, 2, 4, torch.device("cpu"))
    assert plan.stretch == 640
    assert plan.heads.tolist() == [[2, 469, 300_000, 0], [0, 2, 1004, 0]]
    assert plan.items[:, 5].tolist() == [0, 640, *range(0, 300_000, 640)]


def test_the_reference_sees_what_a_ring_keeps() -> None:
    q, k, v, keys, values, position, plan = case("mixed", 16, 1)
    o = decode_reference(q, k, v, keys, values, position, plan)
    assert torch.equal(o[0, 0], v[0, 0]), "a first token sees itself"
    assert not torch.isnan(o).any()


def test_a_row_at_minus_one_takes_no_part() -> None:
    q, k, v, keys, values, position, plan = case("mixed", 16, 1)
    expected, before = (
        decode_reference(q, k, v, keys.clone(), values.clone(), position, plan),
        keys.clone(),
    )
    position[1] = -1
    o = decode_reference(q, k, v, keys, values, position, plan)
    assert torch.equal(o[[0, 2, 3]], expected[[0, 2, 3]]) and not o[1].any()
    assert (keys != before).sum() == 2 * 3 * 16, "two heads, three rows, one key each"
