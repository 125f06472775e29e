"""A ModelConfig and named weights come in, a folder that AutoModelForCausalLM and AutoTokenizer
load goes out, whole or not at all. A reward model is for AutoModelForSequenceClassification.

Tensors are written as they come, so memory holds one of them. Three things stay longer: the parts
of a tensor that the family joins from several parameters, head gates, and weights of media inputs.

    config.json, generation_config.json
    model.safetensors       or model-00001-of-00003.safetensors ... with an index
    tokenizer files
    modeling_*.py           if requested: the class of a model that transformers does not have
    headway_digests.json    the digests of all of them (runtime/digests.py)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import resources
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.checkpoint.stored_model import check_vocabulary, find_model_of_family
from headway.config.regular_file import require_regular
from headway.errors import CheckpointError, ConfigError
from headway.export.streamed import LENGTH_BYTES, WIDTHS, StreamedFile
from headway.model.families.base import (
    HfPiece,
    family_for,
    family_of,
    pieces_of,
    to_hf_config,
    to_hf_config_with_code,
)
from headway.model.families.transformers import code_files
from headway.model.head_masks.gates_file import write_gates
from headway.model.layout import GATES, ParamSpec, num_parameters, param_specs
from headway.model.loading.huggingface import CONFIG, INDEX, WEIGHTS
from headway.model.loading.other_parts import OtherParts, text_config
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
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
"""Each dtype under the names people use."""
DTYPE_KEYS = ("dtype", "torch_dtype")
ROLE_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json for the tokens that have a role."""
MARK = {"format": "pt", "written_by": "headway"}
"""Metadata of weight files. transformers needs `format`; `written_by` allows a later export to
replace the folder.
"""


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
    parts: OtherParts | None = None,
) -> None:
    """Write a Hugging Face folder; an earlier export at `out` is replaced; anything else there is
    refused.

    `end_ids` end a text besides the tokenizer's own end token; generation_config.json lists them.
    With `remote_code`, a model that transformers has no class for gets its class in a file next to
    the weights. Head gates go into files of their own (model/head_masks/gates_file.py), and so do
    media inputs (model/media_files.py; `model_folder` is where the model was): the weights are
    those of the plain model. `parts`: what the model that it began with had besides text; the folder
    is that of the whole model then.
    """
    gates = config.head_gates
    media = config.media
    has_tower = config.vision is not None
    if has_tower and parts is None:
        raise ConfigError(
            "the model has a vision tower, and the folder that it began with is not known. Export "
            "a checkpoint in its run folder, which keeps what the folder had."
        )
    config = config.with_(head_gates=None, media=None, vision=None)
    # `target` is the same model in the family that it is exported under, which may be another one:
    # names, shapes and additional biases are those of the target.
    if remote_code:
        target, settings, code = to_hf_config_with_code(config)
    else:
        target, settings = to_hf_config(config)
        code = None
    # Newer versions of transformers read `dtype`, older ones `torch_dtype`.
    settings |= {"dtype": dtype, "torch_dtype": dtype}
    if parts is not None:
        settings = _whole_settings(settings, parts) | {"dtype": dtype, "torch_dtype": dtype}
    _check_target(out)

    # Filled while the weights stream by, so complete once the shards are written.
    gate_values: list[torch.Tensor] = []
    media_weights: dict[str, torch.Tensor] = {}
    tower: dict[str, torch.Tensor] = {}

    with writing(out, error=CheckpointError), atomic_folder(out) as folder:
        ids = _write_tokenizer(tokenizer, folder, config, end_ids)
        shown_ids = ids
        if parts is not None:
            # The whole model's config.json names them already.
            shown_ids = {key: value for key, value in ids.items() if value is not None}
        _write_json(folder / CONFIG, {**settings, **shown_ids})
        if code is not None:
            _write_code(code, folder)
        for file in code_files(config):
            shutil.copyfile(file, folder / file.name)
            _sync(folder / file.name)
        # A reward model generates nothing.
        if not config.score_head:
            _write_json(folder / "generation_config.json", _generation_config(ids, end_ids))

        plain = without_media(_split_off_gates(weights, gate_values), media_weights)
        if has_tower:
            from headway.model.loading.native_vision import without_tower

            plain = without_tower(plain, tower)
        completed = _with_zero_biases(config, target, plain)
        _write_shards(target, completed, folder, dtype, max_shard_bytes, parts, tower)
        if parts is not None:
            parts.copy_files(folder)
        if gates is not None:
            write_gates(folder, gates, gate_values[0])
        if media is not None:
            write_media_files(folder, media, media_weights, model_folder)

        # Last, because it hashes what is in the folder.
        write_digests(folder)


