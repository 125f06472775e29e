"""The estimate in bytes counted by hand, to the byte: no tolerance behind which a whole width or matrix could hide.

D = 64, A = 64, K = 32, F = 160, 4 heads, 1000 ids, 200 tokens of a microbatch, a million parameters over 4 ranks.
"""

from dataclasses import replace
from typing import Any

import pytest

from headway.model.config import ModelConfig
from headway.parallel.config import MemoryConfig
from headway.plan.memory import GIB, MemoryJob, amount, estimate, moments, page_locked, suggestions

SHAPE = ModelConfig(
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=160,
    vocab_size=1000,
    max_seq_len=100,
)
JOB = MemoryJob(SHAPE, 1_000_000, 0, rows=2, seq_len=100, accumulate=2, compute_bytes=2, shards=4)


MIXED = SHAPE.with_(experts={"num": 8, "per_token": 3, "ffn_size": 40, "shared_ffn_size": 24})


def exact(job: MemoryJob) -> dict[str, int]:
    """Bytes before what allocators round up."""
    return {kind: round(size / 1.01) for kind, size in estimate(job).kinds.items()}


def test_every_kind_of_memory_of_a_bf16_rank_among_four_is_that_counted_by_hand() -> None:
    assert exact(JOB) == {
        "weights": 2_000_000,
        "masters": 1_000_000,  # 4 bytes, a quarter of them
        "gradients": 4_000_000,  # whole on every rank
        "optimizer state": 2_000_000,  # 8 bytes, a quarter of them
        # a token of a block: 10 D + 2 A + 2 K + 4 F = 1472 elements and 32 bytes of sums: 2976 bytes; 200 tokens, 4 blocks
        # then the last norm and angles: 200 (5 * 64 * 2 + 4 * 16)
        "activations": 4 * 595_200 + 140_800,
        # 200 * 1000 logits in 8 bytes (fp32 and two copies), the head's gradient 4 * 1000 * 64, and 200 (64 * 2 + 16)
        "logits and head": 1_600_000 + 256_000 + 28_800,
        "buffers": 0,  # on CUDA only
    }
    assert estimate(JOB).host == 0


@pytest.mark.parametrize(
    ("changes", "kind", "size"),
    [
        ({"shards": 1}, "masters", 4_000_000),
        ({"shards": 1}, "optimizer state", 8_000_000),
        ({"shards": 1, "compute_bytes": 4}, "masters", 0),  # the weights are the masters
        ({"compute_bytes": 4}, "weights", 4_000_000),
        ({"frozen": 500_000}, "weights", 3_000_000),
        ({"state_dtype": "bf16"}, "optimizer state", 1_000_000),
        ({"state_dtype": "8bit"}, "optimizer state", 531_250),  # 2.125 bytes
        ({"other_state_bytes": 6.0}, "optimizer state", 1_500_000),
        ({"grad_bytes": 2}, "gradients", 2_000_000),
        ({"grad_bytes": 2, "compute_bytes": 4}, "gradients", 4_000_000),
        (
            {"fsdp": True},
            "weights",
            2 * (64_000 + 2 * 234_000),
        ),  # the embedding, and two of four blocks at once
        (
            {"fsdp": True},
            "gradients",
            5_000_000,
        ),  # a quarter, and all of them while microbatches add up
        ({"fsdp": True, "accumulate": 1}, "gradients", 1_000_000),
        (
            {"on_cuda": True},
            "logits and head",
            400_000 + 256_000 + 28_800,
        ),  # the kernel overwrites bf16 logits
        ({"chunk_tokens": 50}, "logits and head", 400_000 + 256_000 + 28_800),
        (
            {"trained": 64_000},
            "logits and head",
            1_600_000 + 28_800,
        ),  # a head that does not train has no gradient
        ({"context": 2}, "logits and head", 800_000 + 256_000 + 14_400),
        (
            {"tensor": 2},
            "logits and head",
            800_000 + 128_000 + 28_800 + 25_600,
        ),  # a share of the vocabulary, hidden gathered
        ({"tensor": 2, "sequence": False}, "logits and head", 800_000 + 128_000 + 28_800),
        ({"on_cuda": True}, "buffers", (96 << 20) + (64 << 20)),
        ({"on_cuda": True, "shards": 1}, "buffers", 96 << 20),
        ({"streams": 5}, "buffers", 5 * 200 * 64 * 2),  # hidden states that a pipeline rank keeps
        ({"streams": 5, "tensor": 2}, "buffers", 5 * 200 * 32 * 2),
        (
            {"packed": 1000, "packed_bytes": 500, "frozen": 1000},
            "buffers",
            2 * 64 * 160,
        ),  # the widest matrix in floats
        (
            {"packed": 1000, "packed_bytes": 500, "frozen": 1000, "model": MIXED},
            "buffers",
            2 * 64 * 8 * 40,
        ),  # that of all experts
        ({"packed": 1000, "packed_bytes": 500, "frozen": 1000}, "weights", 2_000_000 + 500),
        (
            {"reference_bytes": 7000, "reference_token_bytes": 10},
            "reference model",
            7000 + 10 * 200,
        ),
        (
            {"fsdp": True, "frozen": 400_000},
            "weights",
            2 * (64_000 + 2 * 334_000) + 400_000,
        ),  # fp32, a quarter of them
    ],
)
def test_one_setting_changes_one_count(changes: dict[str, Any], kind: str, size: int) -> None:
    assert exact(replace(JOB, **changes))[kind] == pytest.approx(size, abs=1)


