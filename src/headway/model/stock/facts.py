"""What headway must know of a class of transformers, found by one forward through it on the meta
device, where nothing is computed.

    config.json -> the class without memory -> its forward, with a recorder in place of attention
                -> `StockFacts`

The forward shows whether every layer calls the attention that headway puts there, with which heads,
windows and soft-capping, whether positions reach it, and what happens between the last hidden
states and the logits. A class for which packing, the KV cache or the fused loss would not be exact
is refused here, by name, before any work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from headway.errors import ConfigError, first_line
from headway.model.layout import (
    HEAD,
    STACKED,
    ParamSpec,
    Stage,
    in_groups,
    spec_by_name,
)
from headway.model.stock.attention import AttentionCall, StockMask, layer_of, passing, window_of
from headway.model.stock.classes import EXPERTS_ON_META, FOREIGN, canonical, empty_model
from headway.model.stock.values import computed_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headway.model.config import ModelConfig
    from headway.model.experts_config import ExpertsConfig

TOKENS = 5
"""Tokens of the forward."""
PASSED_OVER = (
    "position_ids",
    "sliding_window",
    "is_causal",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "cache_position",
)
"""Arguments that headway's attention does not need: the mask says what a token sees, and the cache
is not that of transformers. `_Recorder` checks `is_causal`.
"""
PLAIN_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers, in the words of transformers, that the attention interface alone computes."""
PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
"""Names in config.json for the experts that a token passes."""
ROUTER_LOGITS = "router_logits"
"""What transformers calls the logits of routers among the outputs that a class can record."""
HEAD_MODULE = HEAD.removesuffix(".weight")


@dataclass(frozen=True)
class BalanceFacts:
    """How a class balances its experts: `coefficient` times the loss of `tasks/balance.py` over
    all layers together, of the logits of its routers."""

    experts: ExpertsConfig
    routers: tuple[str, ...]
    """The modules that return them, in order."""
    index: int
    """Where in their outputs the logits are."""


@dataclass(frozen=True)
class StockFacts:
    """A class, as headway sees it."""

    class_name: str
    layers: str
    """The prefix of the layers' names: `model.layers.`"""
    trunk: str
    """The module that owns them, from the embedding to the final norm."""
    windows: tuple[int | None, ...]
    """The sliding window of each call of attention, in order: a layer may attend more than once."""
    layer_windows: Mapping[int, int | None]
    """The same by the number that a layer has."""
    num_heads: int
    kv_heads: int
    head_size: int
    """Width of the keys and values in a cache."""
    hidden_size: int
    """Width of what the head reads."""
    softcap: float | None
    """Soft cap of attention scores."""
    logit_scale: float
    logit_softcap: float | None
    head: str
    """The module that turns hidden states into logits."""
    head_bias: str | None
    """The parameter that is added to the logits."""
    tied: str | None
    """The parameter that is the head's matrix as well."""
    position_start: int
    """The first position, as the class counts them."""
    training_problem: str | None
    """Why it cannot be trained exactly, in one sentence, where it can be used."""
    is_random: bool
    """Layers draw random numbers while they train."""
    experts_per_token: int | None
    """Experts that a token passes in a mixture; None: not known, or there is none."""
    balance: BalanceFacts | None
    """The balance loss of a mixture of experts, where its config.json asks for one."""
    specs: tuple[ParamSpec, ...]
    linears: dict[str, tuple[int, int]]
    """Path -> (outputs, inputs) of every nn.Linear, a tied head left out."""


def facts_of(config: ModelConfig) -> StockFacts:
    """The facts of a wrapped model."""
    assert config.hf_config is not None
    return read_facts(config.hf_config, trust_remote_code=config.trust_remote_code)


def read_facts(hf_config: Mapping[str, Any], *, trust_remote_code: bool) -> StockFacts:
    """The facts of a config.json, found once for each."""
    return _facts(canonical(hf_config), trust_remote_code)


@lru_cache(maxsize=16)
def _facts(key: str, trust_remote_code: bool) -> StockFacts:
    # `key` is the config.json as text: a cache needs an argument with a hash.
    model = empty_model(json.loads(key), trust_remote_code=trust_remote_code)
    try:
        return _facts_of_class(model)
    except ConfigError as problem:
        raise ConfigError(
            f"{type(model).__name__} can be neither used nor trained: {problem} "
            "Take a model of a family that `headway list families` shows, or of another class."
        ) from None


