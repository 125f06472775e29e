"""A model comes in; one GGUF file that llama.cpp, Ollama and LM Studio load goes out, whole or not at all, and a Modelfile next to it.

    type     matrices                                                  vectors
    f32, f16, bf16, q8_0   that type                                   f32
    q4_k_m   q4_k; q6_k for the head, and for values and the down      f32
             projection of half of the layers, as llama.cpp mixes them

Tensors are written as they come: memory holds one of them. Rows that a type cannot hold in whole blocks are stored in a wider type.
A family, setting or tokenizer for which llama.cpp has no rules is refused by name before anything is written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.checkpoint.stored_model import StoredModel, find_model_of_family
from headway.errors import CheckpointError, ConfigError
from headway.export.huggingface import converted
from headway.export.kquants import BLOCK, BLOCK_BYTES, quantise
from headway.export.modelfile import write_modelfile
from headway.infer.load import check_vocabulary
from headway.model.config import ModelConfig
from headway.model.families._config_json import NEUTRAL
from headway.model.families.base import family_of
from headway.model.layout import EMBEDDING, GATES, HEAD, ParamSpec, num_parameters, param_specs
from headway.model.loading.gguf_names import (
    ARCHITECTURE_OF,
    ARCHITECTURES,
    ROPE_FACTORS,
    SMOLLM3_STEP,
    GgufArchitecture,
    gguf_name,
    permuted,
)  # fmt: skip
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

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_k_m"]
FILE_TYPES: dict[str, int] = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_k_m": 15}
"""Values of general.file_type."""
QUANTISED_ROWS = 32
QUANTISATION_VERSION = 2


@dataclass(frozen=True)
class GgufExport:
    """What was written."""

    out: Path
    modelfile: Path
    architecture: str
    type: str
    bytes: int
    stored: dict[str, int]
    """Tensors by the type they are stored as."""


def export_gguf(
    model: Path | str,
    out: Path,
    *,
    kind: GgufType = "f16",
    name: str | None = None,
    family: str | None = None,
) -> GgufExport:
    """Write the model that `--model` names. An earlier GGUF file at `out` is replaced; a file of another kind there is refused."""
    from headway.tokenizer.gguf_vocabulary import to_metadata
    from headway.tokenizer.load import load_tokenizer

    need("gguf", "headway export gguf")
    _check_target(out)
    found = find_model_of_family(model, family)
    found.check_head()
    config, architecture = _target(found.config)
    if found.tokenizer_folder is None:
        raise ConfigError(
            f"{found.path}: has no tokenizer, and a GGUF file needs one. Put its files next to the model."
        )
    tokenizer = load_tokenizer(found.tokenizer_folder)
    check_vocabulary(tokenizer, found.tokenizer_folder, config)
    values = _shape_values(config, architecture) | to_metadata(tokenizer, config.vocab)
    values |= _end_values(found, tokenizer)
    if found.config.head_gates is not None:
        log.info(
            "%s: its head masks are left out: a GGUF file has no place for them, and every head keeps the whole context.",
            found.path,
        )
    title = name if name is not None else _title(found)
    general = {
        "general.name": title,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTISATION_VERSION,
    }
    file = _GgufWriter(out, config, architecture, kind)
    with writing(out, error=CheckpointError):
        stored = file.write(general | values, _completed(config, found))
        modelfile = write_modelfile(out, tokenizer, config, found.end_ids)
        record_digests(out.parent, (out.name,))
    return GgufExport(out, modelfile, architecture.name, kind, out.stat().st_size, stored)


def parse_type(name: str) -> GgufType:
    """A type by its name in any case."""
    for known in FILE_TYPES:
        if name.lower() == known:
            return known  # pyright: ignore[reportReturnType]
    raise ConfigError(
        f"--type is {name!r}; it must be one of {', '.join(FILE_TYPES)}. For others run llama-quantize on the f16 file."
    )


def _check_target(out: Path) -> None:
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


def _title(found: StoredModel) -> str:
    parts = [
        part
        for part in Path(str(found.path)).absolute().parts
        if part not in ("final", "checkpoints")
    ]
    return parts[-1] if parts else "model"


def _completed(target: ModelConfig, found: StoredModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in the order of the file, with zeros for biases that only the written family has."""
    import torch

    ours = {spec.name for spec in param_specs(found.config)}
    rest = ((name, value) for name, value in found.weights() if name != GATES)
    for spec in param_specs(target):
        name, value = next(rest) if spec.name in ours else (spec.name, torch.zeros(spec.shape))
        assert (name, tuple(value.shape)) == (spec.name, spec.shape), (
            f"{name} {tuple(value.shape)} came where {spec.name} {spec.shape} is due"
        )
        assert name in ours or name.endswith(".bias"), (
            f"{name} is no bias, so zeros would change the model"
        )
        yield name, value


