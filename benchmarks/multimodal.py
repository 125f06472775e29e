"""Phase 2 on one GPU: samples a second and peak memory of headway beside transformers + peft, in one run on one machine.

The job: a Qwen2.5-0.5B shape with random weights, bf16, LoRA of rank 16 on q, k, v and o, a shared projector from cached features of a
picture (960 numbers) and a sound (2048) through a frozen 512-wide aligner to 4 soft tokens each, conversations of 256 to 512 tokens of
which the last quarter carries loss, AdamW. Both sides read the same samples from memory and train the same parameters.

    headway          conversations packed into rows by its own loader and store, compiled blocks, chunked loss
    transformers     Qwen2ForCausalLM + peft, sdpa, batches of equal length: conversations padded to the longest; the best batch size counts

    PYTHONPATH=src python3 benchmarks/multimodal.py --peft .gpu-carry/peft-lib        about five minutes on an H200
    python benchmarks/multimodal.py --tiny                                            a small shape on the CPU, to try the script

Each side runs in a process of its own: one that fails is named in the table and loses nothing of the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WIDTHS = {"image": 960, "audio": 2048}
TOKENS = 4
ALIGNED, HIDDEN = 512, 2048
RANK, ALPHA, DROPOUT = 16, 32.0, 0.1
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
LR = 2e-4
QWEN = {
    "hidden_size": 896, "num_layers": 24, "num_heads": 14, "num_kv_heads": 2, "ffn_size": 4864, "vocab_size": 151_936,
    "max_seq_len": 32_768, "rope_theta": 1e6, "norm_eps": 1e-6,
}  # fmt: skip
TINY = {
    **QWEN,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 96,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Case:
    """What is measured."""

    shape: dict[str, Any]
    shortest: int
    longest: int
    """Tokens of a conversation, soft tokens counted."""
    row_tokens: int
    row_counts: tuple[int, ...]
    """Rows of a step of headway, each tried."""
    batches: tuple[int, ...]
    """Conversations of a step of transformers, each tried."""
    warm_up: int
    steps: int


CASES = {
    "qwen2.5-0.5b": Case(QWEN, 256, 512, 4096, (4, 8), (8, 16, 32, 64), 6, 25),
    "tiny": Case(TINY, 32, 64, 256, (2,), (4, 8), 1, 3),
}


def samples(case: Case, count: int) -> Iterator[np.ndarray]:
    """Conversations of random tokens; the 8 positions of media come first."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.integers(
            3, case.shape["vocab_size"], int(rng.integers(case.shortest, case.longest + 1))
        )


def features(name: str, count: int) -> np.ndarray:
    """float32 [count, width]."""
    return np.random.default_rng(len(name)).normal(size=(count, WIDTHS[name])).astype(np.float32)


def targets_from(length: int) -> int:
    """Where the answer begins."""
    return length - length // 4


class ArrayTable:
    """Features in memory under the names that a store of conversations uses."""

    def __init__(self, name: str, count: int) -> None:
        self.array = features(name, count)[:, None]
        self.known = {media_hash(name, number): number for number in range(count)}
        self.shape, self.dtype, self.content_key = self.array.shape[1:], self.array.dtype, name

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """[n, 1, width]."""
        return self.array[indices]

    def indices_of(self, content_hashes: Sequence[str]) -> np.ndarray:
        """The row of each content."""
        return np.array([self.known[one] for one in content_hashes], np.int64)


def media_hash(name: str, number: int) -> str:
    """The name of an item."""
    return hashlib.sha256(f"{name} {number}".encode()).hexdigest()


