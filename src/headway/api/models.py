"""Models: `load_model`, `evaluate`, `score`, `export` and `tokenize` of the public API.

Each loads torch only when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, overload

from headway.api.data import Data, Kind, input_paths
from headway.api.results import EvalResult, ExportResult, TokenizeResult, TrainResult
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.infer.generate import GenerateOptions, Generation
    from headway.infer.load import LoadedModel
    from headway.model.config import ModelConfig
    from headway.tokenizer.load import Tokenizer

Where: TypeAlias = "str | Path | TrainResult | ExportResult"
"""A run folder, a checkpoint folder, a Hugging Face folder, `s3://...`, or the result of `train` or
`export`.
"""

OnText: TypeAlias = Callable[[str], object]
"""Receives generated text piece by piece."""


@dataclass(frozen=True)
class LanguageModel:
    """A model that is ready to generate text.

    Example:
        >>> model = hw.load_model("runs/pretrain-laptop")
        >>> model.generate("def main(", max_new_tokens=20).text
        >>> model.generate(["one", "two"], temperature=0.8)
        >>> model.chat([{"role": "user", "content": "Hello!"}]).text
    """

    loaded: LoadedModel
    """The weights and what belongs to them, for code that needs more than this class offers."""

    @property
    def path(self) -> str:
        """Where the weights come from."""
        return str(self.loaded.path)

    @property
    def config(self) -> ModelConfig:
        """The model's family and shape."""
        return self.loaded.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.loaded.require_tokenizer()

    @overload
    def generate(
        self,
        prompts: str,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        on_text: OnText | None = None,
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompts: list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        on_text: OnText | None = None,
    ) -> list[Generation]: ...
    def generate(
        self,
        prompts: str | list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        on_text: OnText | None = None,
    ) -> Generation | list[Generation]:
        """Continue a prompt, or several at once. A `Generation` has `text`, `token_ids`,
        `stopped_by` and `prompt_tokens`.

        Temperature 0 takes the likeliest token each time. A continuation does not depend on the
        other prompts. `on_text` is called with each piece of text as soon as it is known; the
        prompts then follow one another.
        """
        from headway.infer.generate import generate

        options = _options(max_new_tokens, temperature, top_k, top_p, stop, seed)
        is_single = isinstance(prompts, str)
        texts = [prompts] if is_single else list(prompts)

        # A model needs a token to continue.
        if "" in texts:
            raise ConfigError("a prompt is empty; there is nothing to continue. Give some text.")

        generations = generate(self.loaded, texts, options, _pieces(on_text))
        if is_single:
            return generations[0]
        return generations

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        chat_template: str = "tokenizer",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        on_text: OnText | None = None,
    ) -> Generation:
        """The answer to a conversation of `{"role": ..., "content": ...}` turns, in the model's
        chat template or another one.
        """
        from headway.infer.generate import answer_conversations
        from headway.records.chat import Conversation
        from headway.tokenizer.chat_template import ROLES, Role, Turn

        turns: list[Turn] = []
        for number, message in enumerate(messages):
            # Other keys, such as calls of tools, would be lost without a word.
            if set(message) != {"role", "content"}:
                raise ConfigError(
                    f"messages[{number}] has the keys {', '.join(message) or 'none'}; a message "
                    "has role and content."
                )

            if message["role"] not in ROLES:
                raise ConfigError(
                    f"messages[{number}] has the role {message['role']!r}; it "
                    f"must be one of {', '.join(ROLES)}."
                )

            turns.append(Turn(cast(Role, message["role"]), message["content"]))

        # An answer follows a question; another turn of the assistant would not be one.
        if not turns or turns[-1].role == "assistant":
            raise ConfigError(
                "messages must end with a turn of the user or of a tool, which the model answers."
            )

        options = _options(max_new_tokens, temperature, top_k, top_p, stop, seed)
        return answer_conversations(
            self.loaded, [Conversation(tuple(turns))], chat_template, options, _pieces(on_text)
        )[0]


def _pieces(on_text: OnText | None) -> Callable[[int, str], object] | None:
    """The same callback for generation, which also passes the number of the prompt."""
    if on_text is None:
        return None
    return lambda _, piece: on_text(piece)


