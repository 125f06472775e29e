"""Reinforcement learning on one GPU: samples/s of `headway train` with the objective grpo, beside TRL's GRPOTrainer.

    PYTHONPATH=src python3 benchmarks/grpo.py --packages FOLDER --out grpo.jsonl      all cases; FOLDER holds trl and what it imports
    PYTHONPATH=src python3 benchmarks/grpo.py --case engine --case headway            headway alone
    PYTHONPATH=src python3 benchmarks/grpo.py --shape tiny --device cpu               whether it runs at all, in a minute or two

The job: random weights in the shape of llama-1b; a step samples 8 answers of 512 tokens to each of 64 prompts of 128 tokens at temperature
1, scores them with a reward that counts vowels, and makes one update from all of them. Weights and AdamW's state are fp32, the computation
is bf16. Prompts and tokenizer are made here and are the same in all cases.

    engine      headway's engine alone on the answers of a step, submitted as a rollout submits them; the second batch is timed
    headway     `headway train` in a process of its own; figures from its metrics.jsonl
    trl         GRPOTrainer, which generates with transformers; checkpointed blocks, its default
    trl-bf16    the same with weights and AdamW's state in bf16
    trl-paged   `trl` with transformers' continuous batching, which converts the weights to bf16 in the first step

Every case is a process of its own and prints one JSON line; a last line compares them. Rates are from the median step after the first. A
case that would start after --seconds is left out and named; a case that runs out of time stops early and reports the steps it has.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import signal
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

LR = 1e-6
CLOSING_SECONDS = 8.0
"""What a case may take to end after its time is up."""
CASES = ("engine", "headway", "trl", "trl-bf16", "trl-paged")
PEERS = CASES[2:]
END = "<|end|>"
REWARD = '''"""The share of vowels in an answer."""


def reward(prompt, answer, record):
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))
'''
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A prompt is its text alone, so that all cases read the same tokens."""


@dataclass(frozen=True)
class Shape:
    """A model and how much it samples."""

    model: tuple[str, ...]
    vocab: int
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    row_tokens: int
    """headway packs several answers into a row."""
    micro_rows: int
    peer_rows: int
    """Answers of a microbatch of TRL, which pads each to the longest."""
    precision: str

    @property
    def answers(self) -> int:
        """Of one step."""
        return self.prompts * self.samples


SHAPES = {
    "1b": Shape(
        model=("model.preset=llama-1b",),
        vocab=128256,
        prompts=64,
        samples=8,
        prompt_tokens=128,
        new_tokens=512,
        row_tokens=2560,
        micro_rows=4,
        peer_rows=64,
        precision="bf16",
    ),
    "tiny": Shape(
        model=(
            "model.hidden_size=64",
            "model.num_layers=2",
            "model.num_heads=4",
            "model.num_kv_heads=2",
            "model.ffn_size=96",
            "model.max_seq_len=64",
        ),
        vocab=512,
        prompts=4,
        samples=4,
        prompt_tokens=16,
        new_tokens=16,
        row_tokens=64,
        micro_rows=2,
        peer_rows=8,
        precision="fp32",
    ),
}


# ---- what all cases read: prompts, tokenizer, reward


def prompt_texts(shape: Shape, count: int) -> list[str]:
    """Random letters, each of which is one token."""
    rng = random.Random(0)
    return [
        "".join(rng.choices(string.ascii_lowercase, k=shape.prompt_tokens)) for _ in range(count)
    ]


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer with a token for every byte and one that ends an answer; the other ids, which only a model draws, are groups of
    letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    groups = (
        "".join(letters)
        for length in range(2, 6)
        for letters in product(string.ascii_lowercase, repeat=length)
    )
    tokens = [*alphabet, *islice(groups, vocab - len(alphabet) - 1)]
    ids = {token: index for index, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])

    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def vowel_rewards(completions: Sequence[str], **_: Any) -> list[float]:
    """The reward as TRL calls it."""
    namespace: dict[str, Any] = {}
    exec(REWARD, namespace)
    return [namespace["reward"](None, completion, None) for completion in completions]


# ---- what the lines have in common


