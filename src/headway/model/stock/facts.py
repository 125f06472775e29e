"""What headway must know of a class of transformers, found by one forward through it on the meta device, where nothing is computed.

    config.json -> the class without memory -> its forward, with a recorder in place of attention -> `StockFacts`

The forward shows whether every layer calls the attention that headway puts there, with which heads, windows and soft-capping, whether
positions reach it, and what happens between the last hidden states and the logits. A class that packing, the KV cache or the fused loss
could not be exact for is refused here, by name, before any work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from headway.errors import ConfigError, first_line
from headway.model.layout import HEAD, ParamSpec, Stage, spec_by_name
from headway.model.stock.attention import AttentionCall, StockMask, layer_of, passing, window_of
from headway.model.stock.buffers import computed_values
from headway.model.stock.classes import FOREIGN, canonical, empty_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headway.model.config import ModelConfig

TOKENS = 5
PASSED_OVER = (
    "position_ids",
    "sliding_window",
    "is_causal",
    "use_cache",
    "output_attentions",
    "cache_position",
)
"""Arguments of attention that headway's knows without them."""
HEAD_MODULE = HEAD.removesuffix(".weight")


@dataclass(frozen=True)
class StockFacts:
    """A class, as headway sees it."""

    class_name: str
    layers: str
    """The prefix of the layers' names: `model.layers.`"""
    trunk: str
    """The module that owns them, from the embedding to the final norm."""
    windows: tuple[int | None, ...]
    num_heads: int
    kv_heads: int
    head_size: int
    hidden_size: int
    """Of what the head reads."""
    softcap: float | None
    """Of attention scores."""
    logit_scale: float
    logit_softcap: float | None
    tied: str | None
    """The parameter that is the head as well."""
    is_random: bool
    """Layers draw random numbers while they train."""
    specs: tuple[ParamSpec, ...]
    linears: dict[str, tuple[int, int]]
    """Path -> (outputs, inputs) of every nn.Linear, a tied head left out."""


def facts_of(config: ModelConfig) -> StockFacts:
    """The facts of a wrapped model."""
    assert config.hf_config is not None
    return read_facts(config.hf_config, trust_remote_code=config.trust_remote_code)


def read_facts(given: Mapping[str, Any], *, trust_remote_code: bool) -> StockFacts:
    """The facts of a config.json; found once."""
    return _facts(canonical(given), trust_remote_code)


@lru_cache(maxsize=16)
def _facts(key: str, trust_remote_code: bool) -> StockFacts:
    model = empty_model(json.loads(key), trust_remote_code=trust_remote_code)
    try:
        return _tried(model)
    except ConfigError as problem:
        raise ConfigError(
            f"{type(model).__name__}: {problem} model.family transformers cannot train it exactly. "
            "Start from a model of a family that `headway list families` shows, or of another class."
        ) from None


