"""Models: `load_model`, `evaluate`, `export` and `tokenize` of the public API. Each loads torch only when it is called."""

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
"""A run folder, a checkpoint folder, a Hugging Face folder, `s3://...`, or the result of `train` or `export`."""

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
        if self.loaded.tokenizer is None:
            raise ConfigError(
                f"{self.path}: holds no tokenizer. Put tokenizer.json and tokenizer_config.json there."
            )
        return self.loaded.tokenizer

    @overload
    def generate(
        self, prompts: str, *, max_new_tokens: int = 128, temperature: float = 0.0, top_k: int | None = None,
        top_p: float | None = None, stop: Sequence[str] = (), seed: int = 0, on_text: OnText | None = None,
    ) -> Generation: ...  # fmt: skip
    @overload
    def generate(
        self, prompts: list[str] | tuple[str, ...], *, max_new_tokens: int = 128, temperature: float = 0.0, top_k: int | None = None,
        top_p: float | None = None, stop: Sequence[str] = (), seed: int = 0, on_text: OnText | None = None,
    ) -> list[Generation]: ...  # fmt: skip
    def generate(
        self, prompts: str | list[str] | tuple[str, ...], *, max_new_tokens: int = 128, temperature: float = 0.0, top_k: int | None = None,
        top_p: float | None = None, stop: Sequence[str] = (), seed: int = 0, on_text: OnText | None = None,
    ) -> Generation | list[Generation]:  # fmt: skip
        """Continue a prompt, or several at once. A `Generation` has `text`, `token_ids`, `stopped_by` and `prompt_tokens`.

        Temperature 0 takes the likeliest token each time. A continuation does not depend on the other prompts. `on_text` is called with
        each piece of text as soon as it is known; the prompts then follow one another.
        """
        from headway.infer.generate import generate

        options = _options(max_new_tokens, temperature, top_k, top_p, stop, seed)
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        if "" in given:
            raise ConfigError("a prompt is empty; there is nothing to continue. Give some text.")
        found = generate(self.loaded, given, options, _pieces(on_text))
        return found[0] if isinstance(prompts, str) else found

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, chat_template: str = "tokenizer", max_new_tokens: int = 256,
        temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None, stop: Sequence[str] = (), seed: int = 0,
        on_text: OnText | None = None,
    ) -> Generation:  # fmt: skip
        """The answer to a conversation of `{"role": ..., "content": ...}` turns, in the model's chat template or another one."""
        from headway.infer.generate import answer_conversations
        from headway.records.chat import Conversation
        from headway.tokenizer.chat_template import ROLES, Role, Turn

        turns: list[Turn] = []
        for number, message in enumerate(messages):
            if set(message) != {"role", "content"}:
                raise ConfigError(
                    f"messages[{number}] has the keys {', '.join(message) or 'none'}; a message has role and content."
                )
            if message["role"] not in ROLES:
                raise ConfigError(
                    f"messages[{number}] has the role {message['role']!r}; it must be one of {', '.join(ROLES)}."
                )
            turns.append(Turn(cast(Role, message["role"]), message["content"]))
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
    return None if on_text is None else lambda _, piece: on_text(piece)


def _options(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop: Sequence[str],
    seed: int,
) -> GenerateOptions:
    from headway.infer.generate import GenerateOptions
    from headway.infer.sampling import Sampling

    if isinstance(stop, str):
        raise ConfigError(f"stop is {stop!r}; give a list, e.g. [{stop!r}].")
    return GenerateOptions(
        max_new_tokens, tuple(stop), sampling=Sampling(temperature, top_k, top_p, seed)
    )


def load_model(
    where: Where, *, device: str = "auto", precision: str = "auto", masks: str | None = None
) -> LanguageModel:
    """Load a model to generate with: a run, a checkpoint, a Hugging Face folder, or what `train` and `export` returned.

    `device` is auto, cpu or cuda; `precision` auto, fp32 or bf16; `masks` own, none or a mask file (default: its own, if it has any).

    Example:
        >>> model = hw.load_model("runs/pretrain-laptop", device="cpu")
        >>> print(model.generate("Once upon a time", max_new_tokens=30).text)
    """
    from headway.infer.load import load_model as load
    from headway.model.head_masks.choice import MaskChoice
    from headway.runtime.device import choose_compute

    compute = choose_compute(device, precision)
    loaded = load(place_of(where), device=compute.device, dtype=compute.dtype)
    return LanguageModel(loaded.with_mask_choice(MaskChoice(masks)))