def figures(
    shape: Shape,
    prompts: int,
    steps: Sequence[float],
    generation: Sequence[float],
    tokens: Sequence[int],
) -> dict[str, Any]:
    """Rates of the median step after the first; of the first, where there is no other.

    `generation`: seconds of each step; `tokens`: how many were generated in it.
    """
    first = 1 if len(steps) > 1 else 0
    answers = prompts * shape.samples
    step = statistics.median(steps[first:])
    generated = statistics.median(generation[first:])
    rate = statistics.median(
        count / seconds for count, seconds in zip(tokens[first:], generation[first:], strict=True)
    )
    line = {
        "samples_s": round(answers / step, 2),
        "step_s": round(step, 2),
        "generation_s": round(generated, 2),
        "generation_share": round(generated / step, 3),
        "generation_tok_s": round(rate),
        "prompts": prompts,
        "samples": shape.samples,
        "prompt_tokens": shape.prompt_tokens,
        "answer_tokens": round(sum(tokens[first:]) / (answers * len(tokens[first:])), 1),
        "steps_timed": len(steps) - first,
        "first_step_s": round(steps[0], 1),
    }
    if first == 0:
        line["note"] = "no time for a second step: these are the figures of the first"
    return line


def gib(size: float) -> float:
    """Bytes in GiB."""
    return round(size / 2**30, 2)


# ---- headway


def common_settings(shape: Shape, device: str) -> list[str]:
    """Model and precision."""
    return [
        *shape.model,
        f"model.vocab_size={shape.vocab}",
        f"precision={shape.precision}",
        f"device={device}",
    ]


def run_headway(options: argparse.Namespace) -> dict[str, Any]:
    """`headway train`, and the figures it recorded."""
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer", shape.vocab)
        (folder / "vowels.py").write_text(REWARD)
        texts = prompt_texts(shape, shape.prompts * (options.steps + 1))
        (folder / "prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
        )
        source = f"{{path: {folder}/prompts.jsonl, kind: prompt}}"
        settings = [
            *common_settings(shape, options.device),
            f"run.dir={folder}/runs",
            "run.name=grpo",
            f"tokenizer={folder}/tokenizer",
            f"data.train=[{source}]",
            f"data.seq_len={shape.row_tokens}",
            f"data.cache_dir={folder}/cache",
            "objective.kind=grpo",
            f"rollout.prompts={shape.prompts}",
            f"rollout.samples={shape.samples}",
            f"rollout.max_new_tokens={shape.new_tokens}",
            f"rollout.at_once={shape.answers}",
            f"reward={folder}/vowels.py",
            f"optim.lr={LR}",
            f"batch.micro_rows={shape.micro_rows}",
            f"steps={options.steps}",
            "log.every=1",
            "eval.every=null",
            "checkpoint.every=null",
            "checkpoint.at_end=false",
        ]
        began = time.monotonic()
        stopped = False
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "headway", "train", *settings],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(options.limit)
            except subprocess.TimeoutExpired:
                # Its finished steps count.
                stopped = True
                process.kill()
                process.wait()
            log.seek(0)
            problem = log.read()[-1500:]
        seconds = time.monotonic() - began
        metrics = folder / "runs" / "grpo" / "metrics.jsonl"
        records = []
        if metrics.exists():
            # A run that was stopped may have left half a line.
            whole = metrics.read_text().rpartition("\n")[0]
            records = [json.loads(line) for line in whole.splitlines()]
    if not records or (process.returncode and not stopped):
        return {"result": "failed", "why": problem}

    refreshes = [record["rollout/refresh_seconds"] for record in records]
    # The rollout of the first step makes the sampler; later ones begin with the hand-over.
    generation = [
        record["rollout/seconds"] - refresh
        for record, refresh in zip(records, refreshes, strict=True)
    ]
    steps = [record["time"]["step_seconds"] for record in records]
    rewarding = [record["rollout/reward_seconds"] for record in records]
    tokens = [round(record["answer/tokens"] * shape.answers) for record in records]
    return figures(shape, shape.prompts, steps, generation, tokens) | {
        "hand_over_s": round(statistics.median(refreshes[1:] or refreshes), 3),
        "reward_s": round(statistics.median(rewarding), 2),
        "peak_gib": gib(max(record["time"]["memory_bytes"] or 0 for record in records)),
        "reward": round(records[-1]["reward"], 4),
        "start_s": None if stopped else round(seconds - sum(steps), 1),
    }