def test_the_peak_is_the_largest_of_three_moments() -> None:
    job = replace(JOB, on_cuda=True, accumulate=1, compiled=True)
    kept = 200 * 2 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 160 + 16)
    working = 200 * 2 * (160 + 64)  # the gradient of up, and that of the stream
    assert moments(job) == {
        "head": {
            "gradients": 0,
            "activations": 4 * kept + 140_800,
            "logits and head": 400_000 + 28_800 + 256_000,
        },
        "block": {"gradients": 256_000, "activations": 4 * kept + working, "logits and head": 0},
        "end": {"gradients": 4_000_000, "activations": kept + working, "logits and head": 0},
    }
    # the largest here: they are complete when backward ends
    assert exact(job)["gradients"] == pytest.approx(4_000_000, abs=1)
    wide = exact(replace(job, rows=20))
    assert wide["gradients"] == 0
    assert wide["activations"] == pytest.approx(40 * kept + 1_408_000, abs=1)
    # a recomputed block is whole while its backward runs
    again = moments(replace(job, memory=MemoryConfig(recompute=1.0)))
    assert again["block"]["activations"] == 4 * 25_600 + kept + working
    assert again["end"]["activations"] == 25_600 + kept + working
    assert moments(replace(job, has_head=False)).keys() == {"block", "end"}
    assert (
        moments(replace(job, has_head=False, held_blocks=6.0))["block"]["activations"]
        == 6 * kept + working
    )


@pytest.mark.parametrize(
    ("changes", "memory", "per_block"),
    [
        ({}, {}, 595_200),
        ({"compute_bytes": 4}, {}, 200 * 4 * (6 * 64 + 2 * 64 + 2 * 32 + 4 * 160 + 8)),
        ({"compiled": True}, {}, 200 * 2 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 160 + 16)),
        (
            {"compiled": True},
            {"recompute": "selective"},
            200 * 2 * (2 * 64 + 2 * 64 + 2 * 32 + 2 * 160 + 16),
        ),
        ({}, {"recompute": "selective"}, 200 * 2 * (3 * 64 + 3 * 64 + 3 * 32 + 2 * 160 + 16)),
        ({}, {"recompute": 1.0}, 200 * 2 * 64),
        (
            {"context": 2},
            {},
            100 * 2 * (1472 + 64 + 16),
        ),  # half of the tokens, and attention's result twice
        (
            {"compiled": True, "fp8": True},
            {},
            200 * 2 * (3 * 64 + 1.5 * 64 + 2 * 32 + 2 * 160 + 16),
        ),
        # norms are whole, stream and what is between the products is shared by two ranks; so are the heads' sums
        ({"compiled": True, "tensor": 2}, {}, 200 * 2 * (2 * 64 + 64 + 64 + 32 + 1.5 * 160 + 12)),
        (
            {"compiled": True, "tensor": 2, "sequence": False},
            {},
            200 * 2 * (4 * 64 + 64 + 32 + 1.5 * 160 + 12),
        ),
        ({"model": SHAPE.with_(qk_norm=True)}, {}, 200 * 2 * (1472 + 64 + 32 + 16)),
        (
            {"model": SHAPE.with_(dropout=0.1)},
            {},
            200 * 2 * (1472 + 16 + 64),
        ),  # a byte for each of two widths
        (
            {"model": SHAPE.with_(norm_placement="both")},
            {},
            200 * 2 * (1472 + 2 * 64 + 16),
        ),  # what two more norms read
        # q and o over four ranks, k and v over the two KV heads; one head's sums of four
        (
            {"compiled": True, "tensor": 4},
            {},
            200 * 2 * (2 * 16 + 2 * 64 + 2 * 16 + 2 * 16 + 3 * 40 + 10),
        ),
        # gate and up of three experts of 40 in place of four of the dense 160, the shared one three times, scores of 8 experts three times
        # in fp32 and 24 bytes for each choice, and the router's input in fp32
        (
            {"model": MIXED},
            {},
            200 * 2 * (1472 - 4 * 160 + 2 * 3 * 40 + 3 * 24 + (96 + 72) / 2 + 2 * 64 + 16),
        ),
        # slots from other ranks: three widths instead of the token's own one
        (
            {"model": MIXED, "expert": 2},
            {},
            200 * 2 * (1472 - 4 * 160 + 2 * 3 * 40 + 3 * 24 + 84 + 2 * 64 + 2 * 64 + 16),
        ),
    ],
)
def test_a_block_more_costs_what_it_keeps(
    changes: dict[str, Any], memory: dict[str, Any], per_block: int
) -> None:
    job = replace(JOB, **changes, memory=MemoryConfig.model_validate(memory))
    more = replace(job, model=job.model.with_(num_layers=5))
    assert moments(more)["head"]["activations"] - moments(job)["head"][
        "activations"
    ] == pytest.approx(per_block, abs=2)


