"""Small Llama folders whose layers are packed as AWQ and GPTQ publish them, and the same weights plain.

The packing is written one number at a time from the published layouts, without anything of headway's reader.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_PLACES = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}
"""Output of eight -> its place in a word."""


@dataclass(frozen=True)
class Packing:
    """How a folder is packed."""

    method: str
    bits: int = 4
    group_size: int = 16
    is_symmetric: bool = False
    is_reordered: bool = False
    is_second_format: bool = False

    def settings(self) -> dict[str, Any]:
        """The quantization_config of config.json."""
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            return {**common, "zero_point": True, "version": "gemm"}
        return {
            **common,
            "sym": self.is_symmetric,
            "desc_act": self.is_reordered,
            "checkpoint_format": "gptq_v2" if self.is_second_format else "gptq",
        }


def signed(word: int) -> int:
    """The int32 with the bits of a word."""
    return word - (1 << 32) if word >> 31 else word


def packed_matrix(
    outputs: int, inputs: int, how: Packing, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of a random matrix, and the matrix in fp32 [out, in]."""
    size = inputs if how.group_size == -1 else how.group_size
    groups = (inputs + size - 1) // size
    top = 1 << how.bits
    codes = torch.randint(0, top, (inputs, outputs), generator=generator).tolist()
    zeros = torch.randint(1, top, (groups, outputs), generator=generator).tolist()
    if how.is_symmetric:
        zeros = [[top // 2] * outputs for _ in range(groups)]
    scales = (torch.rand(groups, outputs, generator=generator) * 0.02 + 0.001).half()
    group_of = [i // size for i in range(inputs)]
    if how.is_reordered:
        order = torch.randperm(inputs, generator=generator).tolist()
        group_of = [group_of[i] for i in order]

    exact = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            g = group_of[i]
            exact[o, i] = float(scales[g, o]) * (codes[i][o] - zeros[g][o])

    number = 32 // how.bits
    if how.method == "awq":
        parts = {
            "qweight": rows_of_words(codes, how.bits, AWQ_PLACES),
            "qzeros": rows_of_words(zeros, how.bits, AWQ_PLACES),
            "scales": scales,
        }
        return parts, exact

    in_order = {place: place for place in range(number)}
    by_output = [[codes[i][o] for i in range(inputs)] for o in range(outputs)]
    offset = 0 if how.is_second_format else 1
    stored = [[zero - offset for zero in row] for row in zeros]
    parts = {
        "qweight": rows_of_words(by_output, how.bits, in_order).t().contiguous(),
        "qzeros": rows_of_words(stored, how.bits, in_order),
        "scales": scales,
        "g_idx": torch.tensor(group_of, dtype=torch.int32),
    }
    return parts, exact


def rows_of_words(rows: list[list[int]], bits: int, places: Mapping[int, int]) -> Tensor:
    """int32 [rows, columns / number in a word]."""
    number = 32 // bits
    words: list[list[int]] = []
    for row in rows:
        words.append([])
        for first in range(0, len(row), number):
            word = 0
            for k in range(number):
                word |= row[first + k] << (bits * places[k])
            words[-1].append(signed(word))
    return torch.tensor(words, dtype=torch.int32)


def pack_folder(plain: Path, target: Path, how: Packing) -> dict[str, Tensor]:
    """Write the folder with new, packed projections; its parts lie in two files. The exact weights
    are returned under Hugging Face's names."""
    target.mkdir(parents=True, exist_ok=True)
    for path in plain.iterdir():
        # Digests of the plain files would call the packed ones damaged.
        if path.suffix in (".json", ".jinja") and path.name != "headway_digests.json":
            (target / path.name).write_bytes(path.read_bytes())
    generator = torch.Generator().manual_seed(5)
    exact: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    for name, value in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            exact[name] = value
            first[name] = value
            continue
        outputs, inputs = value.shape
        parts, exact[name] = packed_matrix(outputs, inputs, how, generator)
        module = name.removesuffix(".weight")
        for kind, part in parts.items():
            file = second if kind == "scales" else first
            file[f"{module}.{kind}"] = part

    write_two(target, first, second)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = how.settings()
    (target / "config.json").write_text(json.dumps(config))
    return exact


def write_two(folder: Path, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Two files and their index."""
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    files = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_exact(packed: Path, target: Path, exact: dict[str, Tensor]) -> None:
    """The same model, stored plainly in fp32."""
    target.mkdir(parents=True, exist_ok=True)
    for path in packed.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "model.safetensors.index.json":
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: value.float() for name, value in exact.items()}, target / "model.safetensors")