def run_engine(options: argparse.Namespace) -> dict[str, Any]:
    """The engine alone, with the options that a rollout gives it."""
    import torch

    from headway.config.load import load
    from headway.infer.engine.engine import InferenceEngine
    from headway.infer.engine.request import EngineOptions, EngineRequest
    from headway.infer.load import LoadedModel
    from headway.infer.sampling import Sampling
    from headway.model.transformer import Transformer
    from headway.runtime.device import choose_compute
    from headway.tokenizer.load import load_tokenizer
    from headway.train.config import Recipe

    shape = SHAPES[options.shape]
    recipe = load(Recipe, None, common_settings(shape, options.device), lambda _: None)
    compute = choose_compute(recipe.device, recipe.precision, 0)
    on_gpu = compute.device.type == "cuda"
    with torch.device("meta"):
        model = Transformer(recipe.model)
    model = model.to(compute.dtype).to_empty(device=compute.device).requires_grad_(False).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder) / "tokenizer", shape.vocab)
        tokenizer = load_tokenizer(Path(folder) / "tokenizer")
    assert tokenizer.eos_id is not None
    loaded = LoadedModel(model, recipe.model, tokenizer, Path(), frozenset({tokenizer.eos_id}))
    settings = EngineOptions(
        max_running=shape.answers,
        max_waiting=1 << 30,
        max_context=shape.prompt_tokens + shape.new_tokens,
        compile_blocks="auto",
    )
    engine = InferenceEngine(loaded, settings)

    def submit(ids: tuple[int, ...], key: str) -> int:
        request = EngineRequest(
            ids,
            shape.new_tokens,
            sampling=Sampling(temperature=1.0, seed=0, by_id=True),
            key=key,
            logprobs=0,
            drawn_logprobs=True,
        )
        return engine.submit(request)

    def sample_all(batch: int, prompts: Sequence[str]) -> tuple[float, int]:
        """Seconds and generated tokens of one step's answers."""
        encoded = [tuple(tokenizer.encode(text)) for text in prompts]
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        unread = {submit(ids, f"{batch}:{index}:0") for index, ids in enumerate(encoded)}
        others = True
        tokens = 0
        while engine.busy or others:
            for event in engine.step():
                if event.error is not None:
                    raise RuntimeError(event.error)
                tokens += len(event.tokens)
                unread.discard(event.request)
            # As in a rollout: the other answers to a prompt begin when it is in the cache.
            if others and not unread:
                for index, ids in enumerate(encoded):
                    for sample in range(1, shape.samples):
                        submit(ids, f"{batch}:{index}:{sample}")
                others = False
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began, tokens

    texts = prompt_texts(shape, 2 * shape.prompts)
    batches = [texts[: shape.prompts], texts[shape.prompts :]]
    timed = [sample_all(index, prompts) for index, prompts in enumerate(batches)]
    seconds = [entry[0] for entry in timed]
    tokens = [entry[1] for entry in timed]
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return figures(shape, shape.prompts, seconds, seconds, tokens) | {"peak_gib": gib(peak)}


# ---- TRL


