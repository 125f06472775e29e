"""Every decoder of the installed transformers, small and random: can headway use it, and train it?

    model type -> a tiny model with unusual settings, as transformers makes and saves it
               -> headway reads the folder -> cached greedy text and logits, gradients packed and alone
               -> `Verdict`

The walk calls nothing of headway that a user's model would not go through.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headway.checkpoint.stored_model import StoredModel, find_model
from headway.errors import HeadwayError
from headway.export.huggingface import export_huggingface
from headway.model.base import build_frozen_model
from headway.model.families.base import WRAPPED, family_names, family_of
from headway.model.families.transformers import Wrapping
from headway.model.paged_rows import PagedRows
from headway.model.stock.facts import check_trainable
from support.batches import make_batch
from support.stock_cases import save_stock

LENGTHS = [[7, 9], [16], [3, 4, 5]]
VOCAB = 61
BANNED = [0, 2]
"""Padding and the end of a text are never chosen."""
PROMPT = 11
NEW = 9
LARGEST = 5_000_000
"""Parameters of a tiny model at most."""
LOGITS = 1e-5
GRADIENTS = 1e-4


def odd_shape() -> dict[str, Any]:
    """Sizes that no published model has: odd heads, a vocabulary that is no multiple of anything."""
    return {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 3, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "n_positions": 64, "attention_bias": True, "sliding_window": 5, "tie_word_embeddings": False,
        "num_experts": 5, "num_local_experts": 5, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_num_experts": 5, "moe_k": 2,
    }  # fmt: skip


WINDOWED = ("sliding_attention", "full_attention", "sliding_attention")
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "v_head_dim": 14,
    "qk_nope_head_dim": 10, "head_dim": 8, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2,
}  # fmt: skip
DECODER: dict[str, Any] = {"is_decoder": True, "pad_token_id": 0}
GEMMA4: dict[str, Any] = {
    "head_dim": 8, "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 10, "num_kv_shared_layers": 1,
    "num_hidden_layers": 4, "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}}, "num_experts": ..., "moe_intermediate_size": ...,
}  # fmt: skip
BY_CLASS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3",
                     "youtu", "hy_v4"), LATENT),
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
                     "xlm-roberta", "xlm-roberta-xl"), DECODER),
    "roc_bert": DECODER | {"pronunciation_vocab_size": 11, "shape_vocab_size": 12, "pronunciation_embed_dim": 9, "shape_embed_dim": 7},
    "xmod": DECODER | {"languages": ["en_XX"], "default_language": "en_XX"},
    "longcat_flash": LATENT | {"num_layers": 2, "num_hidden_layers": ..., "ffn_hidden_size": 40, "expert_ffn_hidden_size": 20,
                               "moe_topk": 2, "zero_expert_num": 2},
    "dbrx": {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64, "attn_config": {"kv_n_heads": 3, "rope_theta": 1e4, "clip_qkv": 2.0},
             "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 3, "moe_top_k": 2, "hidden_size": 48},
             "num_key_value_heads": ...},
    "gemma3n_text": {"head_dim": 8, "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 10, "laurel_rank": 6,
                     "num_kv_shared_layers": 2, "num_hidden_layers": 4, "intermediate_size": 40, "activation_sparsity_pattern": [0.0] * 4,
                     "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "ministral": {"head_dim": 8},
    "diffllama": {"num_key_value_heads": 2},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
                                                for kind in ("sliding_attention", "full_attention")}},
    "flint": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "deepseek_v4": {"num_experts": ..., "head_dim": 16},
    "modernbert-decoder": {"pad_token_id": 0},
    "zaya": {"num_experts_per_tok": 1, "moe_intermediate_size": 20, "head_dim": 8, "router_hidden_size": 16},
    "granitemoehybrid": {"layer_types": ["attention"] * 3, "mamba_n_heads": 12, "position_embedding_type": "rope"},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["full_attention", "conv", "conv"]},
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "kolibri1": {"layer_types": list(WINDOWED)},
    "afmoe": {"layer_types": list(WINDOWED)},
    "lfm2": {"layer_types": ["full_attention", "conv", "conv"]},
    "llama4_text": {"intermediate_size_mlp": 40, "head_dim": 8, "moe_layers": [1]},
}  # fmt: skip
"""model_type -> settings over `odd_shape`; ... leaves one out."""


@dataclass(frozen=True)
class Verdict:
    """What headway can do with a class."""

    kind: str
    class_name: str
    use: str | None = None
    """Why it cannot be used; None: it can."""
    train: str | None = None
    """Why it cannot be trained; None: it can."""
    logits: float = 0.0
    gradients: float = 0.0


def config_of(kind: str, **changes: Any) -> Any:
    """The tiny config of a model type, with those of the unusual settings that its class has."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[kind]
    default = config_class()
    known = {
        key for key in odd_shape() if key in config_class.attribute_map or key in default.__dict__
    }
    # Dropout is compared nowhere: its draws differ.
    settings: dict[str, Any] = {
        key: 0.0
        for key in default.__dict__
        if "drop" in key and isinstance(getattr(default, key), float)
    }
    settings |= {key: value for key, value in odd_shape().items() if key in known} | BY_CLASS.get(
        kind, {}
    )
    settings |= changes
    # Layers with a window and layers without one, where a class has both.
    kinds = set(getattr(default, "layer_types", None) or ())
    if (
        kinds
        and kinds <= set(WINDOWED)
        and "layer_types" not in settings
        and settings.get("num_hidden_layers") == len(WINDOWED)
    ):
        settings["layer_types"] = list(WINDOWED) if len(kinds) > 1 else list(kinds) * len(WINDOWED)
    return config_class(**{key: value for key, value in settings.items() if value is not ...})


