"""The card of a model on the hub: a run folder comes in, the text of README.md goes out.

    ---                       what the hub reads: licence, base model, library, tags, data sets
    # NAME                    how it was trained, on which data, its metrics, its curve
    recipe                    the settings that decide the result

Invariant: a card names no folder, user or host of the machine that trained. Of a path only its last
name stays, and of the recipe only the sections in `SHOWN`: addresses of trackers, webhooks, hosts
and stores are in the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML

from headway.config.load import dump_yaml, read_plain
from headway.errors import ConfigError
from headway.runtime.json_file import read_object
from headway.text.hub import is_hub_id, split_revision
from headway.text.hub_upload import MARK
from headway.train.run_name import GIVEN, RECIPE

Form = Literal["model", "adapter", "gguf"]
CURVE = "training_curve.svg"
SHOWN = (
    "model",
    "init",
    "tokenizer",
    "multimodal",
    "data",
    "objective",
    "optim",
    "batch",
    "steps",
    "epochs",
    "freeze",
    "train",
    "adapter",
    "precision",
    "fp8",
    "loss_scale",
    "seed",
    "stages",
)
"""Sections of a recipe that decide what a model is, and hold no address."""
LIBRARIES: dict[Form, str] = {"model": "transformers", "adapter": "peft", "gguf": "gguf"}
RELATIONS: dict[Form, str] = {"model": "finetune", "adapter": "adapter", "gguf": "quantized"}
"""How the hub calls what a model is to its base."""


@dataclass(frozen=True)
class CardOptions:
    """What a card says beside the run."""

    repo_id: str
    form: Form
    source: str
    """What the model was made from, for the next push."""
    license: str | None = None
    file: str | None = None
    """The GGUF file."""


def write_card(run: Path, options: CardOptions) -> str:
    """The card of a run's model."""
    recipe = shown_recipe(run)
    summary = read_object(run / "summary.json", ConfigError)
    lines = ["---", _head(recipe, options), "---", "", f"# {options.repo_id.partition('/')[2]}", ""]
    usage = _usage(options, is_reward=_is_reward(recipe))
    lines += [_opening(recipe), "", *usage, "", "## Data", "", *_data(recipe, summary)]
    lines += ["", "## Metrics", "", *_metrics(summary)]
    if (run / CURVE).is_file():
        lines += ["", f"![Losses and learning rate over the steps]({CURVE})"]
    lines += ["", "## Recipe", "", "```yaml", dump_yaml(recipe).rstrip("\n"), "```"]
    lines += ["", *_machine(run), "", *_licence(recipe, options)]
    return "\n".join(lines).rstrip("\n") + "\n"


def shown_recipe(run: Path) -> dict[str, Any]:
    """The settings of a run that its card shows, as they were given, without paths."""
    # What a person wrote is shorter than the whole recipe, and says what mattered.
    path = run / GIVEN
    if not path.is_file():
        path = run / RECIPE
    return _without_paths(_chosen(read_plain(path, [])))


def _chosen(recipe: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: recipe[name] for name in SHOWN if recipe.get(name) not in (None, {}, [])}
    if "stages" in chosen:
        # A stage is a recipe with a name.
        chosen["stages"] = [
            {"name": stage.get("name"), **_chosen(stage)}
            for stage in chosen["stages"]
            if isinstance(stage, dict)
        ]
    return chosen


def _without_paths(value: Any) -> Any:
    """The same values; of a path or an address only the last name is left."""
    if isinstance(value, Mapping):
        return {str(key): _without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_paths(item) for item in value]
    if isinstance(value, str):
        return public_name(value)
    return value


def public_name(text: str) -> str:
    """A hub id as it is, and the last name of any other path."""
    # NAME/NAME may also be a folder of the machine; it holds no more than the two names.
    if is_hub_id(text):
        return text
    if "/" in text or "\\" in text:
        return text.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    return text


def base_model(recipe: Mapping[str, Any]) -> str | None:
    """The model of the hub that a run began with."""
    init = recipe.get("init")
    # The file as a person wrote it: any part may be missing or of another type.
    source = None
    if isinstance(init, Mapping):
        source = init.get("from")
    if isinstance(source, str) and is_hub_id(source):
        return split_revision(source)[0]
    return None


def _sources(recipe: Mapping[str, Any]) -> Iterator[str]:
    """The names of the training data, of every stage."""
    for part in (recipe, *recipe.get("stages", ())):
        data = part.get("data")
        if not isinstance(data, Mapping):
            continue
        # One path, or a list of paths and of sources with settings of their own.
        train = data.get("train")
        if isinstance(train, str):
            yield train
        if not isinstance(train, list):
            continue
        for source in train:
            name = source
            if isinstance(source, Mapping):
                name = source.get("path")
            if isinstance(name, str):
                yield name