def _options(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop: Sequence[str],
    seed: int,
) -> GenerateOptions:
    """Options of generation, from the keywords that `generate` and `chat` share."""
    from headway.infer.generate import GenerateOptions
    from headway.infer.sampling import Sampling

    # A text is a sequence of texts, too: each of its letters would end the answer.
    if isinstance(stop, str):
        raise ConfigError(f"stop is {stop!r}; give a list, e.g. [{stop!r}].")
    return GenerateOptions(
        max_new_tokens, tuple(stop), sampling=Sampling(temperature, top_k, top_p, seed)
    )


def load_model(
    where: Where, *, device: str = "auto", precision: str = "auto", masks: str | None = None
) -> LanguageModel:
    """Load a model to generate with: a run, a checkpoint, a Hugging Face folder, or what `train`
    and `export` returned.

    `device` is auto, cpu or cuda; `precision` auto, fp32 or bf16; `masks` own, none or a mask file
    (default: its own, if it has any).

    Example:
        >>> model = hw.load_model("runs/pretrain-laptop", device="cpu")
        >>> print(model.generate("Once upon a time", max_new_tokens=30).text)
    """
    from headway.infer.load import load_model as load
    from headway.model.head_masks.choice import MaskChoice
    from headway.runtime.device import choose_compute

    compute = choose_compute(device, precision)
    loaded = load(model_path(where), device=compute.device, dtype=compute.dtype)
    return LanguageModel(loaded.with_mask_choice(MaskChoice(masks)))