def check_trainable(config: ModelConfig) -> None:
    """Refuse to train a wrapped class that can only be used."""
    facts = facts_of(config)
    if facts.training_problem is not None:
        raise ConfigError(
            f"{facts.class_name} can be used but not trained: {facts.training_problem}"
        )


def _facts_of_class(model: PreTrainedModel) -> StockFacts:
    _check_modules(model)
    recorder = _Recorder()
    hidden_size = _forward(model, recorder)
    training_problem = _training_problem(model, recorder)

    layers = _layers_of(model, recorder)
    trunk = layers.rstrip(".").rpartition(".")[0]
    head = _head_path(model)
    tied = _tied(model, head)
    scale, cap = _logits_of(model, model.get_submodule(trunk), hidden_size)

    # A tied head is left out: `named_parameters` lists a shared weight once, under the embedding's
    # name, so the name of a tied head's weight is not that of its module.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    linears = {
        path: (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and names.get(id(module.weight)) == f"{path}.weight"
        # A head inside of other modules is no place for an adapter: it is read, not called.
        and (path != head or path == HEAD_MODULE)
    }
    specs: list[ParamSpec] = []
    for name, value in model.named_parameters():
        is_linear = name.removesuffix(".weight") in linears
        stage = _stage(name, layers, is_table=value.dim() > 1 and not is_linear)
        spec = spec_by_name(name, tuple(value.shape), stage)
        if name == tied:
            spec = replace(spec, tied_to=f"{head}.weight")
        if not value.requires_grad:
            spec = replace(spec, groups=spec.groups | in_groups("fixed"))
        if value.dim() >= STACKED:
            spec = replace(spec, groups=spec.groups | in_groups("expert"))
        specs.append(spec)

    computed_values(model)  # refuses a class whose buffers cannot be computed

    bias = _head(model).bias
    calls = recorder.calls
    return StockFacts(
        class_name=type(model).__name__,
        layers=layers,
        trunk=trunk,
        windows=tuple(recorder.windows[layer_of(call.module)] for call in calls),
        layer_windows=recorder.windows,
        num_heads=calls[0].q.shape[2],
        kv_heads=max(call.k.shape[2] for call in calls),
        head_size=max(max(call.k.shape[3], call.v.shape[3]) for call in calls),
        hidden_size=hidden_size,
        softcap=calls[0].softcap,
        logit_scale=scale,
        logit_softcap=cap,
        head=head,
        head_bias=None if bias is None else names[id(bias)],
        tied=tied,
        position_start=_position_start(model),
        training_problem=training_problem,
        is_random=_draws(model) or _in_training(model)[1],
        experts_per_token=_experts_per_token(model),
        balance=_balance(model),
        specs=tuple(specs),
        linears=linears,
    )


def _training_problem(model: PreTrainedModel, recorder: _Recorder) -> str | None:
    """Why a class that can be used cannot be trained exactly; None: it can."""
    if getattr(model.config, "layerdrop", 0.0):
        return (
            f"layerdrop is {model.config.layerdrop}, and ranks would skip different layers. "
            "Set it to 0 in model.hf_config."
        )
    in_training = _in_training(model)[0]
    dropout = max(call.dropout for call in in_training.calls)
    if dropout:
        return (
            f"attention has dropout {dropout}, which headway's has not. "
            "Set it to 0 in model.hf_config."
        )
    if _wants_balance(model) and _balance(model) is None:
        return (
            "output_router_logits is true, and headway cannot compute its balance loss. "
            "Set it to false in model.hf_config to train without that loss."
        )
    return None


def _in_training(model: PreTrainedModel) -> tuple[_Recorder, bool]:
    """A forward in training mode, and whether it draws random numbers."""
    recorder = _Recorder()
    draws = _Draws()
    for module in model.modules():
        # Dropouts are slow to follow on the meta device; `_draws` finds them in the config.
        module.training = not isinstance(module, nn.Dropout)
    try:
        with draws:
            _forward(model, recorder)
    finally:
        model.eval()
    return recorder, draws.drew