def build(kind: str, **changes: Any) -> Any:
    """A random model of transformers in evaluation mode."""
    import transformers

    config = config_of(kind, **changes)
    with torch.device("meta"):
        size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    assert size < LARGEST, f"{kind} has {size} parameters: give settings that make it small"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))
    with torch.no_grad():
        for value in dict.fromkeys(model.parameters()):
            spread = 0.1 if value.dim() > 1 else 0.2
            value.add_(torch.randn(value.shape, generator=generator) * spread)
    return model.eval()


def kinds() -> list[str]:
    """Model types with a decoder whose layers call the attention interface of transformers, one part alone."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    listed: list[str] = []
    for kind, names in NAMES.items():
        model_class = getattr(transformers, names if isinstance(names, str) else names[0])
        if model_class._supports_attention_backend and not _has_parts(
            transformers.CONFIG_MAPPING[kind]
        ):
            listed.append(kind)
    return sorted(listed)


def _has_parts(config_class: Any) -> bool:
    """Whether a config holds others: of pictures or sounds beside the text, or of a second model."""
    # These two have no config of a text part, but towers among their modules, or none of a decoder.
    if config_class.model_type in ("phi4_multimodal", "gemma4_assistant"):
        return True
    # The parts of these two configs are settings of their attention and experts.
    return bool(config_class.sub_configs) and config_class.model_type not in ("dbrx", "mpt")


def usable() -> list[str]:
    """Those whose small random model headway reads."""
    return [kind for kind in kinds() if _reads(kind)]


def _reads(kind: str) -> bool:
    try:
        Wrapping().read(config_of(kind).to_dict(), Path())
    except HeadwayError:
        return False
    return True


def judge(kind: str) -> Verdict:
    """Use and train one class, or say why not."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    transformers.logging.set_verbosity_error()
    class_name = str(NAMES[kind])
    reference = build(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = save_stock(reference, Path(folder) / "model")
        try:
            stored = find_model(path, wrapping=Wrapping())
            model = build_frozen_model(
                stored.config, stored.weights(), torch.device("cpu"), torch.float32
            )
        except HeadwayError as error:
            return Verdict(kind, class_name, use=_reason(error), train="")
        gap, problem = _use(reference, model)
        if problem is not None:
            return Verdict(kind, class_name, use=problem, train="", logits=gap)
        try:
            check_trainable(stored.config)
        except HeadwayError as error:
            return Verdict(kind, class_name, train=_reason(error), logits=gap)
        worst, problem = _train(reference, model)
        if problem is None:
            problem = _written(stored, path, Path(folder) / "out")
        return Verdict(kind, class_name, train=problem, logits=gap, gradients=worst)


def _reason(error: HeadwayError) -> str:
    """What is wrong with a class, without its name and the remedy."""
    text = str(error)
    for start in ("nor trained: ", "not trained: ", "transformers cannot make this model: "):
        _, found, rest = text.partition(start)
        if found:
            return rest.split(". ", 1)[0].split(": ", 1)[0].rstrip(".")
    return text


def _written(stored: StoredModel, path: Path, out: Path) -> str | None:
    """What differs in a folder that headway writes; None: every tensor is the same."""
    from safetensors.torch import load_file

    export_huggingface(stored.config, stored.weights(), out, tokenizer=None)
    theirs = load_file(path / "model.safetensors")
    ours = load_file(out / "model.safetensors")
    if theirs.keys() != ours.keys():
        return f"an export has other tensors: {min(theirs.keys() ^ ours.keys())}"
    for name, value in theirs.items():
        if not torch.equal(value, ours[name]):
            return f"an export changes {name}"
    return None


def page(verdicts: list[Verdict]) -> str:
    """The tables of docs/support.md: of every model type with a causal decoder, once."""
    import transformers

    trained = [verdict.kind for verdict in verdicts if verdict.train is None]
    used = [verdict for verdict in verdicts if verdict.use is None and verdict.train is not None]
    others = _others({verdict.kind for verdict in verdicts})
    native = _native([verdict.kind for verdict in verdicts] + others.without_interface)
    refused = [
        verdict for verdict in verdicts if verdict.use is not None and verdict.kind not in native
    ]

    groups: dict[str, list[str]] = {}
    for verdict in used:
        groups.setdefault(f"use, not training: {verdict.train}", []).append(verdict.kind)
    for verdict in refused:
        groups.setdefault(f"neither: {verdict.use}", []).append(verdict.kind)
    wrapped = [kind for kind in trained if kind not in native]
    foreign = [kind for kind in others.without_interface if kind not in native]

    through_class = len(trained) + len(used)
    total = len(verdicts) + others.count
    both = len(native) + len(wrapped) + len(others.text_parts)
    lines = [
        f"transformers {transformers.__version__} has {total} model types with a causal decoder. "
        f"headway trains {both} of them and uses {both + len(used)}.",
        f"{len(verdicts)} are of text alone and call transformers' attention interface in their layers; "
        f"{through_class} of these are used and {len(trained)}",
        "trained through their own class, those with a native family included. A name is a `model_type`.",
        "",
        "| use and training | model types |",
        "|---|---|",
        _row("both, as a native family", native),
        _row("both, through the class of transformers", wrapped),
        _row("both, as the text part of a model with pictures or sounds", others.text_parts),
        *(_row(reason, kinds) for reason, kinds in groups.items()),
        _row("neither: its layers do not call the attention interface of transformers", foreign),
        _row("neither: a model with other parts, whose text part is not read", others.parts),
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Others:
    """Model types with a causal decoder that the walk leaves out."""

    without_interface: list[str]
    text_parts: list[str]
    """With other parts beside the text, which headway keeps aside."""
    parts: list[str]
    """With other parts, and refused."""

    @property
    def count(self) -> int:
        return len(self.without_interface) + len(self.text_parts) + len(self.parts)


def _others(walked: set[str]) -> _Others:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from headway.model.loading.other_parts import KNOWN

    sorted_out = _Others([], [], [])
    for kind in sorted(set(NAMES) - walked):
        if not _has_parts(transformers.CONFIG_MAPPING[kind]):
            sorted_out.without_interface.append(kind)
        elif kind in KNOWN:
            sorted_out.text_parts.append(kind)
        else:
            sorted_out.parts.append(kind)
    return sorted_out


def _native(kinds: list[str]) -> list[str]:
    """Those for which headway has a family of its own."""
    families = [vars(family_of(name)) for name in family_names() if name != WRAPPED]
    types = {family["MODEL_TYPE"] for family in families}
    for family in families:
        types |= set(family.get("OTHER_TYPES", ()))
    return sorted(types & set(kinds))


def _row(reason: str, kinds: list[str]) -> str:
    return f"| {reason} | {', '.join(f'`{kind}`' for kind in kinds)} |"


@torch.no_grad()
def _use(reference: Any, model: Any) -> tuple[float, str | None]:
    tokens = torch.randint(3, VOCAB - 1, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    position = torch.arange(PROMPT).expand(2, -1)
    wanted = reference(tokens).logits
    plain = model.logits(model.hidden_states(tokens, position))
    gap = float((plain - wanted).abs().max())
    if not gap < LOGITS:
        return gap, f"its logits differ by {gap:.1e}"
    # Without their cache: `generate` numbers the positions of some classes otherwise than they do.
    text = tokens
    for _ in range(NEW):
        logits = reference(text).logits[:, -1]
        logits[:, BANNED] = -torch.inf
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
    rows = PagedRows(model, 2, PROMPT + NEW)
    hidden = torch.cat([rows.read(tokens[:, :6]), rows.read(tokens[:, 6:])], 1)
    again = float((model.logits(hidden) - wanted).abs().max())
    if not again < LOGITS:
        return again, f"logits through the cache differ by {again:.1e}"
    hidden = hidden[:, -1]
    for index in range(NEW):
        logits = model.logits(hidden)
        logits[:, BANNED] = -torch.inf
        chosen = logits.argmax(-1)
        if chosen.tolist() != text[:, PROMPT + index].tolist():
            return gap, f"greedy text differs at token {index}"
        hidden = rows.step(chosen)
    return max(gap, again), None


def _train(reference: Any, model: Any) -> tuple[float, str | None]:
    batch = make_batch(LENGTHS, seq_len=16, vocab=VOCAB - 1)
    model.train().requires_grad_(True)
    out = model.forward_batch(batch)
    loss = out.head.nll(batch.targets, batch.loss_weight).total
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    wanted = torch.zeros(())
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            logits = reference(batch.tokens[row : row + 1, start : start + length]).logits[0, :-1]
            wanted = wanted + F.cross_entropy(
                logits, batch.targets[row, start : start + length - 1], reduction="sum"
            )
            start += length
    reference.zero_grad()
    wanted.backward()
    off = abs(float((loss - wanted).detach())) / float(wanted.detach())
    if not off < GRADIENTS:
        return off, f"the loss differs by {off:.1e}"
    largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    worst = 0.0
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            continue
        mine = gradients.get(name)
        if mine is None:
            return 1.0, f"{name} has no gradient"
        gap = (mine - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(
            min=1e-3 * largest
        )
        worst = max(worst, float(gap))
    if not worst < GRADIENTS:
        return worst, f"gradients differ by {worst:.1e}"
    return worst, None