def _head(recipe: Mapping[str, Any], options: CardOptions) -> str:
    """The part that the hub reads, as YAML."""
    content: dict[str, Any] = {}
    if options.license is not None:
        content["license"] = options.license
    base = base_model(recipe)
    if base is not None:
        content["base_model"] = base
        content["base_model_relation"] = RELATIONS[options.form]
    content["library_name"] = LIBRARIES[options.form]
    # A reward model writes no text.
    if not _is_reward(recipe):
        content["pipeline_tag"] = "text-generation"
    content["tags"] = ["headway", _objective(recipe)]
    datasets = sorted({split_revision(name)[0] for name in _sources(recipe) if is_hub_id(name)})
    if datasets:
        content["datasets"] = datasets
    content[MARK] = options.source

    out = StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(content, out)
    return out.getvalue().rstrip("\n")


def _objective(recipe: Mapping[str, Any]) -> str:
    """What it learned: the kind of the objective, of the last stage if there are several."""
    parts = [recipe, *recipe.get("stages", ())]
    for part in reversed(parts):
        objective = part.get("objective")
        if isinstance(objective, Mapping) and "kind" in objective:
            return str(objective["kind"])
    return "next_token"


def _is_reward(recipe: Mapping[str, Any]) -> bool:
    """Whether the model gives scores, not text.

    By the name of the objective: a recipe is plain data here, and no module that it names is
    imported.
    """
    return _objective(recipe) == "reward"


def _opening(recipe: Mapping[str, Any]) -> str:
    base = base_model(recipe)
    start = "Trained from scratch"
    if base is not None:
        start = f"Made from [{base}](https://huggingface.co/{base})"
    elif recipe.get("init", {}).get("from") is not None:
        start = f"Made from {recipe['init']['from']}"
    return f"{start} with headway (objective `{_objective(recipe)}`)."


def _usage(options: CardOptions, *, is_reward: bool) -> list[str]:
    name = options.repo_id
    if options.form == "adapter":
        code = [
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")',
        ]
        return ["```python", *code, "```"]
    if options.form == "gguf":
        return ["```sh", f"llama-cli -hf {name} --hf-file {options.file}", "```"]
    model_class = "AutoModelForCausalLM"
    verb = f"headway chat {name}"
    if is_reward:
        model_class = "AutoModelForSequenceClassification"
        verb = f"headway eval reward {name} --data FILE"
    code = [
        f"from transformers import {model_class}, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'model = {model_class}.from_pretrained("{name}")',
    ]
    return ["```python", *code, "```", "", f"Or: `{verb}`."]


def _data(recipe: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    lines = [f"- `{name}`" for name in dict.fromkeys(_sources(recipe))]
    tokens = summary.get("tokens")
    if isinstance(tokens, int):
        lines += ["", f"{tokens:,} tokens were read in {summary.get('steps', 0):,} steps."]
    return lines or ["Not stated."]


def _metrics(summary: Mapping[str, Any]) -> list[str]:
    """A table of the validation; of a run without one, the training loss."""
    rows: list[str] = []
    validation = summary.get("validation")
    if not isinstance(validation, Mapping):
        validation = {}
    for set_name, metrics in validation.items():
        for name, values in metrics.items():
            cells = [_number(values.get(key)) for key in ("before", "best", "last")]
            rows.append(f"| {set_name} | {name} | {' | '.join(cells)} |")
    if rows:
        return ["| held-out data | metric | before | best | last |", "|---|---|---|---|---|", *rows]
    first, last = (_number(summary.get(key)) for key in ("first_loss", "last_loss"))
    return [f"Training loss {first} → {last}. There was no validation."]


def _number(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"{value:.4g}"
    return "–"


def _machine(run: Path) -> list[str]:
    """What trained it: GPUs or CPU, torch and headway. Nothing that names the host."""
    path = run / "environment.json"
    if not path.is_file():
        return []
    environment = read_object(path, ConfigError)
    machine = environment.get("machine")
    if not isinstance(machine, Mapping):
        return []
    gpus = [str(gpu.get("name")) for gpu in machine.get("gpus") or [] if isinstance(gpu, Mapping)]
    device = str(machine.get("cpu") or "a CPU")
    if gpus:
        device = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return [
        f"Trained on {device} with headway {environment.get('headway')}, torch {machine.get('torch')}."
    ]


def _licence(recipe: Mapping[str, Any], options: CardOptions) -> list[str]:
    base = base_model(recipe)
    lines = ["## Licence", ""]
    if options.license is not None:
        lines.append(f"`{options.license}`.")
    else:
        lines.append("The author has not stated a licence.")
    if base is not None:
        lines.append(f"The licence of the base model {base} applies, too.")
    return lines
