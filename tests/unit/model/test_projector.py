"""Media inputs: embeddings at their slots, the missing embedding elsewhere, absent items without any influence."""

import pytest
import torch
from pydantic import ValidationError
from support.media_batches import PATCHES, SHAPE, media_batch, media_config

from headway.model.base import build_model
from headway.model.config import ModelConfig
from headway.model.init import initialize
from headway.model.layout import param_specs
from headway.model.media_shape import MediaInput, MediaShape
from headway.model.projector import AlignerHead, MediaTensors
from headway.model.transformer import Transformer
from headway.parallel.collectives import DifferentiableCollectives, RankGroup
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextToken

SEPARATE = MediaShape((MediaInput("image", 6, 3), MediaInput("audio", 5, 2)), hidden=8)


def build(shape: MediaShape = SHAPE) -> Transformer:
    model = build_model(media_config(shape))
    assert isinstance(model, Transformer)
    initialize(model, 1)
    return model


def gradients(model: Transformer, batch: object) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = (
        NextToken()
        .build()
        .loss(
            model.forward_batch(batch),
            batch,
            StepInfo(0, 1),
            DifferentiableCollectives(RankGroup()),
        )
    )  # pyright: ignore[reportArgumentType]
    total = loss.share({"targets": 10.0})
    total.backward()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return float(total.detach()), found


@pytest.mark.parametrize("shape", [SHAPE, SEPARATE, PATCHES], ids=["shared", "separate", "patches"])
def test_soft_tokens_stand_at_their_slots_and_text_elsewhere(shape: MediaShape) -> None:
    model, batch = build(shape), media_batch(0, shape)
    assert [(spec.name, spec.shape) for spec in param_specs(model.config)] == [
        (n, tuple(p.shape)) for n, p in model.named_parameters()
    ]
    media = MediaTensors.of(batch, shape)
    assert media is not None and model.projector is not None
    x, plain = model.embed(batch.tokens, media), model.embed(batch.tokens)
    begin = 0
    for one in shape.inputs:
        projector = model.projector["shared" if shape.shared else one.modality]
        for row in range(len(x)):
            for place in (media.slot[row] >= begin).nonzero().flatten().tolist():
                item, k = divmod(int(media.slot[row, place]) - begin, one.tokens)
                if item >= 2:
                    continue
                features = media.features[one.modality][row, item]
                if model.aligner is not None:
                    features = model.aligner[one.modality](features)
                made = projector.down(torch.nn.functional.gelu(projector.up(features))).view(
                    one.tokens, -1
                )
                missing = projector.missing.expand(one.tokens, -1)
                wanted = made[k] if media.present[one.modality][row, item] else missing[k]
                torch.testing.assert_close(x[row, place], wanted)
        begin += 2 * one.tokens
    text = media.slot < 0
    assert torch.equal(x[text], plain[text])


def test_what_is_absent_changes_neither_loss_nor_any_gradient() -> None:
    model, batch = build(), media_batch(0)
    loss, found = gradients(model, batch)
    for garbage in (torch.nan, torch.inf, 1e30):
        for name in ("image", "audio"):
            features, present = batch.extra[f"media.{name}"], batch.extra[f"media.{name}.present"]
            features[~present] = garbage
        again, other = gradients(model, batch)
        assert again == loss
        assert all(torch.equal(other[name], found[name]) for name in found)


def test_a_batch_without_any_media_trains_the_missing_embedding_alone() -> None:
    model, batch = build(), media_batch(0, present=False)
    loss, found = gradients(model, batch)
    assert loss > 0 and found["projector.shared.missing"].abs().sum() > 0
    assert not any(
        found[f"projector.shared.{name}"].abs().sum()
        for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    )
    whole = gradients(model, media_batch(0, present=True))[1]
    assert (
        whole["projector.shared.up.weight"].abs().sum() > 0
        and not whole["projector.shared.missing"].abs().sum()
    )


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    from dataclasses import replace

    from headway.data.batch import TENSOR_FIELDS

    model, batch = build(), media_batch(0)
    whole = model.forward_batch(batch).hidden
    one = slice(5, 6)
    alone = replace(
        batch,
        **{name: getattr(batch, name)[one] for name in TENSOR_FIELDS},
        extra={name: column[one] for name, column in batch.extra.items()},
    )
    torch.testing.assert_close(model.forward_batch(alone).hidden, whole[one], rtol=1e-5, atol=1e-6)


def test_a_model_without_media_columns_reads_text() -> None:
    from dataclasses import replace

    model, batch = build(), media_batch(0)
    plain = build_model(media_config().with_(media=None))
    plain.load_state_dict(
        {
            name: value
            for name, value in model.state_dict().items()
            if not name.startswith(("projector.", "aligner."))
        }
    )
    torch.testing.assert_close(
        model.forward_batch(replace(batch, extra={})).hidden, plain.forward_batch(batch).hidden
    )


def test_a_shape_survives_json_and_bad_ones_are_refused() -> None:
    config = media_config()
    assert (
        ModelConfig.model_validate_json(config.model_dump_json()) == config
        and config.with_(dropout=0.1).media == SHAPE
    )
    for bad, said in (
        (MediaShape((), hidden=8), "at least one"),
        (MediaShape((MediaInput("image", 6, 3, vectors=4),), hidden=8), "every vector is a token"),
        (
            MediaShape(
                (MediaInput("image", 6, 3), MediaInput("audio", 5, 3)), hidden=8, shared=True
            ),
            "same width",
        ),
    ):
        with pytest.raises(ValidationError, match=said):
            media_config(bad)


def test_an_aligned_vector_is_normed_projected_and_of_length_one() -> None:
    head = AlignerHead(4, 2).requires_grad_(False)
    head.fc.weight.copy_(torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 2.0, 0.0, 0.0]]))
    # mean 2 and variance 2: (-2, 0, 0, 2) / sqrt(2) gives (0, 0); (0, 2, -2, 0) / sqrt(2) gives (0, 2 sqrt(2))
    found = head(torch.tensor([[0.0, 2.0, 2.0, 4.0], [2.0, 4.0, 0.0, 2.0], [4.0, 4.0, 0.0, 0.0]]))
    # (1, 1, -1, -1) gives (0, 2), which is (0, 1) after its length is taken out
    torch.testing.assert_close(
        found, torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), atol=1e-5, rtol=0
    )
    head.fc.weight.copy_(torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]]))
    torch.testing.assert_close(
        head(torch.tensor([[4.0, 4.0, 0.0, 0.0]])), torch.tensor([[0.6, 0.8]]), atol=1e-5, rtol=0
    )