def _target(config: ModelConfig) -> tuple[ModelConfig, GgufArchitecture]:
    """The config under which the model is written, and its architecture; what llama.cpp would compute differently is refused."""
    if config.media is not None:
        raise ConfigError(
            "the model has media inputs, which `headway export gguf` does not write. Use `headway export hf`."
        )
    target = family_of(config.family).published(config.with_(head_gates=None))
    if target.family not in ARCHITECTURE_OF:
        known = ", ".join(ARCHITECTURE_OF)
        raise ConfigError(
            f"model.family is {target.family!r}; `headway export gguf` knows {known}. Use `headway export hf`."
        )
    architecture = ARCHITECTURES[ARCHITECTURE_OF[target.family]]
    unrotated = (
        tuple(range(SMOLLM3_STEP - 1, target.num_layers, SMOLLM3_STEP))
        if architecture.name == "smollm3"
        else ()
    )
    needed: dict[str, Any] = {
        **NEUTRAL,
        "qk_norm": architecture.name == "qwen3",
        "no_rope_layers": unrotated,
    }
    if not architecture.output_bias:
        needed |= {"output_bias": False, "ffn_bias": False}
    for key, value in needed.items():
        if getattr(target, key) != value:
            raise ConfigError(
                f"model.{key} is {getattr(target, key)!r}; llama.cpp's {architecture.name} always has {value!r}. Use `headway export hf`."
            )
    if not architecture.any_head_size and target.num_heads * target.head_size != target.hidden_size:
        raise ConfigError(
            f"model.head_dim is {target.head_size}; llama.cpp's {architecture.name} needs hidden_size / num_heads. Use `headway export hf`."
        )
    if (
        target.rope_scaling is not None
        and target.rope_scaling.kind == "llama3"
        and architecture.name != "llama"
    ):
        raise ConfigError(
            f"model.rope_scaling.kind is 'llama3', which llama.cpp's {architecture.name} ignores. Use `headway export hf`."
        )
    if target.rope_scaling is not None and target.rope_scaling.kind == "longrope":
        raise ConfigError(
            "model.rope_scaling.kind is 'longrope', which `headway export gguf` does not write. Use `headway export hf`."
        )
    if (
        target.rope_scaling is not None
        and target.rope_scaling.kind == "yarn"
        and not target.rope_scaling.truncate
    ):
        raise ConfigError(
            "model.rope_scaling.truncate is False, which llama.cpp's yarn does not have. Use `headway export hf`."
        )
    return target, architecture


def _shape_values(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    """The metadata of the shape. Windows are not in these architectures: the context length ends where they would begin to count."""
    context = config.max_seq_len
    windows = [
        window
        for layer in range(config.num_layers)
        if (window := config.window_of(layer)) is not None
    ]
    if windows and min(windows) < context:
        log.info(
            "the model has windows of %d tokens, and llama.cpp's %s has none: the file says context length %d instead of %d.",
            min(windows), architecture.name, min(windows), context,
        )  # fmt: skip
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
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_size,
        "rope.freq_base": float(config.rope_theta),
        "vocab_size": config.vocab,
        **_rope_values(config),
    }
    return {f"{architecture.name}.{key}": value for key, value in values.items()}


