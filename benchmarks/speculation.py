"""Speculative decoding beside single steps: steps, seconds and accepted guesses, one request at a time.

    PYTHONPATH=src python3 benchmarks/speculation.py --model MODEL [--draft MODEL] [--device cuda] [--new-tokens 256]

Two prompts: a table to continue, which repeats itself, and a question in the model's chat template. Every variant must give the same
tokens.
"""

import argparse
import json
import time

import torch

from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest, Speculation
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.tokenizer.chat import Turn, render_prompt

REPEATING = "".join(
    f"| item {number} | price {number * 3} | in stock | ships in two days |\n"
    for number in range(12)
)
QUESTION = "Write a short story about a lighthouse keeper who finds a letter in a bottle."


def run(
    loaded: LoadedModel,
    prompt: tuple[int, ...],
    count: int,
    sampling: Sampling,
    speculation: Speculation | None,
) -> dict:
    options = EngineOptions(
        max_running=1,
        max_context=len(prompt) + count + 8,
        prefix_reuse=False,
        speculation=speculation,
    )
    engine = InferenceEngine(loaded, options)
    request = EngineRequest(prompt, count, sampling, key="0", ignore_eos=True)
    best, tokens = float("inf"), list[int]()
    for attempt in range(3):
        tokens = []
        engine.submit(request)
        started = time.monotonic()
        while engine.busy:
            for event in engine.step():
                tokens += event.tokens
        if loaded.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - started
        best = min(best, seconds) if attempt else best  # the first one warms up
    stats = engine.stats()
    return {
        "new_tokens": len(tokens), "steps": stats.steps // 3, "seconds": round(best, 4), "tokens": tokens,
        "proposed": stats.proposed_tokens // 3, "accepted": stats.accepted_tokens // 3,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=256)
    asked = parser.parse_args()
    loaded = load_model(asked.model, device=asked.device)
    assert loaded.tokenizer is not None
    variants: dict[str, Speculation | None] = {
        "single steps": None,
        "ngram 4": Speculation(None, 4),
        "ngram 8": Speculation(None, 8),
    }
    if asked.draft:
        variants |= {f"draft {count}": Speculation(asked.draft, count) for count in (2, 4)}
    for text, content in (("repeating", REPEATING), ("question", QUESTION)):
        if text == "question" and loaded.tokenizer.chat_template is not None:
            prompt = tuple(render_prompt([Turn("user", content)], "tokenizer", loaded.tokenizer))
        else:
            prompt = tuple(loaded.tokenizer.encode(content))
        for temperature in (0.0, 0.8):
            plain: dict = {}
            for name, speculation in variants.items():
                found = run(
                    loaded, prompt, asked.new_tokens, Sampling(temperature, seed=1), speculation
                )
                plain = plain or found
                line = {
                    "text": text,
                    "temperature": temperature,
                    "variant": name,
                    "same": found["tokens"] == plain["tokens"],
                }
                line |= {key: value for key, value in found.items() if key != "tokens"}
                print(
                    json.dumps({**line, "speedup": round(plain["seconds"] / found["seconds"], 2)}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
