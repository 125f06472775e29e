"""Random requests with every feature, random schedules in little memory, and a plain loop that says what each request must become.

    plain loop    one request, no batch, no engine: every token after a forward over all tokens before it, with `choose_alone`
    schedule      an engine with a few pages and slots; requests are submitted, cancelled and preempted at random moments

A difference is a text, a reason, a log-probability or an embedding that is not the plain loop's, or memory that was not given back.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.memory import build_cache
from headway.infer.engine.part import ModelPart, build_part
from headway.infer.engine.request import (
    EngineEvent,
    EngineOptions,
    EngineRequest,
    PromptMedia,
    Speculation,
)
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.kernels.exact_attention import KEYS
from headway.model.base import Model, build_frozen_model
from headway.model.config import ModelConfig
from headway.model.exact_config import why_not_exact
from headway.model.head_masks.masks import HeadMasks
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.media_shape import MediaInput, MediaShape
from headway.model.moe import MixtureOfExperts
from headway.model.projector import MediaTensors
from headway.model.vision import PictureTensors
from headway.parallel.collectives import RankGroup
from headway.store.media_items import MediaItem
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.dense_head_masks import masked_forward
from support.peft_folder import merged_updates, write_adapter
from support.plain_sampler import choose_alone

MEDIA = MediaShape((MediaInput("image", 6, 3), MediaInput("audio", 4, 2)), hidden=8)
CONTEXT = 96
MODEL = CONFIG.with_(max_seq_len=CONTEXT, media=MEDIA)
HYBRID = MODEL.with_(
    norm="rmsnorm1p",
    qk_norm=True,
    attention_gate=True,
    linear_attention={
        "key_heads": 2,
        "value_heads": 4,
        "key_head_dim": 6,
        "value_head_dim": 5,
        "layers": (0,),
    },
)
"""The same with a layer of linear attention: its state cannot go back, and it has no masks."""
CONVOLUTION = MODEL.with_(qk_norm=True, short_convolution={"taps": 4, "bias": True, "layers": (0,)})
"""The same with a layer of a short convolution."""
MIXTURE = CONFIG.with_(max_seq_len=CONTEXT, experts={"num": 6, "per_token": 2})
"""Experts, whose routes requests may ask for."""
STATE_SPACE = MODEL.with_(
    state_space={"heads": 4, "head_dim": 5, "state_size": 6, "groups": 2, "layers": (0,)}
)
"""The same with a state-space layer."""
MASKS = {
    "dense": None,
    "masks": HeadMasks(((True, False), (False, False)), window=6, sinks=2),
    "nothing full": HeadMasks(((False, False), (False, False)), window=10, sinks=3),
}
FORBIDDEN_STEPS = 4000
"""A schedule of a dozen small requests never takes so many rounds."""
TIE = 2e-3
"""Scores or draws that are this close may be ordered differently by a sum in another order."""


class TokenRule:
    """A constraint without a library: at each step about a third of the tokens, chosen by a seed; complete after some of them.

    "7 5": seed 7, five tokens. "7 5 mask 2": raises when the mask of the third token is asked for; likewise accept, empty; "make": at once.
    """

    def __init__(self, text: str) -> None:
        seed, length, *fault = text.split()
        self.seed = int(seed)
        self.length = int(length)
        self.fault = fault[0] if fault else ""
        self.fault_step = int(fault[1]) if len(fault) > 1 else -1
        self.step = 0
        if self.fault == "make":
            raise ValueError("the rule cannot be made")

    def allowed(self) -> list[int]:
        if self.fault == "empty" and self.step == self.fault_step:
            return []
        rng = random.Random(self.seed * 1000 + self.step)
        return [token for token in range(256) if rng.random() < 0.3]

    def fill_mask(self, mask: np.ndarray) -> None:
        if self.fault == "mask" and self.step == self.fault_step:
            raise RuntimeError("no mask")
        bits = mask.view(np.uint32)
        for token in self.allowed():
            bits[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> None:
        if self.fault == "accept" and self.step == self.fault_step:
            raise KeyError("not this token")
        assert token in self.allowed()
        self.step += 1

    @property
    def is_finished(self) -> bool:
        return self.step >= self.length


class Exploding(Sampling):
    """A sampling that raises inside the sampler, once it is armed."""

    def __getattribute__(self, name: str) -> object:
        if name == "min_p" and "armed" in object.__getattribute__(self, "__dict__"):
            raise ZeroDivisionError("no choice")
        return object.__getattribute__(self, name)

    @staticmethod
    def armed_now() -> "Exploding":
        sampling = Exploding(0.7)
        object.__setattr__(sampling, "armed", True)
        return sampling


@dataclass
class PlainAnswer:
    """What a request must become."""

    tokens: list[int] = field(default_factory=list)
    finished: str = ""
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    drawn: list[dict[int, float]] = field(default_factory=list)
    """By step: the log-probability of each token that could be drawn."""
    routes: torch.Tensor | None = None
    """[tokens - 1, layers, k]"""
    embedding: torch.Tensor | None = None
    near: dict[int, set[int]] = field(default_factory=dict)
    """By step: other tokens that a sum in another order might have given."""


class FuzzModels:
    """A tiny model with media inputs and adapters, under several head masks; and a draft model.

    `group`: ranks that share its layers, which have no adapters and no draft model.
    """

    def __init__(
        self, folder: Path, config: ModelConfig = MODEL, group: RankGroup | None = None
    ) -> None:
        self.config = config
        self.group = group
        self.is_hybrid = config.has_states
        self.takes_pictures = config.vision is not None
        self.kinds: tuple[str, ...] = tuple(MASKS)
        if self.is_hybrid or self.takes_pictures or config.experts is not None:
            self.kinds = ("dense",)
        self.weights = self.read_weights()
        self.tokenizer = byte_tokenizer()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.draft: Path | None = None
        self.adapters: dict[str, Path] = {}
        if group is None:
            self.draft = write_model(folder, CONFIG.with_(max_seq_len=CONTEXT, num_layers=1))
            # Softmax attention is not in all layers of a hybrid; experts are no plain linears.
            queries = () if self.is_hybrid else ("self_attn.q_proj",)
            values = () if self.is_hybrid else ("self_attn.v_proj",)
            down = () if config.experts is not None else ("mlp.down_proj",)
            up = () if config.experts is not None else ("mlp.up_proj",)
            self.adapters = {
                "one": write_adapter(folder / "one", folder, 1, 4, (*queries, *down)),
                "two": write_adapter(folder / "two", folder, 2, 2, (*values, *up, *down)),
            }
        self.base = self.whole()
        self._merged = {
            name: self.whole(merged_updates(path)) for name, path in self.adapters.items()
        }

    def read_weights(self) -> dict[str, torch.Tensor]:
        """The weights of the model."""
        return {spec.name: initial_value(spec, self.config, 4) for spec in param_specs(self.config)}

    def load(self) -> LoadedModel:
        """The model for an engine, whose adapters change the model that they are given."""
        if self.group is None:
            return self.whole()
        model = build_part(
            self.config, self.weights.items(), torch.device("cpu"), torch.float32, self.group
        )
        return self._loaded(model, ModelPart(self.group))

    def whole(self, updates: dict[str, torch.Tensor] | None = None) -> LoadedModel:
        """The whole model, with something added to its weights."""
        added = updates or {}
        weights = [
            (name, value + added[name] if name in added else value)
            for name, value in self.weights.items()
        ]
        model = build_frozen_model(self.config, weights, torch.device("cpu"), torch.float32)
        return self._loaded(model, None)

    def _loaded(self, model: Model, part: ModelPart | None) -> LoadedModel:
        end = self.tokenizer.eos_id
        assert end is not None
        return LoadedModel(
            model, self.config, self.tokenizer, self.folder, frozenset([end]), part=part
        )

    def of(self, request: EngineRequest, kind: str) -> LoadedModel:
        """The model that a request asks, with its adapter merged."""
        loaded = self.base if request.adapter is None else self._merged[request.adapter]
        return loaded.with_masks(MASKS[kind])


class PictureModels(FuzzModels):
    """The same for a model with its own vision tower, of the folder `stored`; what the tower gives
    is drawn at random."""

    def __init__(self, folder: Path, stored: Path) -> None:
        self._stored = load_model(stored)
        super().__init__(folder, self._stored.config)

    def read_weights(self) -> dict[str, torch.Tensor]:
        return dict(self._stored.model.named_parameters())


def pictures_of(request: EngineRequest, length: int) -> PictureTensors:
    """The pictures of a prompt, and the position of every token, counted one after the other."""
    media = request.media
    items = () if media is None else media.items
    begins = {item.offset: item.content_hash for item in items}
    positions: list[tuple[int, int, int]] = []
    slots: list[int] = []
    rows_of_features: list[np.ndarray] = []
    following = 0
    while len(positions) < length:
        name = begins.get(len(positions))
        if name is None or media is None:
            positions.append((following, following, following))
            slots.append(-1)
            following += 1
            continue
        rows, columns = media.grids[name]
        first = sum(map(len, rows_of_features))
        for cell in range(rows * columns):
            positions.append((following, following + cell // columns, following + cell % columns))
            slots.append(first + cell)
        rows_of_features.append(media.features[name])
        following += max(rows, columns)
    position = torch.tensor([positions], dtype=torch.int32)
    if not rows_of_features:
        return PictureTensors(position)
    features = torch.from_numpy(np.concatenate(rows_of_features))
    return PictureTensors(position, torch.tensor([slots]), features=features)


def media_of(
    loaded: LoadedModel, request: EngineRequest, length: int
) -> MediaTensors | PictureTensors | None:
    """The media of a prompt for a forward over `length` tokens."""
    if loaded.config.vision is not None:
        return pictures_of(request, length)
    media = request.media
    if media is None:
        return None
    slot = torch.full((1, length), -1, dtype=torch.int32)
    features: dict[str, torch.Tensor] = {}
    present: dict[str, torch.Tensor] = {}
    first = 0
    for kind in MEDIA.inputs:
        items = [item for item in media.items if item.modality == kind.modality]
        rows = torch.zeros(1, max(1, len(items)), kind.vectors, kind.width)
        known = torch.zeros(1, max(1, len(items)), dtype=torch.bool)
        for number, item in enumerate(items):
            begin = first + number * kind.tokens
            slot[0, item.offset : item.offset + kind.tokens] = torch.arange(
                begin, begin + kind.tokens, dtype=torch.int32
            )
            if item.content_hash is not None and item.content_hash in media.features:
                rows[0, number] = torch.from_numpy(media.features[item.content_hash])
                known[0, number] = True
        features[kind.modality] = rows
        present[kind.modality] = known
        first += max(1, len(items)) * kind.tokens
    return MediaTensors(slot, features, present)


@torch.inference_mode()
def plain_answer(loaded: LoadedModel, request: EngineRequest) -> PlainAnswer:
    """One request alone, every token after a forward over all tokens before it."""
    answer = PlainAnswer()
    prompt = list(request.prompt)
    tokens = list(prompt)

    def hidden_of(some: list[int]) -> torch.Tensor:
        media = media_of(loaded, request, len(some))
        return masked_forward(loaded.model, torch.tensor([some]), loaded.masks, media)[0]

    def scores_of(hidden: torch.Tensor) -> torch.Tensor:
        scores = loaded.model.logits(hidden).float()
        scores[:, loaded.tokenizer.vocab_size :] = -torch.inf  # pyright: ignore[reportOptionalMemberAccess]
        return scores

    hidden = hidden_of(tokens)
    if request.embed:
        answer.embedding = hidden.mean(0)
        answer.finished = "length"
        return answer
    if request.prompt_logprobs:
        known = scores_of(hidden[:-1]).log_softmax(-1)
        answer.prompt_logprobs = [
            float(known[index, token]) for index, token in enumerate(prompt[1:])
        ]
    if request.max_new_tokens == 0:
        answer.finished = "length"
        return answer
    try:
        rule = None if request.constraint is None else TokenRule(request.constraint)
    except ValueError:
        answer.finished = "error"
        return answer
    most = min(request.max_new_tokens, loaded.config.max_seq_len - len(prompt))
    while not answer.finished:
        raw = scores_of(hidden[-1:])[0]
        scores = raw.clone()
        sampling = request.sampling
        for token in set(tokens):
            if sampling.repetition_penalty != 1.0:
                scores[token] = (
                    scores[token] / sampling.repetition_penalty
                    if scores[token] > 0
                    else scores[token] * sampling.repetition_penalty
                )
        for token, count in Counter(tokens[len(prompt) :]).items():
            scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
        for token, bias in sampling.logit_bias:
            scores[token] += bias
        if rule is not None:
            if rule.fault in ("mask", "empty") and rule.step == rule.fault_step:
                answer.finished = "error"
                break
            hidden_tokens = torch.ones(len(scores), dtype=torch.bool)
            hidden_tokens[rule.allowed()] = False
            scores[hidden_tokens] = -torch.inf
        if isinstance(sampling, Exploding):
            answer.finished = "error"
            break
        draw = sampling.draw(request.key, len(tokens))
        token = int(choose_alone(scores[None], sampling, [draw])[0])
        answer.near[len(answer.tokens)] = near_tokens(scores, sampling, draw, token)
        if request.drawn_logprobs:
            answer.drawn.append(drawn_logprobs(scores, sampling))
        if rule is not None and rule.fault == "accept" and rule.step == rule.fault_step:
            answer.finished = "error"
            break
        tokens.append(token)
        answer.tokens.append(token)
        if request.logprobs is not None:
            known = raw.log_softmax(-1)
            answer.logprobs.append(float(known[token]))
            answer.tops.append(known.topk(request.logprobs).values.tolist())
        is_end = token in loaded.end_ids and not (request.ignore_eos and rule is None)
        if rule is not None and not is_end:
            rule.accept(token)
        if is_end:
            answer.finished = "eos"
        elif token in request.stop_ids:
            answer.finished = "stop"
        elif rule is not None and rule.is_finished:
            answer.finished = "grammar"
        elif len(answer.tokens) == most:
            answer.finished = "length" if most == request.max_new_tokens else "context"
        else:
            hidden = hidden_of(tokens)
    if request.routes and answer.finished != "error":
        answer.routes = routes_of(loaded, lambda: hidden_of(tokens[:-1]))
    return answer


def routes_of(loaded: LoadedModel, forward: Callable[[], object]) -> torch.Tensor:
    """[tokens, layers, k]: the experts of a forward over one sequence."""
    layers: list[torch.Tensor] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(module, MixtureOfExperts)
        layers.append(module.chosen(inputs[0])[1][0])

    hooks = [
        module.register_forward_pre_hook(note)
        for module in loaded.model.modules()
        if isinstance(module, MixtureOfExperts)
    ]
    forward()
    for hook in hooks:
        hook.remove()
    return torch.stack(layers, dim=1)


def drawn_logprobs(scores: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """The log-probability of each token that can be drawn: by the rules one after the other."""
    probabilities = (scores.double() / sampling.temperature).softmax(-1)
    order = sorted(range(len(scores)), key=lambda token: (-float(probabilities[token]), token))
    kept: list[int] = []
    sum_before = 0.0
    for rank, token in enumerate(order):
        probability = float(probabilities[token])
        too_late = sampling.top_p is not None and sum_before >= sampling.top_p
        too_low = sampling.top_k is not None and rank >= sampling.top_k
        floor = (sampling.min_p or 0.0) * float(probabilities[order[0]])
        if not (too_late or too_low or probability < floor or probability == 0):
            kept.append(token)
        sum_before += probability
    total = sum(float(probabilities[token]) for token in kept)
    return {token: math.log(float(probabilities[token]) / total) for token in kept}


def near_tokens(scores: torch.Tensor, sampling: Sampling, draw: float, token: int) -> set[int]:
    """Tokens that stand so close to the chosen one that rounding decides."""
    if sampling.temperature == 0:
        close = (scores - scores[token]).abs() < TIE
        return set(close.nonzero()[:, 0].tolist()) - {token}
    others = {
        int(choose_alone(scores[None], sampling, [min(max(draw + step, 0.0), 1 - 2**-53)])[0])
        for step in (-TIE, TIE)
    }
    return others - {token}


def random_media(rng: random.Random, prompt: list[int]) -> PromptMedia | None:
    """Pictures and sounds at the beginning of a prompt, some of them absent; the tokens below them are the same in every prompt."""
    items: list[MediaItem] = []
    features: dict[str, np.ndarray] = {}
    offset = 1
    for kind in rng.sample(MEDIA.inputs, rng.choice([1, 1, 2])):
        name: str | None = f"{kind.modality}-{rng.randrange(3)}"
        if offset + kind.tokens > len(prompt):
            break
        prompt[offset : offset + kind.tokens] = [0] * kind.tokens
        if rng.random() < 0.2:
            name = None
        elif rng.random() < 0.9:
            noise = np.random.default_rng(sum(name.encode()))
            features[name] = noise.normal(size=(kind.vectors, kind.width)).astype(np.float32) * 2
        items.append(MediaItem(offset, kind.modality, name))
        offset += kind.tokens
    return PromptMedia(tuple(items), features) if items else None


def random_pictures(rng: random.Random, prompt: list[int], width: int) -> PromptMedia:
    """One or two pictures of different shapes in a prompt; the same name is the same picture."""
    items: list[MediaItem] = []
    features: dict[str, np.ndarray] = {}
    grids: dict[str, tuple[int, int]] = {}
    for _ in range(rng.choice([1, 1, 2])):
        number = rng.randrange(4)
        name = f"picture-{number}"
        grids[name] = ((2, 3), (4, 1), (1, 5), (3, 3))[number]
        rows, columns = grids[name]
        noise = np.random.default_rng(number)
        features[name] = noise.normal(size=(rows * columns, width)).astype(np.float32)
        items.append(MediaItem(len(prompt), "image", name))
        prompt += [0] * (rows * columns) + [rng.randrange(256)]
    return PromptMedia(tuple(items), features, grids)


def random_sampling(rng: random.Random) -> Sampling:
    """Greedy or drawn, with and without penalties and biases."""
    numbers: dict[str, object] = {}
    if rng.random() < 0.6:
        numbers["temperature"] = rng.choice([0.5, 0.9, 1.3])
        numbers["seed"] = rng.randrange(4)
        if rng.random() < 0.4:
            numbers["top_k"] = rng.choice([3, 20])
        if rng.random() < 0.4:
            numbers["top_p"] = rng.choice([0.5, 0.9])
        if rng.random() < 0.2:
            numbers["min_p"] = 0.05
    if rng.random() < 0.4:
        numbers["repetition_penalty"] = rng.choice([1.0, 1.3, 2.0])
        numbers["presence_penalty"] = rng.choice([0.0, 1.5])
        numbers["frequency_penalty"] = rng.choice([0.0, 0.8])
    if rng.random() < 0.3:
        # Few tokens, so that texts repeat themselves: speculation guesses right, and penalties decide.
        numbers["logit_bias"] = tuple((token, 12.0) for token in (64, 65, 66))
    if rng.random() < 0.02:
        return Exploding.armed_now()
    return Sampling(**numbers)  # pyright: ignore[reportArgumentType]


def random_request(
    rng: random.Random, number: int, begins: Sequence[list[int]], models: FuzzModels
) -> EngineRequest:
    """A request with a random set of features."""
    prompt = rng.choice(begins) + [rng.randrange(256) for _ in range(rng.choice([1, 2, 5, 8, 13]))]
    media = None
    if models.takes_pictures:
        if rng.random() < 0.6:
            media = random_pictures(rng, prompt, models.config.hidden_size)
    elif rng.random() < 0.3 and models.config.media is not None:
        media = random_media(rng, prompt)
    adapter = rng.choice([None, None, "one", "two"])
    if not models.adapters:
        adapter = None
    if rng.random() < 0.15:
        return EngineRequest(tuple(prompt), 1, adapter=adapter, media=media, embed=True)
    sampling = random_sampling(rng)
    constraint = None
    if rng.random() < 0.25:
        constraint = f"{rng.randrange(9)} {rng.choice([2, 5, 40])}"
        if rng.random() < 0.3:
            constraint += rng.choice([" make", " mask 1", " accept 1", " empty 2", " mask 0"])
    prompt_logprobs = rng.random() < 0.2
    logprobs = None
    if prompt_logprobs or rng.random() < 0.2:
        logprobs = rng.choice([0, 1, 4])
    can_be_drawn = sampling.temperature > 0 and not sampling.changes_scores and constraint is None
    is_drawn = can_be_drawn and not isinstance(sampling, Exploding) and rng.random() < 0.5
    if is_drawn:
        logprobs = 0
    return EngineRequest(
        tuple(prompt),
        rng.choice([1, 3, 8, 14, 60]) if not prompt_logprobs or rng.random() < 0.7 else 0,
        sampling,
        key=str(number),
        stop_ids=frozenset(rng.sample(range(256), 30)) if rng.random() < 0.2 else frozenset(),
        ignore_eos=rng.random() < 0.3,
        adapter=adapter,
        logprobs=logprobs,
        drawn_logprobs=is_drawn,
        routes=models.config.experts is not None and rng.random() < 0.5,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        media=media,
    )


def features_of(request: EngineRequest) -> list[str]:
    """What a request uses, in words."""
    sampling = request.sampling
    used = {
        "sampled": sampling.temperature > 0,
        "penalties": sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0,
        "logit_bias": bool(sampling.logit_bias),
        "failing sampler": isinstance(sampling, Exploding),
        "logprobs": request.logprobs is not None,
        "prompt logprobs": request.prompt_logprobs,
        "drawn logprobs": request.drawn_logprobs,
        "kept ids": request.drawn_logprobs
        and (sampling.top_k, sampling.top_p, sampling.min_p) != (None, None, None),
        "routes": request.routes,
        "grammar": request.constraint is not None,
        "failing grammar": request.constraint is not None and len(request.constraint.split()) > 2,
        "media": request.media is not None,
        "pictures of a tower": request.media is not None and bool(request.media.grids),
        "adapter": request.adapter is not None,
        "embedding": request.embed,
        "stop": bool(request.stop_ids),
        "ignore_eos": request.ignore_eos,
    }
    return [name for name, is_used in used.items() if is_used]


class RequestPool:
    """Requests of one seed, and what each must become under each of the masks; computed when it is first asked for."""

    def __init__(self, models: FuzzModels, seed: int, size: int) -> None:
        rng = random.Random(seed)
        begins = [
            [],
            [0] * 5 + [rng.randrange(256) for _ in range(6)],
            [rng.randrange(256) for _ in range(33)],
        ]
        self.models = models
        self.requests = [random_request(rng, number, begins, models) for number in range(size)]
        # Rare in the draws, and to be in every pool.
        self.requests[0] = EngineRequest(
            (5, 6, 7), 6, Exploding.armed_now(), key="fails", ignore_eos=True
        )
        adapter = "one" if models.adapters else None
        self.requests[1] = EngineRequest(tuple(begins[2]), 1, adapter=adapter, embed=True)
        self.requests[2] = EngineRequest((8, 9), 5, key="fails too", constraint="7 5 mask 1")
        # The samples of one prompt, as `n` makes them.
        for _ in range(size // 6):
            like = rng.choice(self.requests)
            self.requests.append(replace(like, key=like.key + "n"))
        self._answers: dict[tuple[int, str], PlainAnswer] = {}

    def answer(self, index: int, kind: str) -> PlainAnswer:
        """The plain loop's."""
        if (index, kind) not in self._answers:
            request = self.requests[index]
            self._answers[index, kind] = plain_answer(self.models.of(request, kind), request)
        return self._answers[index, kind]