def _generation_config(ids: dict[str, int | None], end_ids: Collection[int]) -> dict[str, Any]:
    """What generation_config.json says: with which ids texts begin and end."""
    known = {key: value for key, value in ids.items() if value is not None}
    additional = sorted(set(end_ids) - set(known.values()))
    if not additional:
        # This key lets transformers derive the values from config.json again. config.json names
        # one end, so the key is left out where there are several.
        return {"_from_model_config": True, **known}

    end = ids["eos_token_id"]
    if end is not None:
        additional = [end, *additional]
    return {**known, "eos_token_id": additional}


def export_model(
    model: Path | str,
    out: Path,
    *,
    dtype: Dtype = "float32",
    remote_code: bool = False,
    family: str | None = None,
) -> None:
    """Export what `--model` names: a run, a checkpoint or another Hugging Face folder. `family`
    names the user's module, for a checkpoint whose family is a user's own.
    """
    stored = find_model_of_family(model, family)
    model_folder = None
    if isinstance(stored.path, Path):
        model_folder = stored.path
    export_huggingface(
        stored.config,
        stored.weights(),
        out,
        tokenizer=stored.tokenizer_folder,
        dtype=dtype,
        remote_code=remote_code,
        end_ids=stored.end_ids,
        model_folder=model_folder,
        parts=stored.parts,
    )


def _whole_settings(settings: dict[str, Any], parts: OtherParts) -> dict[str, Any]:
    """The config.json of a whole model, with what has changed in its text part."""
    before = text_config(parts.hf_config)
    family = family_for(before)
    former = to_hf_config(family.read(before))[1]
    changed = {
        key: value
        for key, value in settings.items()
        if value != former.get(key) and key not in (*DTYPE_KEYS, *ROLE_KEYS)
    }
    return parts.config_with(changed)


def _split_off_gates(
    weights: Iterable[tuple[str, torch.Tensor]], gate_values: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the plain model. The head gates among them are appended to `gate_values`."""
    for name, value in weights:
        if name == GATES:
            # A copy: gates are written after all weights have come. By then an engine that put
            # averaged weights in place for the export has put the trained ones back.
            gate_values.append(value.detach().clone())
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
    """Save the tokenizer and return the ids that config.json repeats.

    Without a tokenizer they are None, not absent: for an absent key transformers would take the id
    of Llama 2.
    """
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
    """The tokenizer of a reward model, with a padding token that ends no text.

    transformers scores the last token that is not padding, so a text that ends with the padding
    token would be scored one token too early. The first of these that ends no text is taken: the
    tokenizer's padding token, a special token with pad, reserved or unk in its name (in this
    order), the token that begins texts. Otherwise there is no padding token.
    """
    ends = {tokenizer.eos_id, *end_ids}
    special = [
        token for token, token_id in tokenizer.special_tokens.items() if token_id not in ends
    ]
    by_name = [
        token for word in ("pad", "reserved", "unk") for token in special if word in token.lower()
    ]

    roles = {name: value for name, value in tokenizer.roles.items() if name != "pad"}
    for token in (tokenizer.roles.get("pad"), *by_name[:1], tokenizer.roles.get("bos")):
        if token is not None and tokenizer.token_to_id(token) not in (None, *ends):
            roles["pad"] = token
            break
    return replace(tokenizer, roles=roles)


def _write_shards(
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    dtype: Dtype,
    limit: int,
    parts: OtherParts | None = None,
    tower: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write every tensor as it comes. Its file and its place there follow from the shapes, which
    are known before any weight is. The other parts of a whole model are one more file, unchanged
    but for what of a `tower` has trained; it is complete once all weights have come.
    """
    whole_names: Mapping[str, str] = {}
    num_files = 0
    if parts is not None:
        whole_names = parts.names
        num_files = 1
    files = [
        {whole_names.get(name, name): shape for name, shape in shapes.items()}
        for shapes in _plan_files(config, dtype, limit, whole_names)
    ]
    num_files += len(files)
    names = [WEIGHTS]
    if num_files > 1:
        names = [
            f"model-{number:05}-of-{num_files:05}.safetensors" for number in range(1, num_files + 1)
        ]

    # All files stay open: a tensor that joins several parameters comes with the last of them, and
    # zero biases come after everything else.
    writer_of: dict[str, StreamedFile] = {}
    with (
        progress("export", total=num_parameters(config), unit="parameters") as advance,
        ExitStack() as opened,
    ):
        for file_name, shapes in zip(names, files, strict=parts is None):
            writer = opened.enter_context(StreamedFile(folder / file_name, shapes, dtype, MARK))
            writer_of |= dict.fromkeys(shapes, writer)
        for text_name, value in _exported_tensors(config, weights, whole_names):
            name = whole_names.get(text_name, text_name)
            writer_of[name].write(name, converted(name, value, dtype))
            advance(value.numel())

    if num_files > 1:
        total = sum(WIDTHS[dtype] * prod(shape) for shapes in files for shape in shapes.values())
        index = {name: writer.path.name for name, writer in writer_of.items()}
        if parts is not None:
            from headway.model.loading.native_vision import trained_parts

            others = trained_parts(parts, tower or {})
            save_weights(others, folder / names[-1], MARK)
            _sync(folder / names[-1])
            total += sum(value.nbytes for value in others.values())
            index |= dict.fromkeys(others, names[-1])
        _write_json(
            folder / INDEX, {"metadata": {"total_size": total, **MARK}, "weight_map": index}
        )