def make_store(folder: Path, case: Case, count: int) -> None:
    """The conversations as a token store."""
    from headway.store.media_items import MediaItem, media_mark, write_items
    from headway.store.writer import StoreWriter

    tokens = dict.fromkeys(WIDTHS, TOKENS)
    listed: list[list[MediaItem]] = []
    with StoreWriter(
        folder,
        dtype="uint32",
        tokenizer_fingerprint=None,
        masked=True,
        sources=["made", media_mark(tokens)],
    ) as writer:
        for number, ids in enumerate(samples(case, count)):
            mask = np.arange(len(ids)) >= targets_from(len(ids))
            writer.add(ids, mask)
            listed.append(
                [
                    MediaItem(at * TOKENS, name, media_hash(name, number))
                    for at, name in enumerate(tokens)
                ]
            )
        write_items(folder, tokens, listed)
        writer.finish()


def run_headway(case: Case, rows: int, device: str) -> dict[str, Any]:
    """Train with headway's loader and engine; the first steps, which compile, do not count."""
    import torch

    from headway.data.config import DataConfig
    from headway.data.loader import Loader
    from headway.data.media import MediaFeatures
    from headway.data.mixture import MixtureSource
    from headway.data.selection import Selection
    from headway.model.adapter.config import AdapterConfig
    from headway.model.adapter.lora import with_updates
    from headway.model.config import ModelConfig
    from headway.model.init import initial_value
    from headway.model.media_shape import MediaInput, MediaShape
    from headway.optim.adamw import Config as AdamW
    from headway.optim.base import GroupRule
    from headway.optim.groups import hypers
    from headway.parallel.assemble import assemble
    from headway.parallel.engine import EngineSpec
    from headway.store.reader import open_store
    from headway.tasks.base import StepInfo
    from headway.tasks.next_token import Config as NextToken

    steps = case.warm_up + case.steps
    count = int(1.3 * steps * rows * case.row_tokens / ((case.shortest + case.longest) / 2)) + 64
    inputs = tuple(MediaInput(name, width, TOKENS) for name, width in WIDTHS.items())
    media = MediaShape(inputs, HIDDEN, shared=True, aligned=ALIGNED)
    config = ModelConfig(
        family="qwen2", qkv_bias=True, tie_embeddings=True, media=media, **case.shape
    )
    on_gpu = device == "cuda"
    adapter = AdapterConfig(rank=RANK, alpha=ALPHA, dropout=DROPOUT, targets=TARGETS)
    optim = AdamW(
        lr=LR,
        weight_decay=0.01,
        groups=(
            GroupRule(match=("projector",), lr_factor=5.0),
            GroupRule(match=("adapter",), lr_factor=0.5),
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        make_store(Path(folder) / "store", case, count)
        data = DataConfig.model_validate(
            {
                "seq_len": case.row_tokens,
                "packing": "best_fit",
                "cache_dir": Path(folder),
                "workers": 2,
                "tokenizer_unchecked": True,
            }
        )
        tables = MediaFeatures(
            {name: ArrayTable(name, count) for name in WIDTHS}, dict.fromkeys(WIDTHS, TOKENS)
        )
        source = MixtureSource(Selection(open_store(Path(folder) / "store")))
        spec = EngineSpec(
            config, NextToken(), optim, torch.device(device), torch.bfloat16, adapter=adapter, compile_blocks=on_gpu,
            seq_len=case.row_tokens, chunk_tokens=4096 if on_gpu else 512,
        )  # fmt: skip
        engine = assemble(spec)
        values = (
            (name, initial_value(one, config, 1))
            for name, one in engine.specs.items()
            if one.start != "given"
        )
        engine.fill(with_updates(values, adapter, adapter.modules(config), 1, {}))
        seen: list[tuple[float, int]] = []
        with Loader(
            data, sources=[source], rows_per_step=rows, micro_rows=rows, seed=0, media=tables
        ) as loader:
            for step in range(steps):
                if step == case.warm_up and on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                batch, _ = next(loader)
                result = engine.forward_backward(batch, StepInfo(step, steps))
                engine.update(hypers(optim, engine.groups, step, steps))
                if on_gpu:
                    torch.cuda.synchronize()
                seen.append((time.perf_counter() - began, batch.stats.documents))
        timed = seen[case.warm_up :]
        return {
            "samples_s": sum(count for _, count in timed) / sum(seconds for seconds, _ in timed),
            "step_ms": 1000 * statistics.median(seconds for seconds, _ in timed),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
            "loss": float(result.loss),
            "trained": sum(
                int(np.prod(engine.shapes[name])) for group in engine.groups for name in group.names
            ),
            "setting": f"rows of {case.row_tokens}, {rows} a step, {statistics.mean(count for _, count in timed):.1f} samples a step",
        }


def use_peft(folder: str | None) -> Any:
    """peft, from a folder it was carried in if it is not installed; what it imports for reports alone may be absent."""
    if folder is not None:
        sys.path.append(folder)
    try:
        import psutil  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("psutil")
        stand_in.virtual_memory = lambda: types.SimpleNamespace(available=1 << 40, total=1 << 40)  # pyright: ignore[reportAttributeAccessIssue]
        stand_in.__spec__ = __import__("importlib.machinery", fromlist=["ModuleSpec"]).ModuleSpec(
            "psutil", None
        )
        sys.modules["psutil"] = stand_in
    import peft

    return peft


def build_peer(case: Case, device: str, peft: Any) -> Any:
    """A model as PurrSight builds it: frozen aligner, shared projector, soft tokens before the text."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = case.shape
    settings = Qwen2Config(
        hidden_size=shape["hidden_size"], num_hidden_layers=shape["num_layers"], num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"], intermediate_size=shape["ffn_size"], vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["max_seq_len"], tie_word_embeddings=True, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    language = Qwen2ForCausalLM(settings).to(torch.bfloat16)
    lora = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=DROPOUT,
        target_modules=list(TARGETS),
        bias="none",
        task_type="CAUSAL_LM",
    )
    width = shape["hidden_size"]

    class Peer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = peft.get_peft_model(language, lora)
            self.norms = nn.ModuleDict(
                {name: nn.LayerNorm(size, eps=1e-6) for name, size in WIDTHS.items()}
            )
            self.heads = nn.ModuleDict(
                {name: nn.Linear(size, ALIGNED, bias=False) for name, size in WIDTHS.items()}
            )
            self.projector = nn.Sequential(
                nn.Linear(ALIGNED, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, TOKENS * width)
            )
            self.norms.requires_grad_(False)
            self.heads.requires_grad_(False)

        def forward(
            self,
            media: dict[str, torch.Tensor],
            ids: torch.Tensor,
            mask: torch.Tensor,
            labels: torch.Tensor,
        ) -> torch.Tensor:
            soft = [
                self.projector(F.normalize(self.heads[name](self.norms[name](media[name])), dim=-1))
                for name in WIDTHS
            ]
            soft = [one.view(len(ids), TOKENS, width).to(torch.bfloat16) for one in soft]
            embedded = self.language.get_input_embeddings()(ids)
            return self.language(
                inputs_embeds=torch.cat([*soft, embedded], 1), attention_mask=mask, labels=labels
            ).loss

    return Peer().to(device)


def run_transformers(
    case: Case, batch: int, device: str, peft_folder: str | None
) -> dict[str, Any]:
    """Train with transformers and peft; conversations are padded to the longest of their batch."""
    import torch

    peft = use_peft(peft_folder)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    model, on_gpu = build_peer(case, device, peft), device == "cuda"
    projector = list(model.projector.parameters())
    lora = [one for one in model.language.parameters() if one.requires_grad]
    groups = [{"params": projector, "lr": 5 * LR}, {"params": lora, "lr": 0.5 * LR}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=on_gpu)
    steps, soft = case.warm_up + case.steps, TOKENS * len(WIDTHS)
    texts = list(samples(case, batch * steps))
    media = {name: torch.from_numpy(features(name, batch * steps)) for name in WIDTHS}
    seen: list[float] = []
    for step in range(steps):
        if step == case.warm_up and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        chosen = texts[step * batch : (step + 1) * batch]
        longest = max(map(len, chosen))
        ids = torch.zeros(batch, longest - soft, dtype=torch.int64)
        mask, labels = (
            torch.zeros(batch, longest, dtype=torch.int64),
            torch.full((batch, longest), -100),
        )
        for row, one in enumerate(chosen):
            text = torch.from_numpy(one)
            ids[row, : len(one) - soft] = text[soft:]
            mask[row, : len(one)] = 1
            labels[row, targets_from(len(one)) : len(one)] = text[targets_from(len(one)) :]
        here = {
            name: column[step * batch : (step + 1) * batch].to(device, non_blocking=True)
            for name, column in media.items()
        }
        with torch.autocast(device, torch.bfloat16):
            loss = model(here, ids.to(device), mask.to(device), labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*projector, *lora], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        seen.append(time.perf_counter() - began)
    timed = seen[case.warm_up :]
    return {
        "samples_s": batch * len(timed) / sum(timed),
        "step_ms": 1000 * statistics.median(timed),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "loss": float(loss.detach()),
        "trained": sum(one.numel() for one in [*projector, *lora]),
        "setting": f"{batch} samples a step, padded; transformers {__import__('transformers').__version__}, peft {peft.__version__}",
    }


def measured(args: argparse.Namespace, side: str, size: int) -> dict[str, Any]:
    """One side in a process of its own; a failure is a line of the table."""
    command = [
        sys.executable,
        __file__,
        "--case",
        args.case,
        "--device",
        args.device,
        "--side",
        side,
        "--size",
        str(size),
    ]
    command += ["--peft", args.peft] if args.peft else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"side": side, "size": size, "failed": f"no result in {args.timeout} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"side": side, "size": size, "failed": f"exit {done.returncode}: {said[:200]}"}
    return {"side": side, "size": size, **json.loads(lines[-1].removeprefix("RESULT "))}


def show(results: list[dict[str, Any]]) -> None:
    """The table, and the ratio of the best of each side."""
    print(f"\n{'side':<14}{'samples/s':>10}{'step ms':>9}{'peak GiB':>10}{'trained':>13}  setting")
    for one in results:
        if "failed" in one:
            print(f"{one['side']:<14}{'failed':>10}  size {one['size']}: {one['failed']}")
            continue
        peak = "-" if one["peak_gib"] is None else f"{one['peak_gib']:.1f}"
        print(
            f"{one['side']:<14}{one['samples_s']:>10.1f}{one['step_ms']:>9.1f}{peak:>10}{one['trained']:>13,}  {one['setting']}"
        )
    best = {
        side: max(
            (o["samples_s"] for o in results if o["side"] == side and "failed" not in o),
            default=None,
        )
        for side in ("headway", "transformers")
    }
    if best["headway"] and best["transformers"]:
        print(f"\nheadway / transformers + peft: {best['headway'] / best['transformers']:.2f}x")


def main() -> None:
    """Measure both sides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a small shape, on the CPU")
    parser.add_argument("--case", choices=list(CASES), default="qwen2.5-0.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument(
        "--peft",
        default=None,
        help="a folder with peft and accelerate, where they are not installed",
    )
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one measurement")
    parser.add_argument("--out", type=Path, default=None, help="write the results as JSON")
    parser.add_argument(
        "--side", choices=("headway", "transformers"), default=None, help=argparse.SUPPRESS
    )
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.case = "tiny" if args.tiny else args.case
    args.device = args.device or ("cpu" if args.tiny else "cuda")
    case = CASES[args.case]
    if args.side == "headway":
        print("RESULT " + json.dumps(run_headway(case, args.size, args.device)))
        return
    if args.side == "transformers":
        print("RESULT " + json.dumps(run_transformers(case, args.size, args.device, args.peft)))
        return
    results: list[dict[str, Any]] = []
    for side, sizes in (("headway", case.row_counts), ("transformers", case.batches)):
        for size in sizes:
            results.append(measured(args, side, size))
            print(json.dumps(results[-1]), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(results, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