class _Draws(TorchDispatchMode):
    """Sees whether any operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _experts_per_token(model: PreTrainedModel) -> int | None:
    """Experts that a token passes, by the names that configs have for it."""
    for key in PER_TOKEN:
        number = getattr(model.config, key, None)
        if isinstance(number, int):
            return number
    return None


def _wants_balance(model: PreTrainedModel) -> bool:
    """Whether the config asks for a balance loss."""
    weight = getattr(model.config, "router_aux_loss_coef", None)
    return bool(getattr(model.config, "output_router_logits", False)) and bool(weight)


def _balance(model: PreTrainedModel) -> BalanceFacts | None:
    """The balance loss that the config asks for; None where it asks for none, or headway cannot
    read the logits of routers."""
    from headway.model.experts_config import ExpertsConfig

    if not _wants_balance(model):
        return None
    recorded: Any = {}
    for module in model.modules():
        recorded = recorded or getattr(module, "_can_record_outputs", None) or {}
    recorder = recorded.get(ROUTER_LOGITS)
    router_class = getattr(recorder, "target_class", None)
    if router_class is None:
        return None
    routers = tuple(
        path for path, module in model.named_modules() if isinstance(module, router_class)
    )
    num = getattr(model, "num_experts", None)
    per_token = getattr(model, "num_experts_per_tok", None)
    if not routers or not isinstance(num, int) or not isinstance(per_token, int):
        return None
    experts = ExpertsConfig(
        num=num,
        per_token=per_token,
        aux_loss=float(model.config.router_aux_loss_coef),
        aux_layers="pooled",
        aux_scope="step",
    )
    return BalanceFacts(experts, routers, int(recorder.index))


def _position_start(model: PreTrainedModel) -> int:
    """The number of the first position. Classes with RoBERTa's embeddings count from behind the
    id of padding."""
    for module in model.modules():
        if getattr(type(module), "create_position_ids_from_input_ids", None) is not None:
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


def _check_modules(model: PreTrainedModel) -> None:
    """Refuse what mixes tokens outside attention, and state that is no parameter."""
    layer_types = getattr(model.config, "layer_types", None) or ()
    if getattr(model, "_is_stateful", False) or "linear_attention" in layer_types:
        raise ConfigError(
            "it keeps a recurrent state, which would run across the documents of a row."
        )
    for kind in layer_types:
        if kind not in PLAIN_LAYERS:
            raise ConfigError(f"it has layers of {str(kind)[:40]}, which headway does not compute.")
    # Documents share a row; only attention knows where one ends.
    for path, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.RNNBase)):
            raise ConfigError(
                f"{path} is a {type(module).__name__}, which would mix the documents of a row."
            )
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    persistent = set(model.state_dict()) - parameters
    if persistent:
        raise ConfigError(
            f"{min(persistent)} is state that is neither trained nor computed from the config."
        )
    _head_path(model)


def _head_path(model: PreTrainedModel) -> str:
    """The path of the linear that makes logits."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        for path, module in model.named_modules():
            if module is head:
                return path
    raise ConfigError("its head is not a linear.")


def _tied(model: PreTrainedModel, path: str) -> str | None:
    """The embedding's parameter if it is the head's too; other ways of sharing are refused."""
    head = _head(model)
    head_name = f"{path}.weight"
    shared = [name for name, value in model.named_parameters() if value is head.weight]
    if shared == [head_name]:
        return None
    embedding = model.get_input_embeddings()
    is_embedding = isinstance(embedding, nn.Embedding) and embedding.weight is head.weight
    if not is_embedding or len(shared) != 1:
        raise ConfigError(f"its head shares a matrix with {', '.join(shared)}.")
    others = {
        id(value)
        for name, value in model.named_parameters(remove_duplicate=False)
        if name not in (head_name, shared[0])
    }
    if id(head.weight) in others:
        raise ConfigError("more than an embedding and the head share a matrix.")
    return shared[0]


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "_check_modules has seen it"
    return head