def _tried(model: PreTrainedModel) -> StockFacts:
    _check_modules(model)
    recorder = _Recorder()
    hidden = _forward(model, recorder)
    for call in (
        recorder.calls
    ):  # only there does training change what attention is given; dropout itself is slow to follow
        call.module.training = True
    _forward(model, _Recorder())
    model.eval()
    layers = _layers_of(model, recorder)
    first = recorder.calls[0]
    trunk = layers.rstrip(".").rpartition(".")[0]
    tied = _tied(model)
    scale, cap = _logits_of(model, model.get_submodule(trunk), hidden)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    linears = {
        path: (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and names.get(id(module.weight)) == f"{path}.weight"
    }
    specs: list[ParamSpec] = []
    for name, value in model.named_parameters():
        is_linear = name.removesuffix(".weight") in linears
        stage = _stage(name, layers, is_table=value.dim() > 1 and not is_linear)
        spec = spec_by_name(name, tuple(value.shape), stage)
        specs.append(replace(spec, tied_to=HEAD) if name == tied else spec)
    computed_values(model)
    return StockFacts(
        type(model).__name__, layers, trunk, tuple(recorder.windows), first.q.shape[2], first.k.shape[2], first.q.shape[3], hidden,
        first.softcap, scale, cap, tied, _draws(model), tuple(specs), linears,
    )  # fmt: skip


def _check_modules(model: PreTrainedModel) -> None:
    """Refuse what mixes tokens outside attention, and state that is no parameter."""
    if getattr(model, "_is_stateful", False):
        raise ConfigError(
            "it keeps a recurrent state, which would run across the documents of a row."
        )
    for path, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.RNNBase)):
            raise ConfigError(
                f"{path} is a {type(module).__name__}, which would mix the documents of a row."
            )
    stacked = [name for name, value in model.named_parameters() if value.dim() > 2]
    if stacked or getattr(model.config, "output_router_logits", None) is not None:
        raise ConfigError("it is a mixture of experts, whose balance losses would be left out.")
    persistent = set(model.state_dict()) - {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    if persistent:
        raise ConfigError(
            f"{min(persistent)} is state that is neither trained nor computed from the config."
        )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(model, HEAD_MODULE, None) is not head:
        raise ConfigError(f"its head is not a linear named {HEAD_MODULE}.")
    if getattr(model.config, "layerdrop", 0.0):
        raise ConfigError(
            f"layerdrop is {model.config.layerdrop}; ranks would skip different layers. Set hf_config.layerdrop to 0."
        )


def _tied(model: PreTrainedModel) -> str | None:
    head = _head(model)
    shared = [name for name, value in model.named_parameters() if value is head.weight]
    if shared == [HEAD]:
        return None
    embedding = model.get_input_embeddings()
    if (
        not isinstance(embedding, nn.Embedding)
        or embedding.weight is not head.weight
        or len(shared) != 1
    ):
        raise ConfigError(f"its head shares a matrix with {', '.join(shared)}.")
    others = {
        id(value)
        for name, value in model.named_parameters(remove_duplicate=False)
        if name not in (HEAD, shared[0])
    }
    if id(head.weight) in others:
        raise ConfigError("more than an embedding and the head share a matrix.")
    return shared[0]


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "_check_modules has seen it"
    return head


class _Recorder:
    """A pass that computes nothing and writes down what each layer asks for."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.windows: list[int | None] = []

    def attend(self, call: AttentionCall, mask: StockMask) -> Tensor:
        strange = sorted(set(call.others) - set(PASSED_OVER))
        if strange:
            raise ConfigError(
                f"{type(call.module).__name__} hands {strange[0]} to attention, which headway's does not know."
            )
        if call.dropout:
            raise ConfigError(
                f"attention has dropout {call.dropout}, which headway's has not. Set it to 0 in model.hf_config."
            )
        if layer_of(call.module) != len(self.calls):
            raise ConfigError(f"layer {layer_of(call.module)} attends out of order, or twice.")
        if call.others.get("is_causal") is False:
            raise ConfigError("its attention sees later tokens.")
        self.calls.append(call)
        self.windows.append(window_of(mask.function))
        return call.q.new_empty(*call.q.shape[:3], call.v.shape[-1])


class _Reached(TorchDispatchMode):
    """Follows positions through a forward: every result of an operation that reads one is marked."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.marked: dict[int, Tensor] = {id(start): start}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        flat, _ = tree_flatten((args, kwargs or {}))
        if any(isinstance(one, Tensor) and id(one) in self.marked for one in flat):
            results, _ = tree_flatten(found)
            self.marked.update({id(one): one for one in results if isinstance(one, Tensor)})
        return found


def _not_followed(part: str, error: BaseException) -> str:
    """Why a class cannot be traced, in words of the class: what stands in for its mask is no concern of the user's."""
    reason = first_line(error)[:300]
    if StockMask.__name__ in reason:
        return "it computes with its attention mask itself instead of handing it to the attention interface of transformers."
    return f"its {part} cannot be followed: {reason}."


def _forward(model: PreTrainedModel, recorder: _Recorder) -> int:
    """Run the class; the width of its last hidden states."""
    position = torch.arange(TOKENS, device="meta").expand(2, -1)
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64, device="meta")
    seen = torch.ones(2, TOKENS, dtype=torch.bool, device="meta")
    try:
        with torch.no_grad(), passing(recorder), _Reached(position) as reached:
            model(input_ids=tokens, position_ids=position, attention_mask=seen, use_cache=False)
    except FOREIGN as error:
        raise ConfigError(_not_followed("forward", error)) from None
    wanted = int(model.config.num_hidden_layers)
    if len(recorder.calls) != wanted:
        raise ConfigError(
            f"{len(recorder.calls)} of its {wanted} layers use the attention interface of transformers."
        )
    shapes = {
        (call.q.shape[2:], call.k.shape[2:], call.v.shape[2:], call.softcap)
        for call in recorder.calls
    }
    if len(shapes) > 1 or recorder.calls[0].v.shape[-1] > recorder.calls[0].q.shape[-1]:
        raise ConfigError("its layers have heads of different shapes.")
    sizes = sorted({window for window in recorder.windows if window is not None})
    if len(sizes) > 1:
        raise ConfigError(
            f"its layers have windows of several sizes ({', '.join(map(str, sizes))})."
        )
    if not all(id(call.q) in reached.marked for call in recorder.calls[-1:]):
        raise ConfigError(
            "positions do not reach its attention, so documents of a row could not start anew."
        )
    return _head(model).in_features


