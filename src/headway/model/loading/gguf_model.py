"""A GGUF file of llama.cpp comes in; a ModelConfig, weights under our names, the ids that end a
text and a tokenizer folder go out.

Quantised weights are dequantised as they are read. The tokenizer's folder is written once into the
user's cache, under a hash of the file's metadata. Every parameter must exist with its shape; a
tensor or architecture headway does not compute is refused by name.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.load import validate
from headway.config.regular_file import regular_only
from headway.errors import CheckpointError, ConfigError, DataError
from headway.model.config import MAX_LAYERS, ModelConfig
from headway.model.layout import EMBEDDING, HEAD
from headway.model.loading.gguf_names import (
    ARCHITECTURES,
    LARGEST_GEMMAS,
    OF_EXPERTS,
    ROPE_FACTORS,
    SMOLLM3_STEP,
    GgufArchitecture,
    gguf_name,
    gguf_parts,
    read_value,
)
from headway.runtime.digests import read_digests, write_digests
from headway.runtime.paths import cache_home
from headway.runtime.storage import remove_folder, rename_folder, writing
from headway.runtime.temporary import clear_leftovers, temporary_name

if TYPE_CHECKING:
    import torch

    from headway.model.loading.gguf_file import GgufFile

log = logging.getLogger("headway")

SUFFIX = ".gguf"
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""Ends the name of one of several files of a model: its number, and how many there are."""
NO_SCALING = ("none", "")
LOCAL_THETA = 10_000.0
"""Base of Gemma 3's layers with a window, where a file does not carry it."""
LLAMA3_LENGTH = 8192
"""The first context length of every Llama 3; its files do not carry it."""
LLAMA3_FACTORS = (1.0, 4.0)
"""low_freq_factor and high_freq_factor of every Llama 3; its files do not carry them either."""
TOLERANCE = 1e-4
"""Relative difference between stored and computed frequencies, which went through fp32."""


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a folder."""
    if path.is_file():
        if path.suffix == SUFFIX or _begins_as_gguf(path):
            return path
        return None

    # mmproj-*.gguf is the projector of a multimodal model, beside the model itself.
    files = sorted(
        file
        for file in path.glob(f"*{SUFFIX}")
        if file.is_file() and not file.name.startswith("mmproj")
    )
    if not files:
        return None
    if len(files) > 1 and not PART.search(files[0].name):
        names = ", ".join(file.name for file in files[:4])
        raise ConfigError(f"{path}: holds {len(files)} GGUF files ({names}). Give one of them.")
    return files[0]


def holds_only_gguf(folder: Path) -> bool:
    """Whether the weights of a folder are a GGUF file and nothing else; some have a config.json
    next to it."""
    if not folder.is_dir():
        return False
    names = [file.name for file in folder.iterdir()]
    if any(name.endswith(OTHER_WEIGHTS) for name in names):
        return False
    return any(name.endswith(SUFFIX) for name in names)


def _begins_as_gguf(path: Path) -> bool:
    try:
        with open(path, "rb", opener=regular_only) as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


class GgufModel:
    """A model in a GGUF file, opened but not read."""

    def __init__(self, path: Path) -> None:
        split = PART.search(path.name)
        if split is not None and split.group(2) != "00001":
            raise ConfigError(
                f"{path}: is one of {int(split.group(2))} parts. Join them with `llama-gguf-split --merge {path.name} model.gguf`."
            )
        from headway.model.loading.gguf_file import GgufFile

        self.file = GgufFile(path)
        name = self.file.values.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ConfigError(
                f"{path}: general.architecture is {str(name)[:80]!r}; headway reads {', '.join(ARCHITECTURES)}."
            )
        self.architecture = ARCHITECTURES[name]
        try:
            self.config = _config(self.file, self.architecture)
        except ConfigError as problem:
            raise ConfigError(f"{path}: {problem}") from None
        self._check()

    def _check(self) -> None:
        """Every parameter exists in its shape, and every tensor is a parameter."""
        from headway.model.loading.gguf_file import PLAIN_TYPES, REMEDY

        parts = {part.name: part for part in gguf_parts(self.config, self.architecture)}
        for name, part in parts.items():
            tensor = self.file.tensors.get(name)
            if tensor is None:
                raise CheckpointError(f"{self.file.path}: holds no {name}. {REMEDY}")
            if tensor.shape != part.shape:
                raise CheckpointError(
                    f"{self.file.path}: {name} has shape {list(tensor.shape)}; its metadata makes it {list(part.shape)}. {REMEDY}"
                )
            if tensor.type_code not in PLAIN_TYPES:
                self.file.block(tensor)  # refuses a type that cannot be read
        strange = sorted(
            name
            for name in self.file.tensors.keys() - parts.keys() - {ROPE_FACTORS}
            if not self._predicts_more(name)
        )
        if strange:
            raise ConfigError(
                f"{self.file.path}: holds {strange[0]}, which headway's {self.architecture.family} does not compute."
            )

    def _predicts_more(self, name: str) -> bool:
        """Whether a tensor belongs to a layer behind the last one, which predicts more tokens."""
        pieces = name.split(".")
        is_layer = pieces[0] == "blk" and len(pieces) > 1 and pieces[1].isdecimal()
        return is_layer and int(pieces[1]) >= self.config.num_layers

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Our name and the tensor of every parameter, in forward order."""
        import torch

        # One tensor at a time: a quantised file becomes several times its size in floats.
        for part in gguf_parts(self.config, self.architecture):
            whole = torch.from_numpy(self.file.read(part.name))
            rows = [spec.shape[0] for spec in part.specs]
            for spec, value in zip(part.specs, whole.split(rows), strict=True):
                yield spec.name, read_value(self.architecture, self.config, spec.name, value)

    def end_ids(self) -> frozenset[int]:
        """The ids that end a text or a turn."""
        ids: set[int] = set()
        for key in ("eos", "eot", "eom"):
            end_id = self.file.values.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(end_id, int) and 0 <= end_id < self.config.vocab:
                ids.add(end_id)
        return frozenset(ids)

    def tokenizer_folder(self) -> Path | None:
        """A folder with the file's tokenizer, in the cache; None where the file has none."""
        if self.file.values.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
            return None
        digest = hashlib.sha256(self.file.header_bytes).hexdigest()[:32]
        folder = cache_home() / "headway" / "gguf" / digest
        if _is_whole(folder):
            return folder
        from headway.store.file_lock import file_lock

        # Of several processes one writes; the others wait until the folder is whole.
        lock = folder.with_name(f"{folder.name}.lock")
        with (
            writing(folder, error=DataError),
            file_lock(lock, until=lambda: _is_whole(folder)) as is_writer,
        ):
            if is_writer:
                self._write_tokenizer(folder)
        return folder

    def _write_tokenizer(self, folder: Path) -> None:
        """Written beside the folder and renamed, so that a folder of this name is complete."""
        from headway.model.loading.gguf_file import REMEDY
        from headway.tokenizer.gguf_vocabulary import write_files

        clear_leftovers(folder)
        temporary = temporary_name(folder)
        temporary.mkdir(parents=True)
        try:
            write_files(self.file.values, temporary)
            write_digests(temporary)
            if folder.is_dir():
                log.warning("%s: damaged, or without digests; writing this tokenizer again", folder)
                remove_folder(folder)
            rename_folder(temporary, folder)
        except DataError as problem:
            raise DataError(f"{self.file.path}: {problem}. {REMEDY}") from None
        except UnicodeEncodeError:
            raise DataError(f"{self.file.path}: its vocabulary is no UTF-8. {REMEDY}") from None
        finally:
            if temporary.exists():
                import shutil

                shutil.rmtree(temporary)