def _plan_files(
    config: ModelConfig, dtype: Dtype, limit: int, stored: Collection[str] = ()
) -> list[dict[str, tuple[int, ...]]]:
    """Name and shape of the tensors of each file: as many as fit into `limit` bytes, in the order
    of the model.
    """
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in _exported_shapes(config, stored).items():
        tensor_bytes = WIDTHS[dtype] * prod(shape)
        # A tensor larger than the limit gets a file of its own.
        if files[-1] and size + tensor_bytes > limit:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += tensor_bytes
    return files


def _exported_pieces(
    config: ModelConfig, spec: ParamSpec, stored: Collection[str]
) -> tuple[HfPiece, ...]:
    """The tensors that a parameter is written to: those of the family's usual form, or, in a model
    with other parts, those that its text part was read from (`stored`; none elsewhere)."""
    family = family_of(config.family)
    if stored:
        pieces = pieces_of(family, spec, config, stored)
        # What was read from blocks is not written as blocks.
        if all(piece.scales is None for piece in pieces):
            return pieces
    return pieces_of(family, spec, config)


def _exported_shapes(
    config: ModelConfig, stored: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every exported tensor, in the order of the model.

    `_exported_tensors` makes the tensors themselves by the same pieces: the two must agree.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in param_specs(config):
        pieces = _exported_pieces(config, spec, stored)
        for piece in pieces:
            if piece.join is not None:
                shapes[piece.name] = piece.join.shapes[piece.name]
                continue
            # Several pieces: dim 0 of our parameter stacks experts, which the family stores one by
            # one.
            shape = spec.shape
            if len(pieces) > 1:
                shape = spec.shape[1:]
            if piece.transposed:
                shape = (*shape[:-2], shape[-1], shape[-2])

            # The exported tensor joins several of our parameters along this dim. It ends where
            # the last of them ends.
            if piece.dim is not None:
                stop = piece.stop
                if piece.period:
                    stop = shape[piece.dim] // (piece.stop - piece.start) * piece.period
                if piece.name in shapes:
                    stop = max(stop, shapes[piece.name][piece.dim])
                shape = (*shape[: piece.dim], stop, *shape[piece.dim + 1 :])
            shapes[piece.name] = shape
    return shapes


def _with_zero_biases(
    config: ModelConfig, target: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model, and zeros for the biases that the family it is exported under has
    beyond them.
    """
    import torch

    yield from weights
    names = {spec.name for spec in param_specs(config)}
    for spec in param_specs(target):
        if spec.name not in names:
            assert spec.name.endswith("bias"), (
                f"{spec.name} is no bias, so zeros would change the model"
            )
            yield spec.name, torch.zeros(spec.shape)


def _exported_tensors(
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    stored: Collection[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as the family stores them, or as `stored` has them (`_exported_pieces`).

    A tensor that the family joins from several parameters comes with the last of them. Every
    parameter of the config must come once, in its shape.
    """
    import torch

    shapes = _exported_shapes(config, stored)
    specs = {spec.name: spec for spec in param_specs(config)}
    # Name of an exported tensor -> the parts of it that have come, by where they begin in it.
    waiting: dict[str, dict[int, torch.Tensor]] = {}
    # Our names that are written together -> the values of those that have come.
    joining: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
    for name, value in weights:
        spec = specs.pop(name, None)
        shape = None if spec is None else spec.shape
        assert spec is not None and shape == tuple(value.shape), (
            f"{name} has shape {tuple(value.shape)}; the config makes it {shape}"
        )

        pieces = _exported_pieces(config, spec, stored)
        join = pieces[0].join
        if join is not None:
            parts_of_join = joining.setdefault(join.names, {})
            parts_of_join[name] = value
            if len(parts_of_join) == len(join.names):
                del joining[join.names]
                yield from join.to_hf(parts_of_join).items()
            continue
        values = (value,)
        if len(pieces) > 1:
            values = value.unbind(0)
        for piece, part in zip(pieces, values, strict=True):
            if piece.transposed:
                part = part.transpose(-1, -2)
            dim = piece.dim
            if dim is None:
                yield piece.name, part
                continue

            parts = waiting.setdefault(piece.name, {})
            parts[piece.start] = part
            length = sum(tensor.shape[dim] for tensor in parts.values())
            if length != shapes[piece.name][dim]:
                continue
            ordered = [parts[start] for start in sorted(parts)]
            if piece.step > 1:
                # Parts with a step interleave: one element of each in turn.
                joined = torch.stack(ordered, dim + 1).flatten(dim, dim + 1)
            elif piece.period:
                # A stretch of each in turn, as often as theirs repeats.
                times = length // piece.period
                stretches = [part.unflatten(dim, (times, -1)) for part in ordered]
                joined = torch.cat(stretches, dim + 1).flatten(dim, dim + 1)
            else:
                joined = torch.cat(ordered, dim)
            del waiting[piece.name]
            yield piece.name, joined
    assert not specs, f"{next(iter(specs))} was not given"


def converted(name: str, value: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """A weight on the CPU in another dtype; one with a value that float16 cannot hold is refused,
    not made infinite.
    """
    import torch

    result = value.detach().to("cpu", getattr(torch, dtype))
    if dtype == "float16" and bool((result.isinf() & value.detach().to("cpu").isfinite()).any()):
        largest = float(value.detach().abs().max())
        raise ConfigError(
            f"dtype is float16; {name} has a value of {largest:g}, and float16 ends at 65504. Use "
            "bfloat16 or float32."
        )
    return result


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
            f"out is {str(out)!r}, which contains something other than an earlier export. Give a "
            "folder that does not exist yet."
        )


def _is_export(folder: Path) -> bool:
    """Whether headway wrote the weights in a folder, as their metadata says."""
    from safetensors import SafetensorError, safe_open

    mark = MARK["written_by"]
    try:
        if (folder / INDEX).is_file():
            return load_json(folder / INDEX)["metadata"].get("written_by") == mark
        require_regular(folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return (file.metadata() or {}).get("written_by") == mark
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return False


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends well, and vanishes when it does
    not.
    """
    clear_leftovers(out)
    temporary = temporary_name(out.absolute())
    temporary.mkdir(parents=True)
    try:
        yield temporary
        fsync_folder(temporary)
        # A folder cannot be renamed onto one that is not empty.
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

    # safetensors writes metadata in an order that differs from process to process. The header is
    # overwritten in place, so that equal weights give equal files.
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(notes.items()))
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(content) <= length, "the same notes in another order take the same room"
        file.seek(LENGTH_BYTES)
        file.write(content.ljust(length))