def evaluate(
    model: Where | LanguageModel, data: Data | Mapping[str, Data], *, window: int | None = None, stride: int | None = None,
    max_samples: int | None = None, text_key: str | None = None, device: str = "auto", precision: str = "auto",
) -> EvalResult:  # fmt: skip
    """Loss, perplexity, bits per byte and accuracy of a model on text or token stores.

    `data` is one dataset, or a mapping of names to datasets. Documents longer than `window` (default: the model's context) are read with
    a window that moves by `stride`.

    Example:
        >>> scores = hw.evaluate("runs/pretrain-laptop", {"wiki": "wiki.txt", "mine": [{"text": "Hello."}]})
        >>> scores.datasets["wiki"].perplexity
    """
    from headway.eval.dataset import Dataset, ReadOptions
    from headway.eval.evaluate import EvalPlan
    from headway.eval.evaluate import evaluate as measure

    named = cast(Mapping[str, Data], data) if isinstance(data, Mapping) else {_name(data): data}
    datasets = [Dataset(name, tuple(input_paths(one, name=name))) for name, one in named.items()]
    if not datasets:
        raise ConfigError("data is an empty mapping; give at least one dataset.")
    plan = EvalPlan(
        datasets, ReadOptions(text_key=text_key, max_samples=max_samples), window, stride
    )
    ready = (
        model
        if isinstance(model, LanguageModel)
        else load_model(model, device=device, precision=precision)
    )
    result = measure(ready.loaded, plan)
    return EvalResult(result.path, result.datasets)


def export(
    model: Where,
    out: str | Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    adapter_only: bool = False,
    remote_code: bool = False,
) -> ExportResult:
    """Write a Hugging Face folder: weights, config and tokenizer; an earlier export at `out` is replaced.

    `adapter_only` writes a PEFT adapter folder. `remote_code` adds a model class where transformers has none.

    Example:
        >>> hw.export("runs/sft-laptop", "my-model", dtype="bfloat16")
    """
    from headway.export.adapter import export_adapter
    from headway.export.huggingface import export_model
    from headway.runtime.storage import check_writable

    target = Path(out)
    if adapter_only and remote_code:
        raise ConfigError(
            "adapter_only and remote_code are both given; an adapter needs no model class. Leave one of them out."
        )
    check_writable(target.parent)
    if adapter_only:
        export_adapter(place_of(model), target, dtype=dtype)
    else:
        export_model(place_of(model), target, dtype=dtype, remote_code=remote_code)
    return ExportResult(target, dtype, adapter_only)


def tokenize(
    data: Data, tokenizer: str | Path, out: str | Path | None = None, *, kind: Kind | None = None, text_key: str | None = None,
    chat_template: str | None = None, max_length: int | None = None, valid_fraction: float = 0.0, cache_dir: str | Path | None = None,
) -> TokenizeResult:  # fmt: skip
    """Turn text, conversations or preference pairs into a token store: at `out`, or in the cache, where the same data is found again.

    Without `kind`, the keys of the records say what they are. The chat template is the tokenizer's own, or else chatml.

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

    cache = None if cache_dir is None else Path(cache_dir)
    inputs = input_paths(data, cache)
    given = {"kind": kind, "text_key": text_key, "chat_template": chat_template}
    source = validate(
        SourceConfig,
        {"path": inputs[0], **{name: value for name, value in given.items() if value is not None}},
    )
    found = with_kind(source, inputs[0], load_tokenizer(tokenizer))
    assert found.kind != "auto"
    records = record_kind(found.kind)
    if records.holds_media:
        raise ConfigError(
            f"kind is {found.kind!r}; records with media are read by training itself (docs/multimodal.md). Give them as data.train."
        )
    if records.is_text:
        if valid_fraction or max_length is not None:
            raise ConfigError(
                "valid_fraction and max_length apply to chat and preference data. Leave them out."
            )
        options = BuildOptions(found.kind, text_key=found.text_key)
    else:
        options = BuildOptions(
            found.kind,
            chat_template=found.chat_template,
            max_length=max_length,
            valid_fraction=valid_fraction,
        )
    options.check()
    if out is None and valid_fraction:
        raise ConfigError(
            f"valid_fraction is {valid_fraction}, which makes two stores; give the folder `out` they are written to."
        )
    if out is not None:
        report = build_store(inputs, tokenizer, out, options)
        return TokenizeResult(
            report.out, found.kind, report.train_documents + report.valid_documents, report.tokens
        )
    store = open_store(path := cached_store(inputs, tokenizer, cache, options))
    return TokenizeResult(path, found.kind, store.num_documents, store.num_tokens)


def place_of(where: Where) -> str | Path:
    """The folder a model is in."""
    return (
        where.run
        if isinstance(where, TrainResult)
        else where.path
        if isinstance(where, ExportResult)
        else where
    )


def _name(data: Any) -> str:
    return Path(data).name if isinstance(data, str | Path) else "data"
