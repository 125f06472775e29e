"""The contrastive objective: value and gradients are those of plain autograd over the whole step, whatever is absent or split."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.small_aligner import batch_of, columns, naive_loss

from headway.errors import ConfigError
from headway.model.base import Embeddings, LMHead, ModelOut
from headway.tasks.base import Collectives, Loss, SeenRows, StepInfo
from headway.tasks.contrastive import (
    STEP_VECTORS,
    Config,
    Contrastive,
    places_of,
    recall_ceiling,
    retrieval_sums,
)

NAMES = ("text", "image", "audio")
ALONE: Collectives = None  # type: ignore[assignment] - the objective does not communicate: the first pass does


def vectors(rows: int, seed: int = 0, modalities: int = 3, dim: int = 6) -> torch.Tensor:
    values = torch.randn(
        rows, modalities, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    )
    return F.normalize(values, dim=-1)


def out_of(values: torch.Tensor, present: torch.Tensor, names: tuple[str, ...] = NAMES) -> ModelOut:
    return ModelOut(
        LMHead(values, values.new_zeros(0, values.shape[-1]), 1),
        embeddings=Embeddings(names, values, present),
    )


def share_of(loss: Loss, rows: int) -> torch.Tensor:
    return loss.share({"rows": float(rows), "targets": 0.0})


def whole(
    objective: Contrastive,
    values: torch.Tensor,
    present: torch.Tensor,
    names: tuple[str, ...] = NAMES,
) -> torch.Tensor:
    batch = batch_of({"sample": torch.arange(len(values))})
    return share_of(
        objective.loss(out_of(values, present, names), batch, StepInfo(0, 1), ALONE), len(values)
    )


def scale_of(objective: Contrastive) -> torch.nn.Parameter:
    assert objective.module is not None
    return next(objective.module.parameters())


def check_against_autograd(objective: Contrastive, scales: torch.Tensor) -> torch.Tensor:
    """Compares loss and gradients of vectors; returns the gradient of each modality's scale."""
    present = torch.rand(9, 3, generator=torch.Generator().manual_seed(1)) > 0.3
    ours = vectors(9).requires_grad_()
    reference = vectors(9).requires_grad_()
    loss = whole(objective, ours, present)
    loss.backward()
    expected = naive_loss(reference, present, scales)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-5, atol=1e-7)
    assert scales.grad is not None
    return scales.grad


def test_value_and_gradients_with_one_scale_are_those_of_plain_autograd() -> None:
    objective = Config(log_scale=2.3).build()
    gradient = check_against_autograd(objective, torch.tensor([2.3] * 3, requires_grad=True))
    torch.testing.assert_close(scale_of(objective).grad, gradient.sum(), rtol=1e-5, atol=1e-7)


def test_value_and_gradients_with_a_scale_per_modality_are_those_of_plain_autograd() -> None:
    objective = Config(log_scale={"text": 1.0, "image": 2.66, "audio": 2.0}).build()
    scales = torch.tensor([1.0, 2.66, 2.0], requires_grad=True)
    gradient = check_against_autograd(objective, scales)
    torch.testing.assert_close(scale_of(objective).grad, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_two_modalities_are_the_loss_of_clip_in_transformers() -> None:
    clip = pytest.importorskip("transformers.models.clip.modeling_clip")
    ours = vectors(7, modalities=2).requires_grad_()
    reference = vectors(7, modalities=2).requires_grad_()
    objective = Config(log_scale=2.6592).build()
    loss = whole(objective, ours, torch.ones(7, 2, dtype=torch.bool), NAMES[:2])
    similarity = reference[:, 0] @ reference[:, 1].T
    expected = clip.image_text_contrastive_loss(similarity * torch.tensor(2.6592).exp())
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, reference.grad, rtol=0, atol=1e-6)


