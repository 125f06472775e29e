"""Media inputs: embeddings at their slots, the missing embedding elsewhere, absent items without any influence."""

import pytest
import torch
from pydantic import ValidationError
from support.initial_weights import initialize
from support.media_batches import PATCHES, SHAPE, media_batch, media_config

from headway.model.base import build_model
from headway.model.config import ModelConfig
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
    gradients_by_name = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return float(total.detach()), gradients_by_name


@pytest.mark.parametrize("shape", [SHAPE, SEPARATE, PATCHES], ids=["shared", "separate", "patches"])
def test_soft_tokens_stand_at_their_slots_and_text_elsewhere(shape: MediaShape) -> None:
    model = build(shape)
    batch = media_batch(0, shape)
    assert [(spec.name, spec.shape) for spec in param_specs(model.config)] == [
        (n, tuple(p.shape)) for n, p in model.named_parameters()
    ]
    media = MediaTensors.of(batch, shape)
    assert media is not None
    assert model.projector is not None
    x = model.embed(batch.tokens, media)
    plain = model.embed(batch.tokens)
    begin = 0
    for modality in shape.inputs:
        projector = model.projector["shared" if shape.shared else modality.modality]
        for row in range(len(x)):
            for position in (media.slot[row] >= begin).nonzero().flatten().tolist():
                item, k = divmod(int(media.slot[row, position]) - begin, modality.tokens)
                if item >= 2:
                    continue
                features = media.features[modality.modality][row, item]
                features = model.aligner[modality.modality](features)
                soft_tokens = projector.down(torch.nn.functional.gelu(projector.up(features))).view(
                    modality.tokens, -1
                )
                missing = projector.missing.expand(modality.tokens, -1)
                wanted = (
                    soft_tokens[k] if media.present[modality.modality][row, item] else missing[k]
                )
                torch.testing.assert_close(x[row, position], wanted)
        begin += 2 * modality.tokens
    text = media.slot < 0
    assert torch.equal(x[text], plain[text])


def test_what_is_absent_changes_neither_loss_nor_any_gradient() -> None:
    model = build()
    batch = media_batch(0)
    loss, gradient = gradients(model, batch)
    for garbage in (torch.nan, torch.inf, 1e30):
        for name in ("image", "audio"):
            features = batch.extra[f"media.{name}"]
            present = batch.extra[f"media.{name}.present"]
            features[~present] = garbage
        again, other = gradients(model, batch)
        assert again == loss
        assert all(torch.equal(other[name], gradient[name]) for name in gradient)


def test_a_batch_without_any_media_trains_the_missing_embedding_alone() -> None:
    model = build()
    batch = media_batch(0, present=False)
    loss, gradient = gradients(model, batch)
    assert loss > 0
    assert gradient["projector.shared.missing"].abs().sum() > 0
    assert not any(
        gradient[f"projector.shared.{name}"].abs().sum()
        for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    )
    whole = gradients(model, media_batch(0, present=True))[1]
    assert whole["projector.shared.up.weight"].abs().sum() > 0
    assert not whole["projector.shared.missing"].abs().sum()


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    from dataclasses import replace

    from headway.data.batch import TENSOR_FIELDS

    model = build()
    batch = media_batch(0)
    whole = model.forward_batch(batch).hidden
    row = slice(5, 6)
    alone = replace(
        batch,
        **{name: getattr(batch, name)[row] for name in TENSOR_FIELDS},
        extra={name: column[row] for name, column in batch.extra.items()},
    )
    torch.testing.assert_close(model.forward_batch(alone).hidden, whole[row], rtol=1e-5, atol=1e-6)


def test_a_model_without_media_columns_reads_text() -> None:
    from dataclasses import replace

    model = build()
    batch = media_batch(0)
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
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    assert config.with_(dropout=0.1).media == SHAPE
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
    vectors = head(torch.tensor([[0.0, 2.0, 2.0, 4.0], [2.0, 4.0, 0.0, 2.0], [4.0, 4.0, 0.0, 0.0]]))
    # (1, 1, -1, -1) gives (0, 2), which is (0, 1) after its length is taken out
    torch.testing.assert_close(
        vectors, torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), atol=1e-5, rtol=0
    )
    head.fc.weight.copy_(torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]]))
    torch.testing.assert_close(
        head(torch.tensor([[4.0, 4.0, 0.0, 0.0]])), torch.tensor([[0.6, 0.8]]), atol=1e-5, rtol=0
    )