def evaluate(
    model: Where | LanguageModel,
    data: Data | Mapping[str, Data],
    *,
    window: int | None = None,
    stride: int | None = None,
    max_samples: int | None = None,
    text_key: str | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> EvalResult:
    """Loss, perplexity, bits per byte and accuracy of a model on text or token stores.

    `data` is one dataset, or a mapping of names to datasets. Documents longer than `window`
    (default: the model's context) are read with a window that moves by `stride`.

    Example:
        >>> data = {"wiki": "wiki.txt", "mine": [{"text": "Hello."}]}
        >>> scores = hw.evaluate("runs/pretrain-laptop", data)
        >>> scores.datasets["wiki"].perplexity
    """
    from headway.eval.dataset import Dataset, ReadOptions
    from headway.eval.evaluate import EvalPlan
    from headway.eval.evaluate import evaluate as measure

    # A mapping names datasets; one record alone is a mapping, too, and must stand in a list.
    if isinstance(data, Mapping):
        datasets_by_name = cast(Mapping[str, Data], data)
    else:
        datasets_by_name = {_name(data): data}

    datasets = [
        Dataset(name, tuple(input_paths(content, name=name)))
        for name, content in datasets_by_name.items()
    ]
    if not datasets:
        raise ConfigError("data is an empty mapping; give at least one dataset.")

    plan = EvalPlan(
        datasets, ReadOptions(text_key=text_key, max_samples=max_samples), window, stride
    )
    if not isinstance(model, LanguageModel):
        model = load_model(model, device=device, precision=precision)
    result = measure(model.loaded, plan)
    return EvalResult(result.path, result.datasets)


def score(
    model: Where,
    data: Data,
    *,
    chat_template: str | None = None,
    max_length: int | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> list[dict[str, Any]]:
    """Every record of some data with its scores by a reward model, in order.

    Pairs get `reward_chosen` and `reward_rejected`, conversations `reward`, a prompt with
    `generations` gets `rewards` and `best`.

    Example:
        >>> scored = hw.score("runs/reward-laptop", [{"prompt": "1+1?", "response": "2"}])
        >>> good = [record for record in scored if record["reward"] > 0]
    """
    from headway.eval.reward import evaluate_reward
    from headway.eval.reward_data import RewardSource
    from headway.infer.load import load_model as load
    from headway.runtime.device import choose_compute

    paths = input_paths(data)
    if len(paths) != 1:
        raise ConfigError(
            f"data is {len(paths)} paths; give one file, folder or store, or records."
        )

    compute = choose_compute(device, precision)
    loaded = load(model_path(model), device=compute.device, dtype=compute.dtype, scores=True)
    source = RewardSource(paths[0], chat_template, max_length=max_length)
    scored: list[dict[str, Any]] = []
    evaluate_reward(loaded, source, keep=scored.append)
    return scored


def export(
    model: Where,
    out: str | Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    adapter_only: bool = False,
    remote_code: bool = False,
) -> ExportResult:
    """Write a Hugging Face folder: weights, config and tokenizer.

    An earlier export at `out` is replaced.

    `adapter_only` writes a PEFT adapter folder. `remote_code` adds a model class where transformers
    has none.

    Example:
        >>> hw.export("runs/sft-laptop", "my-model", dtype="bfloat16")
    """
    from headway.export.adapter import export_adapter
    from headway.export.huggingface import export_model
    from headway.runtime.storage import check_writable

    target = Path(out)
    if adapter_only and remote_code:
        raise ConfigError(
            "adapter_only and remote_code are both given; an adapter needs "
            "no model class. Leave one of them out."
        )

    # Before a large model is read.
    check_writable(target.parent)
    if adapter_only:
        export_adapter(model_path(model), target, dtype=dtype)
    else:
        export_model(model_path(model), target, dtype=dtype, remote_code=remote_code)

    return ExportResult(target, dtype, adapter_only)


def tokenize(
    data: Data,
    tokenizer: str | Path,
    out: str | Path | None = None,
    *,
    kind: Kind | None = None,
    text_key: str | None = None,
    chat_template: str | None = None,
    max_length: int | None = None,
    valid_fraction: float = 0.0,
    cache_dir: str | Path | None = None,
) -> TokenizeResult:
    """Turn text, conversations or preference pairs into a token store: at `out`, or in the cache,
    where the same data is found again.

    Without `kind`, the keys of the records say what they are. The chat template is the tokenizer's
    own, or else chatml.

    Example:
        >>> store = hw.tokenize([{"text": "Hello."}, {"text": "World."}], "tokenizers/mine")
        >>> hw.train(recipe, data=store.path)
    """
    from headway.config.load import validate
    from headway.data.config import SourceConfig
    from headway.prepare.build import BuildOptions, build_store, cached_store
    from headway.prepare.detect import with_kind
    from headway.records.base import record_kind
    from headway.store.reader import open_store
    from headway.tokenizer.load import load_tokenizer

    cache = None
    if cache_dir is not None:
        cache = Path(cache_dir)

    # As a source of a recipe, so that the same rules and messages apply.
    inputs = input_paths(data, cache)
    settings = {
        "path": inputs[0],
        "kind": kind,
        "text_key": text_key,
        "chat_template": chat_template,
    }
    source = validate(
        SourceConfig, {name: value for name, value in settings.items() if value is not None}
    )
    # Several inputs are of one kind: the records of the first one tell which.
    detected = with_kind(source, inputs[0], load_tokenizer(tokenizer))
    # It has looked at the first records, or failed.
    assert detected.kind != "auto"
    records = record_kind(detected.kind)
    if records.holds_media:
        raise ConfigError(
            f"kind is {detected.kind!r}; records with media are read by training itself "
            "(docs/multimodal.md). Give them as data.train."
        )

    if records.is_text:
        if valid_fraction or max_length is not None:
            raise ConfigError(
                "valid_fraction and max_length apply to chat and preference data. Leave them out."
            )
        options = BuildOptions(detected.kind, text_key=detected.text_key)
    else:
        options = BuildOptions(
            detected.kind,
            chat_template=detected.chat_template,
            max_length=max_length,
            valid_fraction=valid_fraction,
        )

    options.check()
    if out is None and valid_fraction:
        raise ConfigError(
            f"valid_fraction is {valid_fraction}, which makes two stores; give the folder `out` "
            "they are written to."
        )

    if out is not None:
        report = build_store(inputs, tokenizer, out, options)
        num_documents = report.train_documents + report.valid_documents
        return TokenizeResult(report.out, detected.kind, num_documents, report.tokens)

    path = cached_store(inputs, tokenizer, cache, options)
    store = open_store(path)
    return TokenizeResult(path, detected.kind, store.num_documents, store.num_tokens)


def model_path(where: Where) -> str | Path:
    """The folder a model is in."""
    # The run, not its `final`: a run that was stopped has checkpoints alone.
    if isinstance(where, TrainResult):
        return where.run
    if isinstance(where, ExportResult):
        return where.path
    return where


def _name(data: Any) -> str:
    """The name of a dataset that was given without one."""
    if isinstance(data, str | Path):
        return Path(data).name
    return "data"
