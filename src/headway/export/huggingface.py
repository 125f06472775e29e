"""A ModelConfig and named weights come in, a folder that AutoModelForCausalLM and AutoTokenizer load goes out, whole or not at all.
Tensors are written as they come: memory holds one of them. A reward model is for AutoModelForSequenceClassification.

config.json · generation_config.json · model.safetensors (or model-00001-of-00003.safetensors ... with an index) · tokenizer files
headway_digests.json with the digests of all of them (runtime/digests.py)
and, if requested, modeling_*.py with the class of a model that transformers does not have
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import resources
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.checkpoint.stored_model import find_model_of_family
from headway.errors import CheckpointError, ConfigError
from headway.export.streamed import LENGTH_BYTES, WIDTHS, StreamedFile
from headway.infer.load import check_vocabulary
from headway.model.families.base import family_of, pieces_of, published, published_with_code
from headway.model.families.transformers import code_files
from headway.model.head_masks.gates_file import write_gates
from headway.model.layout import GATES, num_parameters, param_specs
from headway.model.loading.huggingface import CONFIG, INDEX, WEIGHTS
from headway.model.media_files import without_media, write_media_files
from headway.runtime.digests import write_digests
from headway.runtime.json_file import load_json
from headway.runtime.progress import progress
from headway.runtime.storage import fsync_file, fsync_folder, remove_folder, rename_folder, writing
from headway.runtime.temporary import clear_leftovers, temporary_name

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig
    from headway.tokenizer.load import Tokenizer

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[str, Dtype] = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16",
}  # fmt: skip
"""Each dtype under the names people use."""
ROLE_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
MARK = {"format": "pt", "written_by": "headway"}


def export_huggingface(
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    *,
    tokenizer: Path | None,
    dtype: Dtype = "float32",
    max_shard_bytes: int = 5_000_000_000,
    remote_code: bool = False,
    end_ids: Collection[int] = (),
    model_folder: Path | None = None,
) -> None:
    """Write a Hugging Face folder; an earlier export at `out` is replaced; anything else there is refused.

    `end_ids` end a text besides the tokenizer's own end token; generation_config.json lists them.
    With `remote_code`, a model that transformers has no class for gets its class in a file next to the weights. Head gates go
    into files of their own (model/head_masks/gates_file.py), and so do media inputs (model/media_files.py; `model_folder` is where the
    model was): the weights are those of the plain model.
    """
    gates, media, config = (
        config.head_gates,
        config.media,
        config.with_(head_gates=None, media=None),
    )
    found: list[torch.Tensor] = []
    aside: dict[str, torch.Tensor] = {}
    target, settings, code = (
        published_with_code(config) if remote_code else (*published(config), None)
    )
    settings |= {"dtype": dtype, "torch_dtype": dtype}
    _check_target(out)
    with writing(out, error=CheckpointError), atomic_folder(out) as folder:
        ids = _write_tokenizer(tokenizer, folder, config, end_ids)
        _write_json(folder / CONFIG, {**settings, **ids})
        if code is not None:
            _write_code(code, folder)
        for file in code_files(config):
            shutil.copyfile(file, folder / file.name)
            _sync(folder / file.name)
        if not config.score_head:
            _write_json(folder / "generation_config.json", _generation(ids, end_ids))
        weights = without_media(_without_gates(weights, found), aside)
        _write_shards(target, _completed(config, target, weights), folder, dtype, max_shard_bytes)
        if gates is not None:
            write_gates(folder, gates, found[0])
        if media is not None:
            write_media_files(folder, media, aside, model_folder)
        write_digests(folder)


def _generation(ids: dict[str, int | None], end_ids: Collection[int]) -> dict[str, Any]:
    """What generation_config.json says: with which ids texts begin and end."""
    known = {key: value for key, value in ids.items() if value is not None}
    more = sorted(set(end_ids) - set(known.values()))
    if not more:
        return {"_from_model_config": True, **known}
    end = ids["eos_token_id"]
    return {**known, "eos_token_id": more if end is None else [end, *more]}


def export_model(
    model: Path | str,
    out: Path,
    *,
    dtype: Dtype = "float32",
    remote_code: bool = False,
    family: str | None = None,
) -> None:
    """Export what `--model` names: a run, a checkpoint or another Hugging Face folder. `family` is one's own that a checkpoint names."""
    found = find_model_of_family(model, family)
    export_huggingface(
        found.config, found.weights(), out, tokenizer=found.tokenizer_folder, dtype=dtype, remote_code=remote_code, end_ids=found.end_ids,
        model_folder=found.path if isinstance(found.path, Path) else None,
    )  # fmt: skip


