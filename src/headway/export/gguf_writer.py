"""A model comes in; one GGUF file that llama.cpp, Ollama and LM Studio load goes out, whole or not
at all, and a Modelfile next to it.

    type     matrices                                                  vectors
    f32, f16, bf16, q8_0   that type                                   f32
    q4_k_m, q5_k_m   q4_k, q5_k; q6_k for the head, and for values     f32
             and the down projection of half of the layers, as
             llama.cpp mixes them
    q6_k     q6_k                                                      f32

Tensors are written as they come: memory holds one of them. Rows that a type cannot hold in whole
blocks are stored in a wider type. A family, setting or tokenizer for which llama.cpp has no rules
is refused by name before anything is written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.checkpoint.stored_model import StoredModel, check_vocabulary, find_model_of_family
from headway.errors import CheckpointError, ConfigError
from headway.export.huggingface import Dtype, converted
from headway.export.kquants import BLOCK, BLOCK_BYTES, quantise
from headway.export.modelfile import write_modelfile
from headway.model.config import ModelConfig
from headway.model.families.base import family_of
from headway.model.layout import (
    EMBEDDING,
    GATES,
    HEAD,
    POSITIONS,
    ParamSpec,
    num_parameters,
    param_specs,
)
from headway.model.loading.gguf_names import (
    ARCHITECTURE_OF,
    ARCHITECTURES,
    OF_EXPERTS,
    ROPE_FACTORS,
    GgufArchitecture,
    GgufPart,
    assumed,
    gguf_parts,
    stored_value,
)
from headway.model.rope_config import yarn_growth
from headway.runtime.digests import record_digests
from headway.runtime.optional import need
from headway.runtime.progress import progress
from headway.runtime.storage import fsync_file, fsync_folder, writing
from headway.runtime.temporary import clear_leftovers, temporary_name

if TYPE_CHECKING:
    import torch

    from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_k_m", "q5_k_m", "q6_k"]
FILE_TYPES: dict[str, int] = {
    "f32": 0,
    "f16": 1,
    "bf16": 32,
    "q8_0": 7,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
}
"""Values of general.file_type."""
SMALLER_BLOCKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""What llama.cpp takes for rows that are no whole blocks of 256."""
QUANTISED_ROWS = 32
"""Weights of a block of q8_0 and q5_0: a row must be a multiple of it."""
QUANTISATION_VERSION = 2
"""Value of general.quantization_version: the version of ggml's block layouts."""


@dataclass(frozen=True)
class GgufExport:
    """A written file: its path, its Modelfile, and what it holds."""

    out: Path
    modelfile: Path
    architecture: str
    type: str
    bytes: int
    stored: dict[str, int]
    """Number of tensors by the type they are stored as."""


def export_gguf(
    model: Path | str,
    out: Path,
    *,
    kind: GgufType = "f16",
    name: str | None = None,
    family: str | None = None,
) -> GgufExport:
    """Write the model that `--model` names. An earlier GGUF file at `out` is replaced; a file of
    another kind there is refused.
    """
    from headway.tokenizer.gguf_vocabulary import to_metadata
    from headway.tokenizer.load import load_tokenizer

    need("gguf", "headway export gguf")
    _check_target(out)
    # A file of llama.cpp holds the language model; towers have files of their own there.
    source = find_model_of_family(model, family).without_tower()
    source.check_head()
    config, architecture = gguf_target(source.config)
    if source.tokenizer_folder is None:
        raise ConfigError(
            f"{source.path}: has no tokenizer, and a GGUF file needs one. Put its files next to "
            "the model."
        )
    tokenizer = load_tokenizer(source.tokenizer_folder)
    check_vocabulary(tokenizer, source.tokenizer_folder, config)

    values = _shape_values(config, architecture) | to_metadata(tokenizer, config.vocab)
    values |= _end_values(source, tokenizer)
    if source.config.head_gates is not None:
        log.info(
            "%s: its head masks are left out: a GGUF file has no place for them, and every head "
            "keeps the whole context.",
            source.path,
        )
    if name is None:
        name = _title(source)
    general = {
        "general.name": name,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTISATION_VERSION,
    }

    file = _GgufWriter(out, config, architecture, kind)
    with writing(out, error=CheckpointError):
        stored = file.write(general | values, _with_zero_biases(config, source))
        modelfile = write_modelfile(out, tokenizer, config, source.end_ids)
        record_digests(out.parent, (out.name,))
    return GgufExport(out, modelfile, architecture.name, kind, out.stat().st_size, stored)