def _layers_of(model: PreTrainedModel, recorder: _Recorder) -> str:
    """The prefix of the names of the layers: the list of modules whose members hold the attention calls in order."""
    calls = [call.module for call in recorder.calls]
    for path, module in model.named_modules():
        listed = list(module) if isinstance(module, nn.ModuleList) else []
        if len(listed) == len(calls) and all(
            call in list(layer.modules()) for call, layer in zip(calls, listed, strict=True)
        ):
            return f"{path}."
    raise ConfigError("its layers are not one list of modules.")


def _stage(name: str, layers: str, *, is_table: bool) -> Stage:
    """Its layer. Tables of embeddings come before the layers; final norms, projections and the head after them."""
    if name.startswith(layers):
        return int(name.removeprefix(layers).split(".")[0])
    return "first" if is_table else "last"


def _draws(model: PreTrainedModel) -> bool:
    """Whether anything in the config is a dropout above 0."""
    given = model.config.to_dict()
    return any(isinstance(one, float) and one > 0 for key, one in given.items() if "drop" in key)


def _logits_of(model: PreTrainedModel, trunk: nn.Module, width: int) -> tuple[float, float | None]:
    """(scale, softcap) of the logits, found by what the class makes of real hidden states with a small head; else a ConfigError."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    hidden = torch.randn(1, TOKENS, width, generator=generator, device="cpu")
    bias = _head(model).bias is not None
    small = nn.Linear(width, 8, bias=bias, device="cpu")
    with torch.no_grad():
        small.weight.copy_(
            torch.randn(8, width, generator=generator, device="cpu") * 4 / width**0.5
        )
        if small.bias is not None:
            small.bias.zero_()
    plain = F.linear(hidden, small.weight).detach()
    found = _through(model, trunk, hidden, small)
    cap = getattr(model.config, "final_logit_softcapping", None)
    cap = float(cap) if isinstance(cap, (int, float)) and cap > 0 else None
    linear = found if cap is None else torch.atanh((found / cap).clamp(-1 + 1e-7, 1 - 1e-7)) * cap
    scale = float((linear * plain).sum() / (plain * plain).sum())
    scale = 1.0 if abs(scale - 1.0) < 1e-4 else scale
    ours = plain * scale
    ours = ours if cap is None else torch.tanh(ours / cap) * cap
    if (
        found.shape != ours.shape
        or not torch.allclose(found, ours, rtol=1e-4, atol=1e-4)
        or scale <= 0
    ):
        raise ConfigError(
            "its logits are not a product of hidden states and the head, scaled and soft-capped."
        )
    return scale, cap


def _through(model: PreTrainedModel, trunk: nn.Module, hidden: Tensor, small: nn.Linear) -> Tensor:
    """The logits of the class where its trunk returns `hidden` and its head is `small`."""

    def put(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output

    head, handle = model.get_submodule(HEAD_MODULE), trunk.register_forward_hook(put)
    setattr(model, HEAD_MODULE, small)
    try:
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
        seen, position = (
            torch.ones(1, TOKENS, dtype=torch.bool, device="meta"),
            torch.arange(TOKENS, device="meta")[None],
        )
        with torch.no_grad(), passing(_Recorder()):
            return model(
                input_ids=tokens, attention_mask=seen, position_ids=position, use_cache=False
            ).logits.float()
    except FOREIGN as error:
        raise ConfigError(_not_followed("logits", error)) from None
    finally:
        handle.remove()
        setattr(model, HEAD_MODULE, head)