def _rope_values(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {}
    if (
        scaling.kind == "llama3"
    ):  # the tensor rope_freqs.weight does the work; these say what it was made from
        low, high = float(scaling.low_freq_factor), float(scaling.high_freq_factor)
        return {"rope.scaling.original_context_length": scaling.original_max_seq_len, "rope.scaling.low_freq_factor": low,
                "rope.scaling.high_freq_factor": high}  # fmt: skip
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
        if scaling.attention_factor is not None:
            values["rope.scaling.attn_factor"] = scaling.attention_factor / yarn_growth(
                scaling.factor
            )
    return values


def _end_values(found: StoredModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """A second id that ends a text, such as the end of a turn."""
    more = sorted(found.end_ids - {tokenizer.eos_id})
    if not more:
        return {}
    if tokenizer.eos_id is None:
        return {
            "tokenizer.ggml.eos_token_id": more[0],
            **({"tokenizer.ggml.eot_token_id": more[1]} if len(more) > 1 else {}),
        }
    return {"tokenizer.ggml.eot_token_id": more[0]}


def stored_type(spec: ParamSpec, config: ModelConfig, kind: str) -> str:
    """The type one tensor is stored as."""
    if len(spec.shape) == 1 or kind == "f32":
        return "f32"
    if kind in ("f16", "bf16"):
        return kind
    wanted = kind
    if kind == "q4_k_m":
        wanted = "q6_k" if _counts_more(spec, config) else "q4_k"
    if wanted in BLOCK_BYTES and spec.shape[-1] % BLOCK:
        wanted = "q5_0" if wanted == "q4_k" else "q8_0"
    return wanted if wanted in BLOCK_BYTES or spec.shape[-1] % QUANTISED_ROWS == 0 else "f16"


def _counts_more(spec: ParamSpec, config: ModelConfig) -> bool:
    """Tensors that llama.cpp's q4_k_m stores in six bits: the head, and in half of the layers the values and the down projection."""
    if spec.name == HEAD or (spec.name == EMBEDDING and config.tie_embeddings):
        return True
    if not spec.name.endswith(("v_proj.weight", "down_proj.weight")) or not isinstance(
        spec.stage, int
    ):
        return False
    eighth = config.num_layers // 8
    return (
        spec.stage < eighth
        or spec.stage >= 7 * config.num_layers // 8
        or (spec.stage - eighth) % 3 == 2
    )


class _GgufWriter:
    """Writes one file through the gguf package, tensor by tensor."""

    def __init__(
        self, out: Path, config: ModelConfig, architecture: GgufArchitecture, kind: str
    ) -> None:
        self.out, self.config, self.architecture, self.kind = out, config, architecture, kind

    def write(
        self, values: dict[str, Any], weights: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, int]:
        """The whole file; it appears under its name when all of it is on disk."""
        import gguf

        clear_leftovers(self.out)
        temporary = temporary_name(self.out.absolute())
        temporary.parent.mkdir(parents=True, exist_ok=True)
        specs = {spec.name: spec for spec in param_specs(self.config)}
        writer = gguf.GGUFWriter(temporary, self.architecture.name)
        try:
            for key, value in values.items():
                _add_value(writer, key, value)
            stored = self._plan(writer, specs)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for row in self._factors():
                writer.write_tensor_data(row)
            with progress(
                "export", total=num_parameters(self.config), unit="parameters"
            ) as advance:
                for name, value in weights:
                    writer.write_tensor_data(self._bytes(specs[name], value))
                    advance(value.numel())
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

    def _plan(self, writer: Any, specs: dict[str, ParamSpec]) -> dict[str, int]:
        """Name, shape and type of every tensor, in the order they are written."""
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        stored: dict[str, int] = {}
        for row in self._factors():
            writer.add_tensor_info(ROPE_FACTORS, row.shape, row.dtype, row.nbytes)
        for spec in specs.values():
            kind = stored_type(spec, self.config, self.kind)
            code = GGMLQuantizationType[kind.upper()]
            block, width = GGML_QUANT_SIZES[code]
            writer.add_tensor_info(
                gguf_name(spec.name),
                spec.shape,
                np.dtype(np.float32),
                spec.size // block * width,
                raw_dtype=code,
            )
            stored[kind] = stored.get(kind, 0) + 1
        return stored

    def _factors(self) -> list[Any]:
        """What each frequency is divided by, where the scaling is Llama 3's."""
        from headway.model.rope import inverse_frequencies

        if self.config.rope_scaling is None or self.config.rope_scaling.kind != "llama3":
            return []
        plain = inverse_frequencies(self.config.with_(rope_scaling=None))
        return [(plain / inverse_frequencies(self.config)).numpy()]

    def _bytes(self, spec: ParamSpec, value: torch.Tensor) -> Any:
        """One tensor as the file holds it."""
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        if self.architecture.permuted:
            value = permuted(spec.name, value, self.config.num_heads, self.config.kv_heads)
        kind = stored_type(spec, self.config, self.kind)
        if kind in BLOCK_BYTES:
            return quantise(value.reshape(-1, value.shape[-1]), kind)
        if kind in ("f16", "bf16"):
            made = converted(spec.name, value, "float16" if kind == "f16" else "bfloat16")
            return made.contiguous().view(torch.uint8).numpy()
        plain = value.detach().to("cpu", torch.float32).contiguous().numpy()
        return (
            plain.view(np.uint8)
            if kind == "f32"
            else quantize(plain, GGMLQuantizationType[kind.upper()])
        )


def _add_value(writer: Any, key: str, value: Any) -> None:
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