def parse_type(name: str) -> GgufType:
    """A type by its name in any case."""
    for known in FILE_TYPES:
        if name.lower() == known:
            return known  # pyright: ignore[reportReturnType]
    raise ConfigError(
        f"--type is {name!r}; it must be one of {', '.join(FILE_TYPES)}. For others run "
        "llama-quantize on the f16 file."
    )


def _check_target(out: Path) -> None:
    """Refuse a path that no GGUF file may replace."""
    if out.suffix != ".gguf":
        raise ConfigError(f"out is {str(out)!r}; it must end in .gguf.")
    if out.is_dir():
        raise ConfigError(
            f"out is {str(out)!r}, which is a folder. Give a file that ends in .gguf."
        )
    if out.is_file():
        with open(out, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(
                    f"out is {str(out)!r}, which is a file of another kind. Give another name."
                )


def _title(source: StoredModel) -> str:
    """The name of the model's folder. For RUN/final it is that of the run."""
    for part in reversed(Path(str(source.path)).absolute().parts):
        if part not in ("final", "checkpoints"):
            return part
    return "model"


def _with_zero_biases(
    target: ModelConfig, source: StoredModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in the order of the file. Biases that only the written family has are zeros.

    The file's table of tensors is written first, so a weight that comes out of order would end up
    under another's name: the assertions exclude that.
    """
    import torch

    source_names = {spec.name for spec in param_specs(source.config)}
    weights = ((name, value) for name, value in source.weights() if name != GATES)
    for spec in param_specs(target):
        if spec.name in source_names:
            name, value = next(weights)
        else:
            name = spec.name
            value = torch.zeros(spec.shape)
        assert (name, tuple(value.shape)) == (spec.name, spec.shape), (
            f"{name} {tuple(value.shape)} came where {spec.name} {spec.shape} is due"
        )
        assert name in source_names or name.endswith(".bias"), (
            f"{name} is no bias, so zeros would change the model"
        )
        yield name, value


def gguf_target(config: ModelConfig) -> tuple[ModelConfig, GgufArchitecture]:
    """The config under which the model is written, and its architecture; what llama.cpp would
    compute differently is refused.
    """
    if config.media is not None:
        raise ConfigError(
            "the model has media inputs, which `headway export gguf` does not write. Use `headway "
            "export hf`."
        )
    target = family_of(config.family).to_hf_model(config.with_(head_gates=None))
    if target.family not in ARCHITECTURE_OF:
        families = ", ".join(ARCHITECTURE_OF)
        raise ConfigError(
            f"model.family is {target.family!r}; `headway export gguf` knows {families}. Use "
            "`headway export hf`."
        )
    architecture = ARCHITECTURES[ARCHITECTURE_OF[target.family]]

    # An architecture of llama.cpp is code with few switches. A setting that its code does not read
    # must have the value that the code assumes, or the file would load and compute another model.
    for key, value in assumed(target, architecture).items():
        if getattr(target, key) != value:
            raise _refusal(f"model.{key}", getattr(target, key), architecture, f"has {value!r}")
    if not architecture.any_head_size and target.num_heads * target.head_size != target.hidden_size:
        raise ConfigError(
            f"model.head_dim is {target.head_size}; llama.cpp's {architecture.name} needs "
            "hidden_size / num_heads. Use `headway export hf`."
        )
    if architecture.ties not in (None, target.tie_embeddings):
        raise _refusal(
            "model.tie_embeddings", target.tie_embeddings, architecture, f"has {architecture.ties}"
        )
    if architecture.name == "olmoe" and target.kv_heads != target.num_heads:
        raise _refusal(
            "model.num_kv_heads", target.kv_heads, architecture, f"has {target.num_heads}"
        )
    if architecture.name == "gemma2":
        for key in architecture.free:
            if getattr(target, key) is None:
                raise _refusal(f"model.{key}", None, architecture, "caps")
    _check_windows(target, architecture)
    _check_experts(target, architecture)
    _check_scaling(target, architecture)
    return target, architecture


def _refusal(key: str, value: Any, architecture: GgufArchitecture, always: str) -> ConfigError:
    return ConfigError(
        f"{key} is {value!r}; llama.cpp's {architecture.name} always {always}. Use `headway export "
        "hf`."
    )


def _check_windows(config: ModelConfig, architecture: GgufArchitecture) -> None:
    """Rotary positions of layers with a window."""
    has_windows = config.sliding_window is not None
    if architecture.name in ("gemma2", "cohere2") and not has_windows:
        raise _refusal("model.sliding_window", None, architecture, "has windows")
    if architecture.name not in ("gemma3", "olmo2") or not has_windows:
        return
    # Both leave windowed layers unscaled.
    if config.rope_scaling is not None and config.rope_local_theta is None:
        raise _refusal(
            "model.rope_local_theta", None, architecture, "leaves layers with a window unscaled"
        )


def _check_experts(config: ModelConfig, architecture: GgufArchitecture) -> None:
    """Settings of a mixture."""
    experts = config.experts
    if experts is None:
        if architecture.experts is not None and architecture.name != "llama":
            raise _refusal("model.experts", None, architecture, "has experts")
        return
    if architecture.experts is None:
        raise ConfigError(
            f"model.experts is given; llama.cpp's {architecture.name} has none. Use `headway "
            "export hf`."
        )
    for key, value in architecture.experts.form.items():
        # A rate moves the biases in training; a file has the biases alone.
        is_same = value is ... or getattr(experts, key) == value
        if key == "bias_rate":
            is_same = (getattr(experts, key) is None) == (value is None)
        if not is_same:
            raise _refusal(
                f"model.experts.{key}", getattr(experts, key), architecture, f"has {value!r}"
            )
    if architecture.name == "glm4moe" and experts.shared_ffn_size % config.expert_size:
        raise _refusal(
            "model.experts.shared_ffn_size",
            experts.shared_ffn_size,
            architecture,
            "has shared experts of the size of the others",
        )


def _check_scaling(config: ModelConfig, architecture: GgufArchitecture) -> None:
    """The kind of rotary scaling."""
    scaling = config.rope_scaling
    if scaling is None:
        if architecture.name == "mistral3":
            raise _refusal("model.rope_scaling", None, architecture, "has yarn")
        return
    if scaling.kind == "llama3" and "llama3" not in architecture.scalings:
        raise ConfigError(
            f"model.rope_scaling.kind is 'llama3', which llama.cpp's {architecture.name} ignores. "
            "Use `headway export hf`."
        )
    if scaling.kind not in architecture.scalings:
        raise ConfigError(
            f"model.rope_scaling.kind is {scaling.kind!r}, which `headway export gguf` does not "
            f"write for llama.cpp's {architecture.name}. Use `headway export hf`."
        )
    if scaling.kind == "yarn" and not scaling.truncate:
        raise ConfigError(
            "model.rope_scaling.truncate is False, which llama.cpp's yarn does not have. Use "
            "`headway export hf`."
        )


def _shape_values(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    """The metadata of the shape. Where an architecture has no windows, the context length ends where
    they would begin to count.
    """
    context = config.max_seq_len
    windows: list[int] = []
    for layer in range(config.num_layers):
        window = config.window_of(layer)
        if window is not None:
            windows.append(window)
    if windows and not architecture.windows and min(windows) < context:
        log.info(
            "the model has windows of %d tokens, and llama.cpp's %s has none: the file says "
            "context length %d instead of %d.",
            min(windows),
            architecture.name,
            min(windows),
            context,
        )
        context = min(windows)

    values: dict[str, Any] = {
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "vocab_size": config.vocab,
        **_expert_values(config, architecture),
        **_rope_values(config),
    }
    epsilon = "attention.layer_norm_rms_epsilon"
    if config.norm.startswith("layernorm"):
        epsilon = "attention.layer_norm_epsilon"
    values[epsilon] = float(config.norm_eps)
    if config.positions == "rotary":
        values["rope.dimension_count"] = config.rotary_size
        values["rope.freq_base"] = float(config.rope_theta)
    if architecture.windows and windows:
        values["attention.sliding_window"] = windows[0]
        values["attention.sliding_window_pattern"] = [
            config.window_of(layer) is not None for layer in range(config.num_layers)
        ]
        if architecture.name == "gemma3" and config.rope_local_theta is None:
            # The base of windowed layers would be 10,000 without this key.
            values["rope.freq_base_swa"] = float(config.rope_theta)
    for key, name in architecture.free.items():
        value = getattr(config, key)
        if value is not None:
            values[name] = float(value)
            if key in architecture.inverse:
                values[name] = 1.0 / float(value)
    return {f"{architecture.name}.{key}": value for key, value in values.items()}


def _expert_values(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    """The metadata of a mixture."""
    experts = config.experts
    if experts is None or architecture.experts is None:
        return {}
    values: dict[str, Any] = {
        "expert_count": experts.num,
        "expert_used_count": experts.per_token,
        "expert_feed_forward_length": config.expert_size,
        "expert_weights_norm": experts.normalize,
        "expert_weights_scale": float(experts.routed_scale),
        "expert_gating_func": OF_EXPERTS[experts.router],
        "leading_dense_block_count": experts.first_dense,
        "interleave_moe_layer_step": 1,
        "expert_shared_feed_forward_length": experts.shared_ffn_size,
        "expert_shared_count": experts.shared_ffn_size // config.expert_size,
    }
    if not architecture.experts.own_length:
        values["feed_forward_length"] = config.expert_size
    return values


def _rope_values(config: ModelConfig) -> dict[str, Any]:
    """The metadata of rotary scaling."""
    scaling = config.rope_scaling
    if scaling is None:
        return {}
    if scaling.kind == "llama3":
        # llama.cpp computes with the tensor rope_freqs.weight (`_GgufWriter._factors`). These
        # values only say what the tensor was made from.
        return {
            "rope.scaling.original_context_length": scaling.original_max_seq_len,
            "rope.scaling.low_freq_factor": float(scaling.low_freq_factor),
            "rope.scaling.high_freq_factor": float(scaling.high_freq_factor),
        }

    values: dict[str, Any] = {
        "rope.scaling.type": scaling.kind,
        "rope.scaling.factor": float(scaling.factor),
    }
    if scaling.kind == "yarn":
        values |= {
            "rope.scaling.original_context_length": scaling.original_max_seq_len,
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        }
        if scaling.query_growth:
            values["attention.temperature_scale"] = float(scaling.query_growth)
        if scaling.attention_factor is not None:
            # llama.cpp multiplies this value by the growth that the factor implies.
            growth = yarn_growth(scaling.factor)
            values["rope.scaling.attn_factor"] = scaling.attention_factor / growth
    return values


def _end_values(source: StoredModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids that end a text besides the tokenizer's end token, such as the end of a turn.

    GGUF has two keys for them, eos and eot. Where the tokenizer has no end token, both are free.
    """
    end_ids = sorted(source.end_ids - {tokenizer.eos_id})
    keys = ["tokenizer.ggml.eot_token_id"]
    if tokenizer.eos_id is None:
        keys.insert(0, "tokenizer.ggml.eos_token_id")
    return dict(zip(keys, end_ids, strict=False))


def stored_type(spec: ParamSpec, config: ModelConfig, kind: str) -> str:
    """The type one tensor is stored as in a file of a kind."""
    # Routers and positions are small, and decide much.
    is_router = spec.name.endswith((".mlp.gate.weight", ".mlp.shared_gate.weight"))
    if not spec.is_matrix or kind == "f32" or is_router or spec.name == POSITIONS:
        return "f32"
    if kind in ("f16", "bf16"):
        return kind

    tensor_type = kind
    if kind in ("q4_k_m", "q5_k_m"):
        tensor_type = kind.removesuffix("_m")
        if _needs_six_bits(spec, config):
            tensor_type = "q6_k"

    # Rows of another length cannot be cut into blocks: llama.cpp then takes the next type with
    # smaller blocks, and f16 where those do not fit either.
    row_length = spec.shape[-1]
    if tensor_type in BLOCK_BYTES and row_length % BLOCK:
        tensor_type = SMALLER_BLOCKS[tensor_type]
    if tensor_type not in BLOCK_BYTES and row_length % QUANTISED_ROWS:
        return "f16"
    return tensor_type


def _needs_six_bits(spec: ParamSpec, config: ModelConfig) -> bool:
    """Tensors that llama.cpp's q4_k_m and q5_k_m store in six bits: the head, and in half of the
    layers the values and the down projection.
    """
    if spec.name == HEAD or (spec.name == EMBEDDING and config.tie_embeddings):
        return True
    layer = spec.stage
    if not spec.name.endswith(("v_proj.weight", "down_proj.weight")) or not isinstance(layer, int):
        return False

    # `use_more_bits` of llama.cpp: the first and the last eighth of the layers, and every third
    # layer between them.
    eighth = config.num_layers // 8
    if layer < eighth or layer >= 7 * config.num_layers // 8:
        return True
    return (layer - eighth) % 3 == 2


class _GgufWriter:
    """Writes one file through the gguf package, tensor by tensor."""

    def __init__(
        self, out: Path, config: ModelConfig, architecture: GgufArchitecture, kind: str
    ) -> None:
        self.out = out
        self.config = config
        self.architecture = architecture
        self.kind = kind

    def write(
        self, values: dict[str, Any], weights: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, int]:
        """The whole file; it appears under its name when all of it is on disk."""
        import gguf

        clear_leftovers(self.out)
        temporary = temporary_name(self.out.absolute())
        temporary.parent.mkdir(parents=True, exist_ok=True)
        parts = gguf_parts(self.config, self.architecture)
        part_of = {spec.name: part for part in parts for spec in part.specs}
        writer = gguf.GGUFWriter(temporary, self.architecture.name)
        try:
            # The format puts metadata and the table of tensors before the tensors. The table needs
            # shapes and types alone, so no weight is read before it is written.
            for key, value in values.items():
                _add_value(writer, key, value)
            stored = self._plan(writer, parts)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()

            # Tensors follow in the order of the table: the factors first.
            for row in self._factors():
                writer.write_tensor_data(row)
            with progress(
                "export", total=num_parameters(self.config), unit="parameters"
            ) as advance:
                joining: dict[str, list[torch.Tensor]] = {}
                for name, value in weights:
                    advance(value.numel())
                    part = part_of[name]
                    pieces = joining.setdefault(part.name, [])
                    pieces.append(stored_value(self.architecture, self.config, name, value))
                    # A joined tensor comes with the last of its parameters.
                    if len(pieces) == len(part.specs):
                        writer.write_tensor_data(self._bytes(part, pieces))
                        del joining[part.name]

            writer.flush()
            writer.close()
            with open(temporary, "rb") as file:
                fsync_file(file.fileno())
            os.replace(temporary, self.out.absolute())
            fsync_folder(self.out.absolute().parent)
        finally:
            writer.close()
            temporary.unlink(missing_ok=True)
        return stored

    def _plan(self, writer: Any, parts: list[GgufPart]) -> dict[str, int]:
        """Add the table of tensors, in the order they are written; the number of each type."""
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        stored: dict[str, int] = {}
        for row in self._factors():
            writer.add_tensor_info(ROPE_FACTORS, row.shape, row.dtype, row.nbytes)
        for part in parts:
            tensor_type = self._type(part)
            code = GGMLQuantizationType[tensor_type.upper()]
            block, block_bytes = GGML_QUANT_SIZES[code]
            writer.add_tensor_info(
                part.name,
                part.shape,
                # Ignored, because raw_dtype names the type.
                np.dtype(np.float32),
                prod(part.shape) // block * block_bytes,
                raw_dtype=code,
            )
            stored[tensor_type] = stored.get(tensor_type, 0) + 1
        return stored

    def _factors(self) -> list[Any]:
        """What each frequency is divided by, float32 [head_size / 2], if the scaling is Llama 3's.

        A list of one array, or an empty one: the file has this tensor or not.
        """
        from headway.model.rope import inverse_frequencies

        if self.config.rope_scaling is None or self.config.rope_scaling.kind != "llama3":
            return []
        plain = inverse_frequencies(self.config.with_(rope_scaling=None))
        return [(plain / inverse_frequencies(self.config)).numpy()]

    def _type(self, part: GgufPart) -> str:
        """The type of a tensor: of several joined ones, that of the last."""
        return stored_type(part.specs[-1], self.config, self.kind)

    def _bytes(self, part: GgufPart, values: list[torch.Tensor]) -> Any:
        """One tensor as the file holds it."""
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        value = values[0]
        if len(values) > 1:
            value = torch.cat(values)
        tensor_type = self._type(part)
        if tensor_type in BLOCK_BYTES:
            return quantise(value.reshape(-1, value.shape[-1]), tensor_type)
        if tensor_type in ("f16", "bf16"):
            dtype: Dtype = "float16"
            if tensor_type == "bf16":
                dtype = "bfloat16"
            narrow = converted(part.name, value, dtype)
            # As bytes, because numpy has no bfloat16.
            return narrow.contiguous().view(torch.uint8).numpy()
        plain = value.detach().to("cpu", torch.float32).contiguous().numpy()
        if tensor_type == "f32":
            return plain.view(np.uint8)
        return quantize(plain, GGMLQuantizationType[tensor_type.upper()])


def _add_value(writer: Any, key: str, value: Any) -> None:
    """Add metadata as the GGUF type that llama.cpp expects for this Python type."""
    # bool comes first: it is a subclass of int.
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