def _without_gates(
    weights: Iterable[tuple[str, torch.Tensor]], found: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the plain model; gates among them are put aside."""
    for name, value in weights:
        if name == GATES:
            found.append(value.detach().clone())
        else:
            yield name, value


def _write_code(name: str, folder: Path) -> None:
    source = resources.files("headway.export.code") / f"{name}.py"
    target = folder / f"{name}.py"
    target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    _sync(target)


def _write_tokenizer(
    source: Path | None, folder: Path, config: ModelConfig, end_ids: Collection[int]
) -> dict[str, int | None]:
    """Save the tokenizer and return the ids that config.json repeats, as unknown without one: absent keys would mean Llama 2's."""
    from headway.tokenizer.load import load_tokenizer

    if source is None:
        return dict.fromkeys(ROLE_KEYS)
    tokenizer = load_tokenizer(source)
    check_vocabulary(tokenizer, source, config)
    if config.score_head:
        tokenizer = with_padding(tokenizer, end_ids)
    tokenizer.save(folder)
    return dict(zip(ROLE_KEYS, (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id), strict=True))


def with_padding(tokenizer: Tokenizer, end_ids: Collection[int] = ()) -> Tokenizer:
    """The tokenizer of a reward model. transformers scores the last token that is no padding, so no text may end with the padding token:
    it is the tokenizer's own if that ends no text, else one named so, or one that begins texts or is unknown; else there is none."""
    ends = {tokenizer.eos_id, *end_ids}
    special = {
        token: number for token, number in tokenizer.special_tokens.items() if number not in ends
    }
    named = [
        token for word in ("pad", "reserved", "unk") for token in special if word in token.lower()
    ]
    wanted = (tokenizer.roles.get("pad"), *named[:1], tokenizer.roles.get("bos"))
    token = next(
        (
            one
            for one in wanted
            if one is not None and tokenizer.token_to_id(one) not in (None, *ends)
        ),
        None,
    )
    roles = {name: value for name, value in tokenizer.roles.items() if name != "pad"}
    return replace(tokenizer, roles=roles if token is None else {**roles, "pad": token})


def _write_shards(
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    dtype: Dtype,
    limit: int,
) -> None:
    """Write every tensor as it comes, to its place in its file; which that is follows from the shapes."""
    files = _planned(config, dtype, limit)
    names = (
        [f"model-{index + 1:05}-of-{len(files):05}.safetensors" for index in range(len(files))]
        if len(files) > 1
        else [WEIGHTS]
    )
    with (
        progress("export", total=num_parameters(config), unit="parameters") as advance,
        ExitStack() as opened,
    ):
        writers = [
            opened.enter_context(StreamedFile(folder / name, held, dtype, MARK))
            for name, held in zip(names, files, strict=True)
        ]
        place = {name: writer for writer, held in zip(writers, files, strict=True) for name in held}
        for name, value in _checked(config, weights):
            place[name].write(name, converted(name, value, dtype))
            advance(value.numel())
    if len(files) > 1:
        total = sum(WIDTHS[dtype] * prod(shape) for held in files for shape in held.values())
        index = {name: writer.path.name for name, writer in place.items()}
        _write_json(
            folder / INDEX, {"metadata": {"total_size": total, **MARK}, "weight_map": index}
        )


def _planned(config: ModelConfig, dtype: Dtype, limit: int) -> list[dict[str, tuple[int, ...]]]:
    """The tensors of each file, under the family's names: as many as fit into a limit, in the order of the model."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in _their_shapes(config).items():
        more = WIDTHS[dtype] * prod(shape)
        if files[-1] and size + more > limit:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += more
    return files


def _their_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the family, in the order of the model."""
    family = family_of(config.family)
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in param_specs(config):
        pieces = pieces_of(family, spec, config)
        for piece in pieces:
            shape = spec.shape[1:] if len(pieces) > 1 else spec.shape
            shape = (*shape[:-2], shape[-1], shape[-2]) if piece.transposed else shape
            if piece.dim is not None:
                before = shapes.get(piece.name, shape)[piece.dim] if piece.name in shapes else 0
                shape = tuple(
                    max(before, piece.stop) if dim == piece.dim else n
                    for dim, n in enumerate(shape)
                )
            shapes[piece.name] = shape
    return shapes


def _completed(
    config: ModelConfig, target: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model, and zeros for the biases that the family it is exported under has beyond them."""
    import torch

    yield from weights
    ours = {spec.name for spec in param_specs(config)}
    for spec in param_specs(target):
        if spec.name not in ours:
            assert spec.name.endswith("bias"), (
                f"{spec.name} is no bias, so zeros would change the model"
            )
            yield spec.name, torch.zeros(spec.shape)


def _checked(
    config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under the family's names, every parameter once in its shape; what is one tensor of theirs waits for its other parts."""
    import torch

    family, theirs = family_of(config.family), _their_shapes(config)
    specs = {spec.name: spec for spec in param_specs(config)}
    waiting: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in weights:
        spec = specs.pop(name, None)
        shape = None if spec is None else spec.shape
        assert spec is not None and shape == tuple(value.shape), (
            f"{name} has shape {tuple(value.shape)}; the config makes it {shape}"
        )
        pieces = pieces_of(family, spec, config)
        for piece, part in zip(pieces, value if len(pieces) > 1 else (value,), strict=True):
            part = part.transpose(-1, -2) if piece.transposed else part
            if piece.dim is None:
                yield piece.name, part
                continue
            parts = waiting.setdefault(piece.name, {})
            parts[piece.start] = part
            if sum(one.shape[piece.dim] for one in parts.values()) == theirs[piece.name][piece.dim]:
                joined = [parts[start] for start in sorted(parts)]
                # Parts with a step interleave: one element of each in turn.
                at = piece.dim
                yield (
                    piece.name,
                    torch.stack(joined, at + 1).flatten(at, at + 1)
                    if piece.step > 1
                    else torch.cat(joined, at),
                )
                del waiting[piece.name]
    assert not specs, f"{next(iter(specs))} was not given"


def converted(name: str, value: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """A weight on the CPU in another dtype; one with a value that float16 cannot hold is refused, not made infinite."""
    import torch

    made = value.detach().to("cpu", getattr(torch, dtype))
    if dtype == "float16" and bool((made.isinf() & value.detach().to("cpu").isfinite()).any()):
        most = float(value.detach().abs().max())
        raise ConfigError(
            f"dtype is float16; {name} has a value of {most:g}, and float16 ends at 65504. Use bfloat16 or float32."
        )
    return made


def parse_dtype(name: str) -> Dtype:
    """A dtype by any of its names."""
    if name not in DTYPES:
        raise ConfigError(f"--dtype is {name!r}; it must be one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        fsync_file(file.fileno())


def _check_target(out: Path) -> None:
    if out.is_file():
        raise ConfigError(
            f"out is {str(out)!r}, which is a file. Give a folder that does not exist yet."
        )
    if out.is_dir() and any(out.iterdir()) and not _is_export(out):
        raise ConfigError(
            f"out is {str(out)!r}, which contains something other than an earlier export. Give a folder that does not exist yet."
        )


def _is_export(folder: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    mark = MARK["written_by"]
    try:
        if (folder / INDEX).is_file():
            return load_json(folder / INDEX)["metadata"].get("written_by") == mark
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return (file.metadata() or {}).get("written_by") == mark
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return False


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends well, and vanishes when it does not."""
    clear_leftovers(out)
    temporary = temporary_name(out.absolute())
    temporary.mkdir(parents=True)
    try:
        yield temporary
        fsync_folder(temporary)
        if out.is_dir():
            remove_folder(out.absolute())
        rename_folder(temporary, out.absolute())
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def save_weights(tensors: dict[str, torch.Tensor], path: Path, notes: dict[str, str]) -> None:
    """Write a safetensors file with these notes (its metadata), sorted."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata=notes)
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(notes.items()))
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(content) <= length, "the same notes in another order take the same room"
        file.seek(LENGTH_BYTES)
        file.write(content.ljust(length))
