"""`headway generate`."""

from dataclasses import asdict
from pathlib import Path

import typer

from headway.cli._options import CHAT_TEMPLATE, GROUP, JSON, MODEL, MaskOptions, with_masks
from headway.cli._output import print_json
from headway.errors import ConfigError


def generate(
    model: Path = MODEL,
    prompt: list[str] = typer.Option([], help="Text to continue; may be repeated."),
    prompts_file: Path | None = typer.Option(None, help="Prompts, one per line, or a .jsonl file with a key `prompt`."),
    max_new_tokens: int = typer.Option(128, help="Stop after this many tokens."),
    temperature: float = typer.Option(0.0, help="0 takes the most likely token each time; above 0 samples."),
    top_k: int | None = typer.Option(None, help="Sample from the k most likely tokens."),
    top_p: float | None = typer.Option(None, help="Sample from the smallest set of tokens with this total probability."),
    stop: list[str] = typer.Option([], help="Stop before this text; may be repeated."),
    special: bool = typer.Option(
        False, "--special", help="Read special tokens written in a prompt, such as <|im_start|>, as tokens, not as text."
    ),
    chat_template: str | None = CHAT_TEMPLATE,
    seed: int = typer.Option(0, help="Seed of the sampling."),
    masks: MaskOptions = GROUP,
    chunk_tokens: int = typer.Option(4096, help="Prefill chunk: tokens of each prompt that go through the model at once."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    json: bool = JSON,
) -> None:
    """Continue prompts, or answer questions, with a trained model."""
    from headway.infer.generate import GenerateOptions, answer, read_prompts
    from headway.infer.generate import generate as continue_prompts
    from headway.infer.load import load_model
    from headway.infer.sampling import Sampling
    from headway.runtime.device import choose_compute

    choice = masks.choice()
    sampling = Sampling(temperature, top_k, top_p, seed)
    options = GenerateOptions(max_new_tokens, tuple(stop), special=special, sampling=sampling, chunk_tokens=chunk_tokens)
    if chat_template is not None and special:
        raise ConfigError("--chat-template and --special are both given; the template writes the special tokens. Leave --special out.")
    prompts = [*prompt, *(read_prompts(prompts_file) if prompts_file is not None else [])]
    if not prompts:
        raise ConfigError("no prompt is given. Use --prompt TEXT or --prompts-file FILE.")
    if "" in prompts:
        raise ConfigError("a prompt is empty; there is nothing to continue. Give some text.")
    compute = choose_compute(device, "auto")
    loaded = with_masks(load_model(model, device=compute.device, dtype=compute.dtype), choice)
    results = continue_prompts(loaded, prompts, options) if chat_template is None else answer(loaded, prompts, chat_template, options)
    if json:
        found = asdict(results[0]) if len(results) == 1 else {"generations": [asdict(result) for result in results]}
        print_json({**found, "masks": loaded.describe_masks()})
        return
    for one, result in zip(prompts, results, strict=True):
        typer.echo(one + result.text if chat_template is None else f"{one}\n{result.text}")


VERBS = {"generate": generate}
