"""Model formats that headway cannot read: a path comes in, a sentence that names the format and the
remedy goes out.

Only names and the first bytes of files are examined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from headway.config.regular_file import regular_only

SAFETENSORS = "Give the Hugging Face folder with safetensors that it was made from."
MAGIC = {
    b"GGUF": "a GGUF file of llama.cpp. Give the file itself, not a folder with other weights.",
    b"lmgg": f"a GGML file of early llama.cpp. {SAFETENSORS}",
    b"fmgg": f"a GGML file of early llama.cpp. {SAFETENSORS}",
    b"tjgg": f"a GGML file of early llama.cpp. {SAFETENSORS}",
    b"\x89HDF": f"an HDF5 file of TensorFlow or Keras. {SAFETENSORS}",
    b"Rar!": "a rar archive. Unpack it and give the folder.",
    b"7z\xbc\xaf": "a 7z archive. Unpack it and give the folder.",
    b"\x1f\x8b": "a gzip archive. Unpack it and give the folder.",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself. Download it with `git lfs pull` or `headway download`.",
}
"""By the first bytes of a file, which are more reliable than its name."""
NAMES = {
    "*.gguf": MAGIC[b"GGUF"],
    "*ggml*.bin": MAGIC[b"lmgg"],
    "*.ggml": MAGIC[b"lmgg"],
    "*.onnx": f"an ONNX graph. {SAFETENSORS}",
    "*.onnx_data": f"an ONNX graph. {SAFETENSORS}",
    "tf_model*.h5": f"TensorFlow weights. {SAFETENSORS}",
    "*.h5": f"Keras or TensorFlow weights. {SAFETENSORS}",
    "saved_model.pb": f"a TensorFlow SavedModel. {SAFETENSORS}",
    "*.ckpt.index": f"a TensorFlow checkpoint. {SAFETENSORS}",
    "flax_model*.msgpack": f"Flax weights. {SAFETENSORS}",
    "*.msgpack": f"Flax weights. {SAFETENSORS}",
    "rust_model.ot": f"weights of rust-bert. {SAFETENSORS}",
    "openvino_*.xml": f"an OpenVINO graph. {SAFETENSORS}",
    "openvino_*.bin": f"an OpenVINO graph. {SAFETENSORS}",
    "*.mlmodel": f"a Core ML model. {SAFETENSORS}",
    "*.mlpackage": f"a Core ML model. {SAFETENSORS}",
    "*.tflite": f"a TensorFlow Lite model. {SAFETENSORS}",
    "*.engine": f"a TensorRT engine. {SAFETENSORS}",
    "*.plan": f"a TensorRT engine. {SAFETENSORS}",
    "*.nemo": "an archive of NeMo. Export it to Hugging Face with NeMo's converter first.",
    "*.npz": f"NumPy arrays (MLX writes such weights). {SAFETENSORS}",
    "consolidated*.pth": "weights in Meta's original format (consolidated.*.pth). Give Meta's Hugging Face folder of this model.",
    "consolidated*.safetensors": "weights in Mistral's original format (consolidated.safetensors). "
    "Give its Hugging Face files: config.json and model-*.safetensors.",
    "*.distcp": "shards of torch.distributed.checkpoint. Write one safetensors folder from them with the trainer that made them.",
    "mp_rank_*": "shards of Megatron or DeepSpeed. Convert them to a Hugging Face folder with the trainer that made them.",
    "zero_pp_rank_*": "shards of DeepSpeed's ZeRO. Run zero_to_fp32.py in that folder, then give the Hugging Face folder.",
    "latest_checkpointed_iteration.txt": "a checkpoint folder of Megatron. Convert it to a Hugging Face folder with Megatron's tool.",
    "zero_to_fp32.py": "a DeepSpeed checkpoint folder. Run zero_to_fp32.py in it, then give the Hugging Face folder.",
    "*.zip": "a zip archive. Unpack it and give the folder.",
    "*.tar": "a tar archive. Unpack it and give the folder.",
    "*.safetensors": "a single safetensors file. Give the folder that holds it together with config.json.",
    "*.bin": "a single file of weights. Give the folder that holds it together with config.json.",
    "*.pt": "a single file of weights. Give the folder that holds it together with config.json.",
    "*.pth": "a single file of weights. Give the folder that holds it together with config.json.",
    "*.ckpt": "a single checkpoint file of another trainer. Convert it to a Hugging Face folder with that trainer.",
}
"""By the name of a file, the most specific first."""
MAX_ENTRIES = 1000
"""Entries of a folder that are examined."""


def named_format(path: Path) -> str | None:
    """What an unsupported file or folder is, with a remedy; None if the format is not
    recognised."""
    try:
        if path.is_file():
            # First bytes before names: a .bin may be anything.
            return _by_content(path) or _by_name(path.name)
        names = [entry.name for _, entry in zip(range(MAX_ENTRIES), path.iterdir(), strict=False)]
    except (OSError, ValueError):
        return None
    # Of several formats in a folder the most specific pattern decides.
    for pattern, description in NAMES.items():
        for name in sorted(names):
            if fnmatchcase(name, pattern):
                return f"{name} is {description}"
    return None


def _by_name(name: str) -> str | None:
    return next((text for pattern, text in NAMES.items() if fnmatchcase(name, pattern)), None)


def _by_content(path: Path) -> str | None:
    with open(path, "rb", opener=regular_only) as file:
        head = file.read(32)
    return next((text for magic, text in MAGIC.items() if head.startswith(magic)), None)


def pointer(path: Path) -> str | None:
    """What a file is instead of weights, by its first bytes: for example a Git LFS pointer."""
    try:
        return _by_content(path)
    except OSError:
        return None


def quantised(
    config: Mapping[str, Any], folder: Path, readable: Collection[str] = ()
) -> str | None:
    """How the weights of a Hugging Face folder are quantised, with a remedy; None if they are
    not, or by a `readable` method."""
    settings = config.get("quantization_config")
    method = None
    if isinstance(settings, Mapping):
        method = settings.get("quant_method")
    # Older GPTQ folders have their settings in a file of their own.
    if settings is None and (folder / "quantize_config.json").is_file():
        settings = {}
        method = "gptq"
    if settings is None or method in readable:
        return None
    name = "an unnamed method"
    if method is not None:
        name = NAMED_QUANTISERS.get(str(method), str(method))
    return (
        f"the weights are quantised ({name}); headway trains and computes with 16 or 32 bits. "
        "Give the model they were made from, or dequantise them first."
    )


NAMED_QUANTISERS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
}