def run_trl(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """GRPOTrainer with transformers' generation."""
    began = time.monotonic()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    import torch
    from datasets import Dataset
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    from headway.config.load import load
    from headway.train.config import Recipe

    shape = SHAPES[options.shape]
    on_gpu = options.device == "cuda"
    prompts = options.peer_prompts or shape.prompts
    rows = min(options.peer_rows or shape.peer_rows, prompts * shape.samples)
    generation: list[float] = []
    tokens: list[int] = []
    steps: list[float] = []

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class TimedTrainer(GRPOTrainer):
        """GRPOTrainer with a clock around its generation."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = now()
            answers = super()._generate_single_turn(*args, **kwargs)
            generation.append(now() - start)
            tokens.append(sum(len(ids) for ids in answers[0]))
            return answers

    class StepClock(TrainerCallback):
        """From the end of one step to the end of the next, and whether there is time for a further one."""

        def __init__(self) -> None:
            self.last = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.last = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            moment = now()
            steps.append(moment - self.last)
            self.last = moment
            if time.monotonic() - began + steps[-1] > options.limit:
                control.should_training_stop = True

    recipe = load(Recipe, None, common_settings(shape, options.device), lambda _: None)
    model = recipe.model
    weights = torch.bfloat16 if case == "trl-bf16" else torch.float32
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer", shape.vocab)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder / "tokenizer", padding_side="left"
        )
        settings = LlamaConfig(
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.kv_heads,
            intermediate_size=model.ffn_size,
            vocab_size=model.vocab,
            max_position_embeddings=model.max_seq_len,
            tie_word_embeddings=model.tie_embeddings,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        with torch.device(options.device):
            language = LlamaForCausalLM(settings).to(weights)
        arguments = GRPOConfig(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=prompts * shape.samples // rows,
            num_generations=shape.samples,
            max_completion_length=shape.new_tokens,
            temperature=1.0,
            learning_rate=LR,
            max_steps=options.peer_steps,
            bf16=shape.precision == "bf16",
            use_cpu=not on_gpu,
            use_vllm=False,
            use_transformers_continuous_batching=case == "trl-paged",
            # Half of the memory of a machine without a GPU is too much for a trial.
            transformers_continuous_batching_config=None
            if on_gpu
            else {"max_memory_percent": 0.01},
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        texts = prompt_texts(shape, prompts * (options.peer_steps + 1))
        trainer = TimedTrainer(
            model=language,
            reward_funcs=vowel_rewards,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
            processing_class=tokenizer,
            callbacks=[StepClock()],
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return figures(shape, prompts, steps, generation, tokens) | {
        "peak_gib": gib(peak),
        "reward": round(rewards[-1], 4) if rewards else None,
        "rows": rows,
        "weights": str(next(language.parameters()).dtype).removeprefix("torch."),
        "checkpointed": arguments.gradient_checkpointing,
        "start_s": round(time.monotonic() - began - sum(steps), 1),
        "versions": {
            package: importlib.metadata.version(package)
            for package in ("trl", "transformers", "accelerate", "torch")
        },
    }


# ---- all cases


def run_case(options: argparse.Namespace) -> dict[str, Any]:
    """One case in this process."""
    case = options.case[0]
    if case == "engine":
        return run_engine(options)
    if case == "headway":
        return run_headway(options)
    return run_trl(case, options)


def run_apart(case: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """One case in a process of its own."""
    command = [sys.executable, __file__, "--here", "--case", case, "--limit", str(limit)]
    for name in ("shape", "device", "steps", "peer_steps", "peer_prompts", "peer_rows", "packages"):
        value = getattr(options, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit + CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"result": f"stopped after {limit + CLOSING_SECONDS:.0f} s"}
    for line in reversed(output.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    problem = errors.strip().splitlines() or ["nothing was printed"]
    return {"result": "failed", "why": " | ".join(problem[-4:])[-900:]}


def comparison(lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """headway's rollout beside its engine, and its samples/s beside each peer's."""
    rates: dict[str, Any] = {}
    headway = lines.get("headway", {})
    engine = lines.get("engine", {})
    if "generation_tok_s" in headway and "generation_tok_s" in engine:
        share = headway["generation_tok_s"] / engine["generation_tok_s"]
        rates["rollout_share_of_engine"] = round(share, 3)
    for case in PEERS:
        peer = lines.get(case, {})
        if "samples_s" in headway and "samples_s" in peer:
            rates[f"samples_over_{case}"] = round(headway["samples_s"] / peer["samples_s"], 2)
    return rates


def main() -> None:
    """Run every case in its own process; print and write one JSON line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES, default=[])
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--packages", help="a folder with packages that are not installed")
    parser.add_argument("--seconds", type=float, default=600.0, help="of all cases together")
    parser.add_argument("--steps", type=int, default=5, help="of headway")
    parser.add_argument("--peer-steps", type=int, default=3, help="of TRL")
    parser.add_argument("--peer-prompts", type=int, help="of a step of TRL; default: as headway")
    parser.add_argument("--peer-rows", type=int, help="answers of a microbatch of TRL")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=600.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        if options.packages and options.case[0] in PEERS:
            sys.path.append(options.packages)
        print("RESULT " + json.dumps(run_case(options)), flush=True)
        return

    began = time.monotonic()
    lines: dict[str, dict[str, Any]] = {}

    def report(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    for case in options.case or CASES:
        line: dict[str, Any] = {"case": case, "shape": options.shape}
        left = options.seconds - (time.monotonic() - began)
        if left <= CLOSING_SECONDS:
            line["result"] = "left out: no time"
        else:
            line |= run_apart(case, options, left - CLOSING_SECONDS)
        lines[case] = line
        report(line)
    report({"case": "comparison", "shape": options.shape} | comparison(lines))


if __name__ == "__main__":
    main()
