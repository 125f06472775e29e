"""What the engine runs on the device: packed prompts, and decoding steps that are recorded once per
batch size and replayed.

    step of a bucket    slots [B] -> their last tokens and lengths -> model -> logits [B,V] ->
                        likeliest token -> last token, length + 1

Tokens and lengths stay on the device, so that the next step can start before the host has seen the
tokens of this one. Rows of a bucket beyond the batch stand at the slot that takes no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from headway.errors import ConfigError
from headway.infer.engine.request import EngineOptions
from headway.infer.load import LoadedModel
from headway.kernels.exact_attention import KEYS
from headway.model.adapter.rows import AdapterRows
from headway.model.base import compile_any_length
from headway.model.cache_blocks import to_device
from headway.model.paged_cache import PagedCache, PagedDecode
from headway.model.paged_layer import PrefillPiece
from headway.model.projector import MediaTensors

if TYPE_CHECKING:
    from headway.model.vision import PictureTensors

WARM_UP = 2
"""Steps that run before one is recorded, so that libraries have chosen their kernels and taken
their work space."""


def bucket_sizes(most: int) -> list[int]:
    """Batch sizes that are recorded, up to the first that holds `most` rows."""
    # Steps grow with the size: a padded row costs a smaller share of a larger batch.
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 48) if size < most]
    size = 64
    while size < most:
        sizes.append(size)
        size += 32 if size < 128 else 64
    return [*sizes, most]


class EngineDevice:
    """Forward passes over one cache, and the newest token of each of its slots."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: PagedCache,
        options: EngineOptions,
        vocab: int,
        adapters: AdapterRows | None = None,
    ) -> None:
        self.model = loaded.model
        self.cache = cache
        self.vocab = vocab
        self._adapters = adapters
        on_cuda = cache.device.type == "cuda"
        if options.record is True and not on_cuda:
            raise ConfigError(
                "record is true; decoding steps are recorded on CUDA and the model is on "
                f"{cache.device.type}. Use auto."
            )
        if on_cuda and (
            options.page_tokens < 16 or options.page_tokens & (options.page_tokens - 1)
        ):
            raise ConfigError(
                f"page_tokens is {options.page_tokens}; on CUDA it must be a power of two of 16 "
                "or more."
            )

        # Outside bf16 a mixture of experts reads on the host how many tokens each expert has; a
        # recorded step cannot. Exchanges between ranks are neither recorded nor compiled.
        self.part = loaded.part
        can_record = (
            on_cuda
            and self.part is None
            and (loaded.config.experts is None or self.model.head_weight.dtype == torch.bfloat16)
        )
        self.records = can_record if options.record == "auto" else options.record
        compiles = on_cuda if options.compile_blocks == "auto" else options.compile_blocks
        # Which adapter a stretch of tokens has would be compiled in.
        compiles = compiles and self.part is None and adapters is None
        self.has_first_times = on_cuda or bool(compiles)
        """Something is compiled, recorded, planned or loaded when a launch has a new size or
        kind."""

        self.is_exact = options.exact
        if self.is_exact:
            if on_cuda:
                raise ConfigError("exact is true; there are no such kernels for CUDA. Use the CPU.")
            if adapters is not None:
                raise ConfigError(
                    "exact is true and the engine has adapters, whose rows have no exact form. "
                    "Merge the adapter into the model, or set exact to false."
                )
            if options.page_tokens % KEYS:
                raise ConfigError(
                    f"page_tokens is {options.page_tokens}; with exact it must be a multiple of "
                    f"{KEYS}."
                )
            self.model.use_exact()
        if on_cuda:
            self.model.fuse_projections()
        forward = self.model.cached_forward
        if options.routes:
            forward = partial(forward, keeps_routes=True)
        self._prefill = forward(compile_any_length if compiles else None)
        self._decode = forward(partial(compile_any_length, dim=0) if compiles else None)

        self.last_token = torch.zeros(cache.slots + 1, dtype=torch.int64, device=cache.device)
        """[slots + 1]: the newest token of each slot; the last slot takes no part."""
        self.shift: torch.Tensor | None = None
        """[slots + 1]: what is added to the position of a new token to rotate it; None: nothing."""
        if loaded.config.vision is not None:
            self.shift = torch.zeros(cache.slots + 1, dtype=torch.int64, device=cache.device)
        self.adapter = torch.zeros(cache.slots + 1, dtype=torch.int64, device=cache.device)
        """[slots + 1]: the adapter of each slot; 0 = none."""

        self._logits = torch.empty(0, device=cache.device)
        self._sizes = bucket_sizes(cache.slots)
        self._batches: dict[int, PagedDecode] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # One memory pool for the graphs of all sizes: only one of them runs at a time.
        if self.records:
            self._pool = torch.cuda.graph_pool_handle()
        else:
            self._pool = None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile and record every bucket now, the largest first; otherwise each is recorded when
        it is first needed."""
        if self.records:
            for size in reversed(self._sizes):
                self._record(self._batch(size))

    @torch.inference_mode()
    def shift_rotation(self, slots: Sequence[int], shifts: Sequence[int]) -> None:
        """Rotate new tokens of some slots as the pictures before them ask for."""
        assert self.shift is not None, "only a model with a vision tower shifts rotation"
        both = to_device(torch.tensor([list(slots), list(shifts)]), self.cache.device)
        self.shift[both[0]] = both[1]

    @torch.inference_mode()
    def prefill(
        self,
        pieces: Sequence[PrefillPiece],
        tokens: Sequence[Sequence[int]],
        media: MediaTensors | PictureTensors | None = None,
        adapters: Sequence[int] = (),
    ) -> torch.Tensor:
        """Hidden states [N,D] of pieces of prompts, each with its adapter; their keys and values
        are stored."""
        # Decoding steps look the adapter up by slot, on the device.
        if self._adapters is not None:
            self._adapters.spans = _spans(pieces, adapters)
            chosen = to_device(
                torch.tensor([[piece.slot for piece in pieces], list(adapters)]), self.cache.device
            )
            self.adapter[chosen[0]] = chosen[1]

        # Ids and positions of all pieces as one row [1,N], in one copy to the device.
        packed = torch.tensor([token for some in tokens for token in some])
        positions = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces])
        packed_positions = to_device(torch.stack([packed, positions]), self.cache.device)
        hidden = self._prefill(
            packed_positions[0][None],
            packed_positions[1][None],
            self.cache.prefill_batch(pieces),
            media,
        )[0]
        self._leave_base()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [n,V] of hidden states [n,D]; ids beyond the vocabulary, which are padding, have no
        chance."""
        logits = self.model.logits(hidden).float()
        logits[:, self.vocab :] = -torch.inf
        return logits

    def agree(self, tokens: torch.Tensor) -> torch.Tensor:
        """Drawn tokens [n], the same on all ranks that share the layers."""
        if self.part is None:
            return tokens
        return self.part.agree(tokens)

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], most: int) -> torch.Tensor:
        """One more token in each slot, chosen greedily and kept in `last_token`; fp32 logits [B,V],
        which the next step overwrites.

        `most`: no slot has more tokens than this after the step.
        """
        # A recorded step has a fixed number of rows; without one, no row is computed for nothing.
        if self.records:
            size = next(bucket for bucket in self._sizes if bucket >= len(slots))
        else:
            size = len(slots)
        batch = self._batch(size)
        batch.most = most
        # The rows of a batch rarely change from step to step: the copy to the device is saved.
        if batch.host_slots != slots:
            batch.host_slots = list(slots)
            padded = [*slots, *[self.cache.slots] * (size - len(slots))]
            batch.slots.copy_(to_device(torch.tensor(padded), self.cache.device))
        if self.records:
            if size not in self._graphs:
                self._record(batch)
            self._graphs[size].replay()
        else:
            self._step(batch)
        self._leave_base()
        return self._logits[: len(slots)]

    def _leave_base(self) -> None:
        """Other users of the model see it without adapters."""
        if self._adapters is not None:
            self._adapters.index = None
            self._adapters.spans = ()

    def _batch(self, size: int) -> PagedDecode:
        if size not in self._batches:
            self._batches[size] = self.cache.decode_batch(size)
        return self._batches[size]

    def _step(self, batch: PagedDecode) -> None:
        """One decoding step of the slots in `batch`, from device memory to device memory: nothing
        here may read a value on the host, or it could not be recorded."""
        slots = batch.slots
        lengths = self.cache.lengths
        position = lengths[slots]
        # Read through `slots` on the device: a replayed graph sees the adapters of its present
        # rows.
        if self._adapters is not None:
            self._adapters.index = self.adapter[slots]
        media = None
        if self.shift is not None:
            from headway.model.vision import text_alone

            media = text_alone((position + self.shift[slots])[:, None])
        hidden = self._decode(self.last_token[slots][:, None], position[:, None], batch, media)
        logits = self.model.logits(hidden[:, 0])

        if len(self._logits) < batch.rows:
            # a recorded step must find its buffer where it was: the largest size at once
            rows = self._sizes[-1] if self.records else batch.rows
            self._logits = torch.empty(
                rows, logits.shape[-1], dtype=torch.float32, device=logits.device
            )
        # One buffer for all sizes: recorded steps write where the host reads.
        kept = self._logits[: batch.rows]
        kept.copy_(logits)
        kept[:, self.vocab :] = -torch.inf
        self.last_token[slots] = kept.argmax(-1)
        # the slot that takes no part has a negative length, and keeps it
        lengths[slots] = torch.where(position >= 0, position + 1, position)

    def _record(self, batch: PagedDecode) -> None:
        """Record the step of one batch size. Its rows stand at the slot that takes no part, so that
        recording changes nothing."""
        if batch.rows in self._graphs:
            return
        slots = batch.slots.clone()
        batch.slots.fill_(self.cache.slots)

        # Warmed up on a side stream, as torch asks for before a capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step(batch)
        torch.cuda.current_stream().wait_stream(stream)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(batch)
        graph.replay()  # the first one brings the graph to the device
        self._graphs[batch.rows] = graph
        batch.slots.copy_(slots)


def _spans(pieces: Sequence[PrefillPiece], adapters: Sequence[int]) -> list[tuple[slice, int]]:
    """Stretches of packed tokens that have an adapter, neighbours with the same one joined."""
    spans: list[tuple[slice, int]] = []
    begin = 0
    for piece, number in zip(pieces, adapters, strict=True):
        end = begin + piece.count
        # Stretches of the base model (0) are in no span.
        if number and spans and spans[-1][1] == number and spans[-1][0].stop == begin:
            spans[-1] = (slice(spans[-1][0].start, end), number)
        elif number:
            spans.append((slice(begin, end), number))
        begin = end
    return spans