def test_what_is_absent_changes_nothing_at_all() -> None:
    present = torch.tensor(
        [[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.bool
    )
    results = []
    for noise in (0.0, 1e6, float("nan")):
        values = torch.where(present[..., None], vectors(6), torch.full((), noise)).requires_grad_()
        objective = Config().build()
        loss = whole(objective, torch.where(present[..., None], values, 0.0), present)
        loss.backward()
        assert values.grad is not None
        assert bool((values.grad[~present] == 0).all())
        results.append((loss.detach(), values.grad[present], scale_of(objective).grad))
    for result in results[1:]:
        for got, right in zip(result, results[0], strict=True):
            assert torch.equal(got, right)  # type: ignore[arg-type]
    lone = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]], dtype=torch.bool)
    assert torch.allclose(results[0][0], whole(Config().build(), vectors(6)[:4], lone), rtol=1e-6)


@pytest.mark.parametrize(
    "present",
    [torch.ones(1, 3), torch.zeros(4, 3), torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1]])],
)
def test_one_sample_or_nothing_to_compare_is_a_loss_of_zero(present: torch.Tensor) -> None:
    values = vectors(len(present)).requires_grad_()
    objective = Config().build()
    loss = whole(objective, values, present.bool())
    loss.backward()
    assert float(loss.detach()) == 0
    assert values.grad is not None
    assert not values.grad.any()
    assert not scale_of(objective).grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("micro", [2, 3, 6])
def test_microbatches_add_up_to_the_whole(micro: int) -> None:
    present = torch.rand(6, 3, generator=torch.Generator().manual_seed(4)) > 0.2
    undivided = vectors(6).requires_grad_()
    whole_objective = Config().build()
    expected = whole(whole_objective, undivided, present)
    expected.backward()

    divided = vectors(6).requires_grad_()
    objective = Config().build()
    size = 6 // micro
    parts = [slice(start, start + size) for start in range(0, 6, size)]
    outs = [out_of(divided[part], present[part]) for part in parts]
    batches = [batch_of({"sample": torch.arange(6)[part]}) for part in parts]
    parts_read = [
        objective.read_vectors(out, batch) for out, batch in zip(outs, batches, strict=True)
    ]
    first_pass = torch.cat(parts_read)
    total = torch.zeros(())
    for part, out, batch in zip(parts, outs, batches, strict=True):
        step_info = StepInfo(0, 1, seen={STEP_VECTORS: SeenRows(first_pass, part.start)})
        total = total + share_of(objective.loss(out, batch, step_info, ALONE), 6)
    total.backward()

    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(divided.grad, undivided.grad, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(
        scale_of(objective).grad, scale_of(whole_objective).grad, rtol=1e-5, atol=1e-7
    )


def test_a_matrix_in_chunks_is_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    values = vectors(11)
    present = torch.rand(11, 3, generator=torch.Generator().manual_seed(5)) > 0.2
    expected = whole(Config().build(), values, present)
    monkeypatch.setattr("headway.tasks.contrastive.CHUNK_ROWS", 4)
    torch.testing.assert_close(whole(Config().build(), values, present), expected)


def scale_gradient_at_the_limit(first: torch.Tensor, second: torch.Tensor) -> float:
    """The gradient of a scale above its limit, for pairs of these vectors."""
    objective = Config(log_scale=2.0, max_scale=8.0).build()
    with torch.no_grad():
        scale_of(objective).fill_(2.5)
    pairs = torch.stack([first, second], dim=1)
    whole(objective, pairs, torch.ones(len(pairs), 2, dtype=torch.bool), NAMES[:2]).backward()
    gradient = scale_of(objective).grad
    assert gradient is not None
    return float(gradient)


def test_at_its_limit_the_scale_does_not_grow() -> None:
    values = vectors(6, modalities=2)[:, 0]
    # Perfect pairs ask for a larger scale.
    assert scale_gradient_at_the_limit(values, values) == 0


def test_at_its_limit_the_scale_may_shrink() -> None:
    values = vectors(6, modalities=2)[:, 0]
    # Wrong pairs ask for a smaller scale.
    assert scale_gradient_at_the_limit(values, values.roll(1, 0)) > 0


def test_chosen_pairs_alone_count() -> None:
    values = vectors(5)
    present = torch.ones(5, 3, dtype=torch.bool)
    loss = whole(Config(pairs=("image-text",)).build(), values, present)
    expected = naive_loss(values[:, :2], present[:, :2], torch.full((2,), 2.6593))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_ranks_count_ties_by_chance() -> None:
    second = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.6, 0.8]])
    first = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    better, equal = places_of(first, second, torch.tensor([True, True, True, True]))
    assert better.tolist() == [0, 0, 0, 2]
    assert equal.tolist() == [1, 2, 2, 1]