class _Recorder:
    """A pass that computes nothing and records what each layer asks for; what headway's
    attention would not do is refused."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.windows: dict[int, int | None] = {}

    def attend(self, call: AttentionCall, mask: StockMask) -> Tensor:
        strange = sorted(set(call.others) - set(PASSED_OVER))
        if strange:
            raise ConfigError(
                f"{type(call.module).__name__} hands {strange[0]} to attention, which headway's does not know."
            )
        if call.others.get("is_causal") is False:
            raise ConfigError("its attention sees later tokens.")
        self.calls.append(call)
        layer = layer_of(call.module)
        window = window_of(mask.function)
        if self.windows.setdefault(layer, window) != window:
            raise ConfigError(f"layer {layer} attends with two windows.")
        return call.q.new_empty(*call.q.shape[:3], call.v.shape[-1])


@contextmanager
def _without_values(model: PreTrainedModel, recorder: _Recorder) -> Iterator[None]:
    """Let a class run where nothing has values.

    Stacked experts are computed by a product whose shapes do not depend on values. A module that
    asks for a value (which tokens an expert has) is passed over if it holds no attention: it gives
    back what it was given. Tables and tests see that such modules compute each token by itself.
    """
    usual = model.config._experts_implementation
    model.config._experts_implementation = EXPERTS_ON_META
    patched: list[nn.Module] = []

    def passed_over(module: nn.Module) -> None:
        forward = module.forward

        def tolerant(*arguments: Any, **options: Any) -> Any:
            calls = len(recorder.calls)
            try:
                return forward(*arguments, **options)
            except (NotImplementedError, RuntimeError) as error:
                asks_for_values = isinstance(error, NotImplementedError) or "meta tensor" in str(
                    error
                )
                if not asks_for_values or len(recorder.calls) != calls or not arguments:
                    raise
                return arguments[0]

        module.__dict__["forward"] = tolerant
        patched.append(module)

    for module in model.modules():
        # Code of a folder is followed in full, or refused.
        is_theirs = type(module).__module__.startswith("transformers.")
        if module is not model and is_theirs and not isinstance(module, nn.ModuleList):
            passed_over(module)
    try:
        yield
    finally:
        for module in patched:
            del module.__dict__["forward"]
        model.config._experts_implementation = usual


class _Reached(TorchDispatchMode):
    """Follows positions through a forward: every result of an operation that reads a marked tensor
    is marked.

    Marked tensors are kept, so that no other tensor gets the id of one.
    """

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.marked: dict[int, Tensor] = {id(start): start}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs, _ = tree_flatten((args, kwargs or {}))
        if any(isinstance(value, Tensor) and id(value) in self.marked for value in inputs):
            results, _ = tree_flatten(output)
            for result in results:
                if isinstance(result, Tensor):
                    self.marked[id(result)] = result
        return output


def _not_followed(part: str, error: BaseException) -> str:
    """Why a class cannot be traced; an error about our stand-in for its mask is put in terms of
    the class."""
    reason = first_line(error)[:300]
    if StockMask.__name__ in reason:
        return "it computes with its attention mask itself instead of handing it to the attention interface of transformers."
    if isinstance(error, NotImplementedError) or "meta tensor" in reason:
        return (
            f"its {part} depends on values of the text, so headway cannot see what it will compute."
        )
    return f"its {part} cannot be followed: {reason}."


def _forward(model: PreTrainedModel, recorder: _Recorder) -> int:
    """Run the class and check what it asked of attention; returns the width of the hidden states
    that its head reads."""
    position = torch.arange(TOKENS, device="meta").expand(2, -1)
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64, device="meta")
    visible = torch.ones(2, TOKENS, dtype=torch.bool, device="meta")
    try:
        with (
            torch.no_grad(),
            passing(recorder),
            _without_values(model, recorder),
            _Reached(position) as reached,
        ):
            model(input_ids=tokens, position_ids=position, attention_mask=visible, use_cache=False)
    except FOREIGN as error:
        raise ConfigError(_not_followed("forward", error)) from None

    num_layers = int(model.config.num_hidden_layers)
    if sorted(recorder.windows) != list(range(num_layers)):
        raise ConfigError(
            f"{len(recorder.windows)} of its {num_layers} layers use the attention interface of transformers."
        )
    _check_heads(recorder.calls)
    # One ModelConfig.sliding_window for all layers that have one.
    sizes = sorted({window for window in recorder.windows.values() if window is not None})
    if len(sizes) > 1:
        raise ConfigError(
            f"its layers have windows of several sizes ({', '.join(map(str, sizes))})."
        )
    # The recorder makes its result from q, so marks pass through attention, and the last layer
    # shows whether any layer has used positions.
    if id(recorder.calls[-1].q) not in reached.marked:
        raise ConfigError(
            "positions do not reach its attention, so documents of a row could not start anew."
        )
    return _head(model).in_features


def _check_heads(calls: list[AttentionCall]) -> None:
    """Refuse layers whose keys and values do not fit into one cache."""
    if len({call.softcap for call in calls}) > 1:
        raise ConfigError("its layers cap attention scores differently.")
    # A cache has the KV heads of the layer that has most; `LayerPass` repeats those of others.
    most = max(call.k.shape[2] for call in calls)
    for call in calls:
        heads = call.k.shape[2]
        if call.v.shape[2] != heads or most % heads or call.q.shape[2] % most:
            raise ConfigError(
                f"its layers have {heads} and {most} KV heads, which do not fit into one cache."
            )


def _layers_of(model: PreTrainedModel, recorder: _Recorder) -> str:
    """The prefix of the names of the layers: the list of modules whose members hold the
    attention calls in order."""
    calls = [call.module for call in recorder.calls]
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        owners = {id(part): index for index, layer in enumerate(module) for part in layer.modules()}
        order = [owners[id(call)] for call in calls if id(call) in owners]
        if len(order) < len(calls):
            continue
        # Every layer attends, once or more, before the next one does.
        if list(dict.fromkeys(order)) == list(range(len(module))) and order == sorted(order):
            return f"{path}."
    raise ConfigError("its layers are not one list of modules.")


def _stage(name: str, layers: str, *, is_table: bool) -> Stage:
    """The stage of a parameter: the number of its layer, `first` or `last`.

    Tables of embeddings come before the layers; final norms, projections and the head after them.
    """
    if name.startswith(layers):
        return int(name.removeprefix(layers).split(".")[0])
    if is_table:
        return "first"
    return "last"


def _draws(model: PreTrainedModel) -> bool:
    """Whether anything in the config is a dropout above 0."""
    dropouts = [value for key, value in model.config.to_dict().items() if "drop" in key]
    return any(isinstance(value, float) and value > 0 for value in dropouts)


def _logits_of(model: PreTrainedModel, trunk: nn.Module, width: int) -> tuple[float, float | None]:
    """(scale, softcap) of the logits: s and c in logits = c tanh(s W h / c).

    Found by what the class makes of real hidden states with a small head; if that is no such
    function, the class is refused.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    hidden = torch.randn(1, TOKENS, width, generator=generator, device="cpu")
    # Products of about 4: large enough for a soft cap to show.
    weight = torch.randn(8, width, generator=generator, device="cpu") * 4 / width**0.5
    products = F.linear(hidden, weight)
    logits = _through(model, trunk, hidden, _SmallHead(weight, hidden))

    cap: float | None = None
    setting = getattr(model.config, "final_logit_softcapping", None)
    if isinstance(setting, (int, float)) and setting > 0:
        cap = float(setting)
    uncapped = logits
    if cap is not None:
        uncapped = torch.atanh((logits / cap).clamp(-1 + 1e-7, 1 - 1e-7)) * cap
    # The scale by least squares; exactly 1 where only rounding differs.
    scale = float((uncapped * products).sum() / (products * products).sum())
    if abs(scale - 1.0) < 1e-4:
        scale = 1.0

    expected = products * scale
    if cap is not None:
        expected = torch.tanh(expected / cap) * cap
    is_same = logits.shape == expected.shape and torch.allclose(
        logits, expected, rtol=1e-4, atol=1e-4
    )
    if not is_same or scale <= 0:
        raise ConfigError(
            "its logits are not a product of hidden states and the head, scaled and soft-capped."
        )
    return scale, cap