@dataclass
class FuzzReport:
    """What some schedules covered and found."""

    schedules: int = 0
    requests: int = 0
    compared: int = 0
    cancelled: int = 0
    preempted: int = 0
    preempted_reading: int = 0
    ties: int = 0
    cached_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    features: Counter[str] = field(default_factory=Counter)
    settings: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For a person."""
        return [
            f"schedules {self.schedules}, requests {self.requests}, compared to their end {self.compared}, cancelled {self.cancelled}",
            f"preempted {self.preempted}, of them while the prompt was read {self.preempted_reading}",
            f"tokens from kept pages {self.cached_tokens}, guessed {self.proposed_tokens}, right {self.accepted_tokens}",
            "features: "
            + ", ".join(f"{name} {count}" for name, count in sorted(self.features.items())),
            "engines: "
            + ", ".join(f"{name} {count}" for name, count in sorted(self.settings.items())),
            f"differences {len(self.differences)}, near ties {self.ties}",
            *self.differences[:20],
        ]


def random_options(
    rng: random.Random,
    models: FuzzModels,
    kind: str,
    report: FuzzReport,
    *,
    has_adapters: bool,
) -> EngineOptions:
    """Little memory, small pieces, any combination of what an engine can do."""
    page_tokens = rng.choice([4, 8])
    running = rng.choice([2, 3, 5])
    guesses = Speculation(None, rng.choice([2, 4]))
    drafts = guesses
    if models.draft is not None:
        drafts = Speculation(str(models.draft), 3)
    speculation = rng.choice([None, None, guesses, drafts])
    if models.is_hybrid or models.takes_pictures or models.config.experts is not None:
        speculation = None
    is_exact = (
        speculation is None
        and kind == "dense"
        and not why_not_exact(models.config, CONTEXT)
        and models.group is None
        and not has_adapters
        and rng.random() < 0.7
    )
    if is_exact:
        page_tokens = KEYS
    options = EngineOptions(
        max_running=running,
        page_tokens=page_tokens,
        prefill_tokens=rng.choice([3, 7, 16, 64]),
        lag=rng.random() < 0.5,
        prefix_reuse=rng.random() < 0.7,
        speculation=speculation,
        exact=is_exact,
        routes=models.config.experts is not None,
    )
    spare = 0 if speculation is None else page_tokens + speculation.tokens
    shape = build_cache(models.base.with_masks(MASKS[kind]), options, CONTEXT, spare).shape
    longest = -(-CONTEXT // page_tokens)
    pages = longest + rng.choice([0, 1, 3, longest])
    slots = running + (max(4, running // 2) if options.prefix_reuse else 0)
    budget = shape.idle_bytes + slots * shape.state_bytes + pages * shape.page_bytes
    draft = "none"
    if speculation is not None:
        draft = "ngram" if speculation.draft is None else "draft"
        # A draft model has a share of the budget.
        budget = int(budget * 1.8) if speculation.draft is not None else budget
    report.settings[f"masks {kind}"] += 1
    report.settings[f"speculation {draft}"] += 1
    report.settings["lag" if options.lag and speculation is None else "no lag"] += 1
    report.settings["exact" if is_exact else "not exact"] += 1
    report.settings["prefix reuse" if options.prefix_reuse else "no prefix reuse"] += 1
    return replace(options, cache_bytes=budget)


def compare(
    request: EngineRequest,
    answer: PlainAnswer,
    events: Sequence[EngineEvent],
    report: FuzzReport,
    *,
    was_cancelled: bool,
) -> str:
    """What differs from the plain loop; empty where nothing does."""
    tokens = [token for event in events for token in event.tokens]
    for step, token in enumerate(tokens):
        expected = None
        if step < len(answer.tokens):
            expected = answer.tokens[step]
        if token == expected:
            continue
        if token in answer.near.get(step, ()):
            # From here on another text follows.
            report.ties += 1
            return ""
        return f"token {step} is {token}, not {expected}"
    difference = prompt_logprobs_difference(request, answer, events)
    if not difference:
        difference = logprobs_difference(request, answer, events, tokens)
    if difference:
        return difference
    if was_cancelled and (not events or events[-1].finished == "cancelled"):
        report.cancelled += 1
        return ""
    report.compared += 1
    return end_difference(request, answer, events, tokens)


def largest_gap(values: Sequence[float], expected: Sequence[float]) -> float:
    gaps = [abs(value - other) for value, other in zip(values, expected, strict=True)]
    return max(gaps, default=0.0)


def prompt_logprobs_difference(
    request: EngineRequest, answer: PlainAnswer, events: Sequence[EngineEvent]
) -> str:
    if not request.prompt_logprobs or not events or events[0].finished in ("cancelled", "error"):
        return ""
    reported = events[0].prompt_logprobs
    if reported is None:
        return f"no log-probabilities of {len(request.prompt)} prompt tokens"
    if len(reported) != len(request.prompt):
        return f"{len(reported)} log-probabilities of {len(request.prompt)} prompt tokens"
    # The first token of a prompt has none.
    known = [logprob for logprob in reported if logprob is not None]
    if [logprob.token for logprob in known] != list(request.prompt[1:]):
        return "log-probabilities of other prompt tokens"
    if largest_gap([logprob.logprob for logprob in known], answer.prompt_logprobs) > TIE:
        return "log-probabilities of the prompt"
    return ""


def logprobs_difference(
    request: EngineRequest,
    answer: PlainAnswer,
    events: Sequence[EngineEvent],
    tokens: list[int],
) -> str:
    if request.logprobs is None:
        return ""
    if request.drawn_logprobs:
        return drawn_difference(request, answer, events, tokens)
    scored = [logprob for event in events for logprob in event.logprobs or ()]
    if [logprob.token for logprob in scored] != tokens:
        return "log-probabilities of other tokens"
    for logprob, value, top in zip(scored, answer.logprobs, answer.tops, strict=False):
        if abs(logprob.logprob - value) > TIE or len(logprob.top) != len(top):
            return f"a log-probability is {logprob.logprob}, not {value}"
        if largest_gap([candidate[1] for candidate in logprob.top], top) > TIE:
            return "log-probabilities of the likeliest tokens"
    return ""


def drawn_difference(
    request: EngineRequest,
    answer: PlainAnswer,
    events: Sequence[EngineEvent],
    tokens: list[int],
) -> str:
    """What differs in the distributions that tokens were drawn from."""
    scored = [logprob for event in events for logprob in event.logprobs or ()]
    if [logprob.token for logprob in scored] != tokens:
        return "log-probabilities of other tokens"
    sampling = request.sampling
    has_rules = (sampling.top_k, sampling.top_p, sampling.min_p) != (None, None, None)
    for step, (logprob, drawn) in enumerate(zip(scored, answer.drawn, strict=False)):
        if has_rules and logprob.kept is None:
            return f"step {step} has no ids that could be drawn"
        kept = set(drawn) if logprob.kept is None else set(logprob.kept.tolist())
        if logprob.kept is not None and logprob.kept.tolist() != sorted(kept):
            return f"the ids of step {step} are not in order"
        # One that stands on the edge may be kept or not; the others' shares hardly change.
        if len(kept ^ set(drawn)) > 1:
            return f"step {step} could draw {sorted(kept ^ set(drawn))} or not"
        if kept == set(drawn) and abs(logprob.logprob - drawn[logprob.token]) > TIE:
            return f"a drawn log-probability is {logprob.logprob}, not {drawn[logprob.token]}"
    return ""


def end_difference(
    request: EngineRequest,
    answer: PlainAnswer,
    events: Sequence[EngineEvent],
    tokens: list[int],
) -> str:
    if not events:
        return f"no event, not {answer.finished}"
    last = events[-1]
    if last.finished != answer.finished:
        return f"ended with {last.finished} ({last.error}), not {answer.finished}"
    if tokens != answer.tokens:
        return f"{len(tokens)} tokens, not {len(answer.tokens)}"
    if (last.error is None) != (answer.finished != "error"):
        return f"the error is {last.error}"
    if request.embed:
        assert answer.embedding is not None
        if last.embedding is None:
            return "no embedding"
        if (torch.tensor(last.embedding) - answer.embedding).abs().max() > 1e-3:
            return "the embedding"
    if request.routes and answer.routes is not None:
        if last.routes is None:
            return "no routes"
        if not torch.equal(torch.from_numpy(last.routes).long(), answer.routes):
            return "the routes"
    if events[0].cached_tokens >= len(request.prompt):
        return f"{events[0].cached_tokens} of {len(request.prompt)} prompt tokens were cached"
    return ""


def run_schedule(
    seed: int,
    models: FuzzModels,
    pool: RequestPool,
    report: FuzzReport,
    kinds: Sequence[str] | None = None,
) -> None:
    """One engine, some requests of the pool in a random schedule; what differs goes into the report."""
    rng = random.Random(seed)
    kind = rng.choice(kinds or models.kinds)
    # An engine without adapters takes the other requests, and can be exact.
    has_adapters = bool(models.adapters) and rng.random() < 0.7
    engine = InferenceEngine(
        models.load().with_masks(MASKS[kind]),
        random_options(rng, models, kind, report, has_adapters=has_adapters),
        models.adapters if has_adapters else {},
        constraints=TokenRule,
    )
    taken = [
        index
        for index, request in enumerate(pool.requests)
        if has_adapters or request.adapter is None
    ]
    left = rng.sample(taken, min(len(taken), rng.choice([5, 9, 14])))
    index_of: dict[int, int] = {}
    events: dict[int, list[EngineEvent]] = {}
    cancelled: set[int] = set()
    pressure = rng.choice([0.0, 0.05, 0.3])

    def fault(message: str) -> None:
        report.differences.append(f"schedule {seed} ({kind}, {engine.options}): {message}")

    rounds = 0
    while left or engine.busy:
        for _ in range(rng.randrange(3)):
            if left:
                index = left.pop()
                number = engine.submit(pool.requests[index])
                index_of[number] = index
                events[number] = []
        if index_of and rng.random() < 0.04:
            victim = rng.choice(list(index_of))
            cancelled.add(victim)
            engine.cancel(victim)
        if rng.random() < pressure:
            report.preempted_reading += preempt(engine, rng)
        for event in engine.step():
            events[event.request].append(event)
        if engine.stats().cache_bytes_used > (engine.options.cache_bytes or 0):
            fault("more memory than its budget")
        rounds += 1
        if rounds > FORBIDDEN_STEPS:
            fault("it does not come to an end")
            return
    stats = engine.stats()
    report.schedules += 1
    report.requests += len(index_of)
    report.preempted += stats.preempted
    report.cached_tokens += stats.cached_tokens
    report.proposed_tokens += stats.proposed_tokens
    report.accepted_tokens += stats.accepted_tokens
    for number, index in index_of.items():
        request = pool.requests[index]
        report.features.update(features_of(request))
        report.features["n"] += request.key.endswith("n")
        problem = compare(
            request,
            pool.answer(index, kind),
            events[number],
            report,
            was_cancelled=number in cancelled,
        )
        if problem:
            fault(f"request {index} ({', '.join(features_of(request))}): {problem}")
    engine.cache.forget_all()
    if (
        engine.cache.pool.num_available != engine.cache.pool.num_pages
        or stats.running
        or stats.waiting
    ):
        fault("pages or slots were not given back")


def preempt(engine: InferenceEngine, rng: random.Random) -> int:
    """Preempt a random running request, as a lack of pages does it to the youngest; 1 where its prompt was being read."""
    engine._read_pending()  # pyright: ignore[reportPrivateUsage]
    running = engine._running  # pyright: ignore[reportPrivateUsage]
    if not running:
        return 0
    victim = rng.choice(running)
    was_reading = 0 < victim.computed < victim.target
    engine._preempt(victim)  # pyright: ignore[reportPrivateUsage]
    return int(was_reading)


def fuzz(
    models: FuzzModels,
    seeds: Sequence[int],
    pool_size: int,
    schedules_of_pool: int,
    say: Callable[[str], object] = print,
) -> FuzzReport:
    """Several schedules, those of one pool after another."""
    report = FuzzReport()
    for first in range(0, len(seeds), schedules_of_pool):
        pool = RequestPool(models, seeds[first], pool_size)
        for seed in seeds[first : first + schedules_of_pool]:
            before = len(report.differences)
            run_schedule(seed, models, pool, report)
            for line in report.differences[before:]:
                say(line)
    return report