def test_retrieval_metrics_are_those_counted_by_hand() -> None:
    values = torch.eye(4)[:, None, :].repeat(1, 2, 1)
    values[3, 1] = torch.eye(4)[0]  # the partner of sample 3 looks like sample 0
    first_pass = torch.cat([values.flatten(1), torch.ones(4, 3)], dim=1)
    sums = retrieval_sums(first_pass, NAMES[:2], [(0, 1)], slice(0, 4))
    metrics = {name: float(total / weight) for name, (total, weight) in sums.items()}
    # Sample 0 ties with 3; for 3 all four are equal.
    recall = (0.5 + 1 + 1 + 0.25) / 4
    assert metrics["text_to_image/recall_at_1"] == pytest.approx(recall)
    assert metrics["text_to_image/recall_at_5"] == 1
    assert metrics["text-image/samples"] == 4
    assert metrics["text-image/positive_similarity"] == pytest.approx(0.75)
    assert metrics["text-image/negative_similarity"] == pytest.approx(1 / 12)


TEXTS = [[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [0.0, 0.0]]
IMAGES = [[-0.6, 0.8], [-0.8, 0.6], [-1.0, 0.0], [0.0, 0.0], [0.6, 0.8]]
"""Similarities of the first three samples: (-0.6, -0.8, -1), (0.8, 0.6, 0), (-0.8, -0.6, 0). The fourth sample has no image and the fifth
no text: a vector of zeros, which is closer to most texts than their own images are."""


@pytest.mark.parametrize("parts", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_absent_samples_take_no_place_in_any_metric(parts: list[int]) -> None:
    values = torch.stack([torch.tensor(TEXTS), torch.tensor(IMAGES)], dim=1)
    present = torch.tensor([[1.0, 1], [1, 1], [1, 1], [1, 0], [0, 1]])
    first_pass = torch.cat([values.flatten(1), present, torch.ones(5, 1)], dim=1)
    sums: dict[str, list[float]] = {}
    start = 0
    for size in parts:
        for name, (total, weight) in retrieval_sums(
            first_pass, NAMES[:2], [(0, 1)], slice(start, start + size)
        ).items():
            before = sums.get(name, [0.0, 0.0])
            sums[name] = [before[0] + float(total), before[1] + float(weight)]
        start += size
    metrics = {name: total / weight for name, (total, weight) in sums.items()}
    expected = {
        # ranks 1, 2 and 1
        "text_to_image/recall_at_1": 2 / 3,
        "text_to_image/recall_at_5": 1.0,
        "text_to_image/mrr": (1 + 1 / 2 + 1) / 3,
        "text_to_image/median_rank": 1.0,
        # ranks 2 and 1; for the third both texts are as close, so it stands first or second
        "image_to_text/recall_at_1": (0 + 1 + 1 / 2) / 3,
        "image_to_text/mrr": (1 / 2 + 1 + 1 / 1.5) / 3,
        "image_to_text/median_rank": 1.5,
        "text-image/positive_similarity": 0.0,
        "text-image/negative_similarity": -2.4 / 6,
        # means (1/3, 0) and (-2.4/3, 1.4/3)
        "text-image/modality_gap": (3.4**2 + 1.4**2) ** 0.5 / 3,
        "text-image/samples": 3.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert sums["text_to_image/recall_at_1"][1] == 3.0


def test_validation_reports_the_loss_and_every_direction() -> None:
    values = vectors(5)
    present = torch.ones(5, 3, dtype=torch.bool)
    batch = batch_of({"sample": torch.arange(5)})
    validating = StepInfo(0, 1, training=False)
    metrics = Config().build().loss(out_of(values, present), batch, validating, ALONE).metrics
    total, weight = metrics["loss"]
    expected = naive_loss(values, present, torch.full((3,), 2.6592600))
    torch.testing.assert_close(total / weight, expected, rtol=1e-5, atol=1e-6)
    directions = {f"{a}_to_{b}/mrr" for a in NAMES for b in NAMES if a != b}
    assert directions <= set(metrics)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Config(log_scale={"text": 1.0}),
            r"objective\.log_scale has text; the aligner has text, image",
        ),
        (Config(pairs=("text-audio",)), r"objective\.pairs has 'text-audio'"),
    ],
    ids=["scales", "pairs"],
)
def test_scales_and_pairs_of_other_modalities_are_refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.check_modalities(("text", "image"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": ("text",)}, "two modalities"),
        ({"learn_scale": False, "scale_lr": 0.1}, "would be ignored"),
        ({"log_scale": 9.0}, "must be between"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Config.model_validate(settings)


def test_the_columns_of_the_support_module_have_absent_rows() -> None:
    batch = columns(0)
    assert not batch["present.image"].all()
    assert not batch["present.image"][-1]


def loss_of_equal_items(
    values: torch.Tensor, contents: torch.Tensor, config: Config
) -> torch.Tensor:
    """The loss of text and image vectors [N, 2, D] whose captions have these numbers; pictures all differ."""
    rows = len(values)
    batch = batch_of(
        {
            "sample": torch.arange(rows),
            "content.text": contents,
            "content.image": torch.arange(rows) + (1 << 44),
        }
    )
    objective = config.build()
    out = out_of(values, torch.ones(rows, 2, dtype=torch.bool), NAMES[:2])
    return share_of(objective.loss(out, batch, StepInfo(0, 1), ALONE), rows)


def test_samples_with_the_same_caption_are_no_negatives() -> None:
    values = vectors(5, modalities=2).requires_grad_()
    contents = torch.tensor([7, 7, (1 << 47) + 1, 9, 7])
    loss = loss_of_equal_items(values, contents, Config(log_scale=1.5, equal_items="ignore"))
    logits = values[:, 0] @ values[:, 1].T * torch.tensor(1.5).exp()
    same = (contents[:, None] == contents[None, :]) & ~torch.eye(5, dtype=torch.bool)
    logits = logits.masked_fill(same, float("-inf"))
    labels = torch.arange(5)
    expected = (
        torch.nn.functional.cross_entropy(logits, labels)
        + torch.nn.functional.cross_entropy(logits.T, labels)
    ) / 2
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    (by_hand,) = torch.autograd.grad(expected, values, retain_graph=True)
    (ours,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=1e-6)
    plain = loss_of_equal_items(values, contents, Config(log_scale=1.5))
    assert abs(plain.item() - loss.item()) > 1e-3


def test_contents_that_differ_in_one_bit_are_different() -> None:
    values = vectors(4, modalities=2)
    different = torch.tensor([1 << 5, 1 << 21, 1 << 37, 0])
    ignoring = loss_of_equal_items(values, different, Config(equal_items="ignore"))
    torch.testing.assert_close(ignoring, loss_of_equal_items(values, different, Config()))


@pytest.mark.parametrize(
    ("queries", "candidates", "ceiling"),
    [("abcd", "wxyz", 1.0), ("aabc", "wxyz", 0.75), ("abcd", "wwwz", 0.5), ("aa", "ww", 0.5)],
)
def test_equal_items_limit_recall(queries: str, candidates: str, ceiling: float) -> None:
    assert recall_ceiling(queries, candidates) == pytest.approx(ceiling)