def test_a_mixture_works_with_the_slots_of_its_tokens() -> None:
    dense = moments(replace(JOB, model=SHAPE))
    mixed = moments(replace(JOB, model=MIXED))
    kept = 200 * 2 * (1472 - 4 * 160 + 2 * 3 * 40 + 3 * 24 + 84 + 2 * 64 + 16)
    # of each of three slots: gradients of gate, up and their product, and sorted copies of inputs, results and gradients
    slots = 200 * 2 * 3 * (3 * 40 + 3 * 64)
    plain = 200 * 2 * (3 * 160 + 2 * 64)
    assert dense["block"]["activations"] == 4 * 595_200 + plain
    assert mixed["block"]["activations"] == pytest.approx(4 * kept + plain + slots, abs=4)
    sent = moments(replace(JOB, model=MIXED, expert=2))
    arrived = 200 * 2 * 2 * 64
    assert sent["block"]["activations"] == pytest.approx(
        4 * (kept + arrived) + plain + slots + 200 * 2 * 3 * 2 * 64, abs=4
    )


def test_an_adapter_works_with_gate_and_up_of_its_own() -> None:
    plain = moments(replace(JOB, adapter=False))["block"]["activations"]
    adapted = moments(replace(JOB, adapter=True))["block"]["activations"]
    assert adapted - plain == 200 * 2 * 2 * 160


def test_page_locked_memory_comes_in_powers_of_two() -> None:
    assert [page_locked(size) for size in (0, 1, 1023, 1024, 1025)] == [0, 1, 1024, 1024, 2048]


def test_what_is_offloaded_waits_on_the_host() -> None:
    state = estimate(replace(JOB, memory=MemoryConfig(offload=("optimizer",))))
    assert (state.kinds["masters"], state.kinds["optimizer state"], state.host) == (0, 0, 3_000_000)
    outside = estimate(replace(JOB, memory=MemoryConfig(offload=("activations",))))
    assert (round(outside.kinds["activations"] / 1.01), outside.host) == (
        3 * 595_200 + 140_800,
        4 * 595_200,
    )


def test_bytes_are_written_for_people() -> None:
    assert (amount(1.5 * GIB), amount(0.04 * GIB)) == ("1.5 GiB", "41.0 MiB")


def test_fewer_rows_mean_more_microbatches_and_the_next_smaller_divisor() -> None:
    freed = dict(
        suggestions(replace(JOB, rows=6, accumulate=1, on_cuda=True, shards=1, trained=40_000))
    )
    assert "batch.micro_rows=3" in freed
    assert not any(name.startswith("batch.micro_rows=") and name[-1] != "3" for name in freed)
    # with two microbatches gradients are kept between them: what is freed is less by their bytes
    whole = estimate(
        replace(JOB, rows=6, accumulate=1, on_cuda=True, shards=1, trained=40_000)
    ).total
    half = estimate(
        replace(JOB, rows=3, accumulate=2, on_cuda=True, shards=1, trained=40_000)
    ).total
    assert freed["batch.micro_rows=3"] == whole - half
