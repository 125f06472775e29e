"""`headway generate`."""

from dataclasses import asdict
from pathlib import Path

import typer

from headway.cli import _masks
from headway.cli._output import JSON_FLAG, print_json
from headway.errors import ConfigError


def command(
    model: Path = typer.Option(..., help="A run folder, a checkpoint folder or a Hugging Face folder."),
    prompt: list[str] = typer.Option([], help="Text to continue; may be given several times."),
    prompts_file: Path | None = typer.Option(None, help="Prompts, one per line, or a .jsonl file with a key `prompt`."),
    max_new_tokens: int = typer.Option(128, help="Stop after this many tokens."),
    temperature: float = typer.Option(0.0, help="0 takes the likeliest token each time; above 0 samples."),
    top_k: int | None = typer.Option(None, help="Sample among this many likeliest tokens."),
    top_p: float | None = typer.Option(None, help="Sample among the fewest tokens that have this probability together."),
    stop: list[str] = typer.Option([], help="Stop before this text; may be given several times."),
    special: bool = typer.Option(
        False, "--special", help="Special tokens written in a prompt, <|im_start|> say, are those tokens, not text."
    ),
    chat_template: str | None = typer.Option(
        None, help="Prompts are questions to answer, in this template: a name, tokenizer (the model's own) or a .jinja file."
    ),
    seed: int = typer.Option(0, help="Seed of the sampling."),
    masks: str | None = _masks.MASKS,
    equal_per_layer: bool = _masks.EQUAL_PER_LAYER,
    stream_window: int | None = _masks.STREAM_WINDOW,
    stream_sinks: int | None = _masks.STREAM_SINKS,
    chunk_tokens: int = typer.Option(4096, help="Tokens of each prompt that go through the model at once."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    json: bool = JSON_FLAG,
) -> None:
    """Continue prompts, or answer questions, with a trained model."""
    from headway.infer.generate import Options, answer, generate, read_prompts
    from headway.infer.load import load_model
    from headway.infer.sampling import Sampling
    from headway.model.head_masks.choice import MaskChoice
    from headway.runtime.device import choose_compute

    choice = MaskChoice(masks, equal_per_layer, stream_window, stream_sinks)
    sampling = Sampling(temperature, top_k, top_p, seed)
    options = Options(max_new_tokens, tuple(stop), special=special, sampling=sampling, chunk_tokens=chunk_tokens)
    if chat_template is not None and special:
        raise ConfigError("--chat-template and --special are both given; the template writes the special tokens. Leave --special out.")
    prompts = [*prompt, *(read_prompts(prompts_file) if prompts_file is not None else [])]
    if not prompts:
        raise ConfigError("no prompt is given. Use --prompt TEXT or --prompts-file FILE.")
    if "" in prompts:
        raise ConfigError("a prompt is empty; there is nothing to go on from. Give some text.")
    compute = choose_compute(device, "auto")
    loaded = _masks.with_masks(load_model(model, device=compute.device, dtype=compute.dtype), choice)
    results = generate(loaded, prompts, options) if chat_template is None else answer(loaded, prompts, chat_template, options)
    if json:
        found = asdict(results[0]) if len(results) == 1 else {"generations": [asdict(result) for result in results]}
        print_json({**found, "masks": loaded.describe_masks()})
        return
    for one, result in zip(prompts, results, strict=True):
        typer.echo(one + result.text if chat_template is None else f"{one}\n{result.text}")