def _is_whole(folder: Path) -> bool:
    """Whether a tokenizer in the cache is as it was written; one without digests, or a damaged
    one, is written again."""
    try:
        digests = read_digests(folder)
        if digests is None:
            return False
        digests.check()
    except DataError:
        return False
    return True


def _config(file: GgufFile, architecture: GgufArchitecture) -> ModelConfig:
    """The shape of the model, from metadata and from which tensors exist."""
    metadata = _Metadata(file.values, architecture.name)
    heads = metadata.whole("attention.head_count")
    width = metadata.whole("embedding_length")
    # Layers behind the last one that predict more tokens are counted there.
    layers = metadata.whole("block_count") - metadata.whole("nextn_predict_layers", 0)
    if not 0 < layers <= MAX_LAYERS:
        raise ConfigError(f"has {layers} layers; a model may have 1 to {MAX_LAYERS}.")
    embedding = file.tensors.get(gguf_name(EMBEDDING))
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"holds no {gguf_name(EMBEDDING)} of two dimensions.")

    head_size = metadata.whole("attention.key_length", width // max(heads, 1))
    if metadata.whole("attention.value_length", head_size) != head_size:
        raise ConfigError(
            "has keys and values of different widths; headway's heads have one width."
        )
    rotated = metadata.whole("rope.dimension_count", head_size)
    if rotated != head_size and not architecture.partial:
        raise ConfigError(
            f"has {architecture.name}.rope.dimension_count {rotated}; headway rotates whole heads "
            f"of {head_size}."
        )
    epsilon = "attention.layer_norm_rms_epsilon"
    if architecture.form.get("norm", "").startswith("layernorm"):
        epsilon = "attention.layer_norm_epsilon"

    # llama.cpp does not say it in metadata: what a layer has is seen by its tensors.
    def has(name: str) -> bool:
        return gguf_name(name, architecture) in file.tensors

    first = "model.layers.0."
    settings: dict[str, Any] = {
        "family": architecture.family,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "ffn_size": metadata.whole("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": metadata.whole("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_seq_len": metadata.whole("context_length"),
        "norm_eps": metadata.number(epsilon),
        "tie_embeddings": not has(HEAD),
        "qkv_bias": has(first + "self_attn.q_proj.bias"),
        "output_bias": has(first + "self_attn.o_proj.bias"),
        "ffn_bias": has(first + "mlp.up_proj.bias"),
        "qk_norm": has(first + "self_attn.q_norm.weight"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(file, metadata, head_size),
        # `...` stands for a setting that the metadata has.
        **{key: value for key, value in architecture.form.items() if value is not ...},
        **_experts(metadata, architecture),
    }
    if architecture.partial:
        settings["rotary_fraction"] = rotated / max(head_size, 1)
    settings |= _scales(metadata, architecture)
    if architecture.windows:
        settings |= _windows(metadata, architecture, layers)
    if architecture.shifted:
        settings["embed_scale"] = width**0.5
        if LARGEST_GEMMAS[architecture.name] == layers:
            settings["attention_scale"] = (width / max(heads, 1)) ** -0.5
    settings |= _by_architecture(architecture.name, settings)
    return validate(ModelConfig, settings)


def _scales(metadata: _Metadata, architecture: GgufArchitecture) -> dict[str, float]:
    """Multipliers and caps that the metadata of an architecture may have; 0 means none."""
    scales: dict[str, float] = {}
    for setting, key in architecture.free.items():
        value = metadata.number(key, 0.0)
        if not value:
            continue
        if setting in architecture.inverse:
            value = 1.0 / value
        scales[setting] = value
    return scales


def _by_architecture(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's code of one architecture does beyond the metadata, as changes of the
    settings."""
    layers = settings["num_layers"]
    windowed = settings.get("window_layers")
    scaled = settings["rope_scaling"] is not None
    has_one_base = settings.get("rope_local_theta") == settings["rope_theta"]
    if name == "smollm3":
        return {"no_rope_layers": list(range(SMOLLM3_STEP - 1, layers, SMOLLM3_STEP))}
    if name == "cohere2" and windowed is not None:
        return {"no_rope_layers": [layer for layer in range(layers) if layer not in windowed]}
    if name == "gemma3" and has_one_base and not scaled:
        # One base for both kinds of layers is no setting of its own.
        return {"rope_local_theta": None}
    if name == "olmo2":
        # OLMo 3 has the same architecture in a file, and windows.
        if settings.get("sliding_window") is None:
            return {"family": "olmo2"}
        if scaled:
            # Windowed layers are not scaled.
            return {"rope_local_theta": settings["rope_theta"]}
    if name == "llama" and "experts" in settings:
        return {"family": "mixtral"}
    return {}


def _windows(metadata: _Metadata, architecture: GgufArchitecture, layers: int) -> dict[str, Any]:
    """The sliding window, and the layers that have it."""
    window = metadata.whole("attention.sliding_window", 0)
    if not window:
        return {"rope_local_theta": None}
    key = "attention.sliding_window_pattern"
    # Most files leave it out: llama.cpp knows the pattern of published models.
    listed = metadata.values.get(f"{metadata.name}.{key}", architecture.period)
    flags: list[Any] = []
    if isinstance(listed, list):
        flags = listed
    elif isinstance(listed, int):
        period = max(1, listed)
        flags = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(flags) != layers:
        raise ConfigError(
            f"has {metadata.name}.{key} {str(listed)[:80]}; one value a layer is due."
        )

    windowed = [layer for layer in range(layers) if flags[layer]]
    if not windowed:
        return {"rope_local_theta": None}
    settings: dict[str, Any] = {"sliding_window": window}
    if architecture.name == "gemma3":
        settings["rope_local_theta"] = metadata.number("rope.freq_base_swa", LOCAL_THETA)
    if len(windowed) < layers:
        settings["window_layers"] = windowed
    return settings


def _experts(metadata: _Metadata, architecture: GgufArchitecture) -> dict[str, Any]:
    """The `experts` section of a mixture; nothing for other models."""
    number = metadata.whole("expert_count", 0)
    if not number:
        return {}
    if architecture.experts is None:
        raise ConfigError(
            f"has {architecture.name}.expert_count {number}; headway reads no experts of "
            f"{architecture.name}."
        )
    known = {
        "first_dense": metadata.whole("leading_dense_block_count", 0),
        "shared_ffn_size": metadata.whole("expert_shared_feed_forward_length", 0),
        "routed_scale": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "normalize": bool(metadata.values.get(f"{architecture.name}.expert_weights_norm", True)),
    }
    gating = metadata.whole("expert_gating_func", 0)
    if gating and gating != OF_EXPERTS[architecture.experts.form["router"]]:
        raise ConfigError(f"has {architecture.name}.expert_gating_func {gating}.")
    # Files of some architectures have no width of an expert: it is that of the feed-forward.
    size = metadata.whole("feed_forward_length")
    if architecture.experts.own_length:
        size = metadata.whole("expert_feed_forward_length", size)
    if architecture.name == "glm4moe":
        known["shared_ffn_size"] = size * metadata.whole("expert_shared_count", 0)
    section: dict[str, Any] = {
        **{key: value for key, value in architecture.experts.form.items() if value is not ...},
        **{key: value for key, value in known.items() if key in architecture.experts.free},
        "num": number,
        "per_token": metadata.whole("expert_used_count"),
        "aux_loss": 0.0,
    }
    if architecture.experts.own_length:
        section["ffn_size"] = size
    return {"experts": section}


def _scaling(file: GgufFile, metadata: _Metadata, head_size: int) -> dict[str, Any] | None:
    """The scaling of the rotary frequencies: by name, or as the factors that Llama 3's files
    hold."""
    kind = metadata.text("rope.scaling.type", "")
    factor = metadata.number("rope.scaling.factor", 1.0)
    if ROPE_FACTORS in file.tensors:
        return _llama3(file, metadata, head_size)
    if kind in NO_SCALING or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"kind": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(
            f"has {metadata.name}.rope.scaling.type {kind[:40]!r}; headway computes linear, yarn and "
            "Llama 3's."
        )

    if metadata.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise ConfigError(
            f"has {metadata.name}.rope.scaling.yarn_log_multiplier, which headway does not compute. "
            "Give the Hugging Face folder."
        )
    scaling: dict[str, Any] = {
        "kind": "yarn",
        "factor": factor,
        "original_max_seq_len": metadata.whole("rope.scaling.original_context_length"),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        "query_growth": metadata.number("attention.temperature_scale", 0.0),
    }
    # llama.cpp stores the attention factor relative to yarn's default.
    scale = metadata.number("rope.scaling.attn_factor", 1.0)
    if scale != 1.0:
        from headway.model.rope_config import yarn_growth

        # Six digits: the quotient was stored as fp32.
        scaling["attention_factor"] = float(f"{scale * yarn_growth(factor):.6g}")
    return scaling


def _llama3(file: GgufFile, metadata: _Metadata, head_size: int) -> dict[str, Any]:
    """Llama 3's scaling.

    The file has what each frequency is divided by; the settings that give these numbers are derived
    from them.
    """
    import numpy as np

    from headway.model.rope import inverse_frequencies

    factors = file.read(ROPE_FACTORS).astype(np.float64).reshape(-1)
    length = metadata.whole("rope.scaling.original_context_length", LLAMA3_LENGTH)
    scaling = {
        "kind": "llama3",
        # The slowest frequencies are divided by the whole factor.
        "factor": round(float(factors.max()), 4),
        "low_freq_factor": metadata.number("rope.scaling.low_freq_factor", LLAMA3_FACTORS[0]),
        "high_freq_factor": metadata.number("rope.scaling.high_freq_factor", LLAMA3_FACTORS[1]),
        "original_max_seq_len": length,
    }
    if len(factors) == head_size // 2 and factors.max() >= 1:
        # Frequencies depend on the width of a head alone: a model of one head has the same.
        shape = {
            "hidden_size": head_size,
            "num_heads": 1,
            "rope_theta": metadata.number("rope.freq_base", 10000.0),
        }
        plain = inverse_frequencies(validate(ModelConfig, shape))
        scaled = inverse_frequencies(validate(ModelConfig, {**shape, "rope_scaling": scaling}))
        if np.allclose((plain / scaled).double().numpy(), factors, rtol=TOLERANCE):
            return scaling
    raise ConfigError(
        f"holds {ROPE_FACTORS} that are not Llama 3's (first length {length}); headway cannot compute them."
    )


class _Metadata:
    """The metadata of one architecture, each value checked when it is read.

    Without a default, a key is required.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise ConfigError(
                f"has {self.name}.{key} {str(value)[:80]}; a whole number is expected."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"has {self.name}.{key} {str(value)[:80]}; a number is expected.")
        return _exact(float(value))

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"has {self.name}.{key} {str(value)[:80]}; a text is expected.")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(f"{self.name}.{key}", default)
        if value is None:
            raise ConfigError(f"has no {self.name}.{key}.")
        return value


def _exact(value: float) -> float:
    """A number that was stored as fp32, as it was written: 1e-05 and not 9.999999747378752e-06."""
    import numpy as np

    # Neither NaN nor beyond fp32, whose shortest text would be inf.
    if value == value and abs(value) < 3e38:
        short = float(str(np.float32(value)))
    else:
        short = value
    if np.float32(short) == np.float32(value):
        return short
    return value