class _SmallHead(nn.Module):
    """A head of a few tokens on the CPU."""

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        super().__init__()
        self.small = weight
        self.hidden = hidden

    def forward(self, hidden: Tensor) -> Tensor:
        """The products of what it is given. What a class makes of its trunk's output before its
        head has no values; `StockModel` takes it in front of the head, so any stands for it."""
        if hidden.device.type == "meta":
            hidden = self.hidden
        return F.linear(hidden, self.small)


def _through(model: PreTrainedModel, trunk: nn.Module, hidden: Tensor, small: _SmallHead) -> Tensor:
    """The logits of the class with another head, if its trunk returned `hidden`."""
    path = _head_path(model)

    def replace_output(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output

    # Both changes are undone, whatever happens: the model is used again.
    head = model.get_submodule(path)
    model.set_submodule(path, small)
    handle = None
    if path == HEAD_MODULE:
        handle = trunk.register_forward_hook(replace_output)
    try:
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
        visible = torch.ones(1, TOKENS, dtype=torch.bool, device="meta")
        position = torch.arange(TOKENS, device="meta")[None]
        recorder = _Recorder()
        with torch.no_grad(), passing(recorder), _without_values(model, recorder):
            output = model(
                input_ids=tokens, attention_mask=visible, position_ids=position, use_cache=False
            )
            return output.logits.float()
    except FOREIGN as error:
        raise ConfigError(_not_followed("logits", error)) from None
    finally:
        if handle is not None:
            handle.remove()
        model.set_submodule(path, head)
