"""What llama.cpp calls our models: a family has an architecture, a parameter has a tensor name, and
q and k of some architectures have a different order of rows.

llama.cpp rotates neighbouring rows of a head where headway (as Hugging Face) rotates the two
halves, for the architectures that came from Meta's files. Their q and k are stored in that order:
`permuted` and `unpermuted` are inverses. Imports without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from headway.model.layout import EMBEDDING, HEAD


@dataclass(frozen=True)
class GgufArchitecture:
    """One value of `general.architecture` that headway writes and reads."""

    name: str
    family: str
    """The family that a file of this architecture is read as."""
    permuted: bool = False
    """Rows of q and k are stored in pairs."""
    output_bias: bool = False
    """It knows biases on the attention output and in the feed-forward layer."""
    any_head_size: bool = True
    """The heads together may be wider than the model."""


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        GgufArchitecture("llama", "llama", permuted=True, output_bias=True),
        GgufArchitecture("qwen2", "qwen2", any_head_size=False),
        GgufArchitecture("qwen3", "qwen3"),
        GgufArchitecture("smollm3", "smollm3", permuted=True),
    )
}
ARCHITECTURE_OF = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}
"""Family of a Hugging Face export -> its architecture."""
SMOLLM3_STEP = 4
"""llama.cpp leaves every fourth layer of a smollm3 without rotation, whatever the file says."""
ROPE_FACTORS = "rope_freqs.weight"
"""What each frequency is divided by, for the scaling of Llama 3."""
OUTSIDE_BLOCKS = {
    EMBEDDING: "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    HEAD: "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
IN_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")


def gguf_name(name: str) -> str:
    """llama.cpp's name of one of our parameters."""
    if name in OUTSIDE_BLOCKS:
        return OUTSIDE_BLOCKS[name]
    match = IN_BLOCK.fullmatch(name)
    assert match is not None and match.group(2) in PARTS, f"{name} has no name in GGUF"
    layer, part, leaf = match.groups()
    return f"blk.{layer}.{PARTS[part]}.{leaf}"


def permuted(name: str, value: Any, num_heads: int, num_kv_heads: int) -> Any:
    """A q or k projection with its rows in pairs; any other tensor unchanged."""
    return _reordered(name, value, num_heads, num_kv_heads, halves_first=True)


def unpermuted(name: str, value: Any, num_heads: int, num_kv_heads: int) -> Any:
    """A q or k projection with its rows in halves again; any other tensor unchanged."""
    return _reordered(name, value, num_heads, num_kv_heads, halves_first=False)


def _reordered(
    name: str, value: Any, num_heads: int, num_kv_heads: int, *, halves_first: bool
) -> Any:
    """Rows [heads, 2, half] swapped to [heads, half, 2], or back."""
    match = ROTATED.search(name)
    if match is None:
        return value
    # Biases have rows too, and are reordered with them.
    heads = num_heads if match.group(1) == "q" else num_kv_heads
    half = value.shape[0] // heads // 2
    if halves_first:
        shape = (heads, 2, half)
    else:
        shape = (heads, half, 2)
    return value.reshape(*shape, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
