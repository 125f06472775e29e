"""No dead settings: a second legal value of every setting changes something that can be seen.

Each row of TABLE names a setting, the overrides that go before it, two values, and what to look at. A setting without a row fails.
"""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.alerts import alert, alert_lines
from support.fields import setting_paths
from support.runs import deterministic, make_stores

from headway.config.load import load
from headway.data.loader import Loader
from headway.launch.local import Wishes, plan_job
from headway.train import train
from headway.train.build import build
from headway.train.config import Recipe
from headway.train.folder import decide_start
from headway.train.resolve import resolve

BASE = (
    "model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.ffn_size=24", "model.vocab_size=64", "model.max_seq_len=128",
    "data.seq_len=32", "data.tokenizer_unchecked=true", "batch.rows=4", "batch.micro_rows=2", "steps=3", "optim.lr=1e-2",
    "optim.schedule.warmup=1", "device=cpu",
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What one small run left behind."""

    folder: Path
    log: str
    records: list[dict[str, Any]]

    @property
    def numbers(self) -> list[Any]:
        return [(r["loss"], r["grad_norm"], r["lr"], r["adam_beta2"]) for r in self.records]


def root() -> Path:
    return _root()


@functools.cache
def _root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="headway-settings-"))
    make_stores(folder)
    (folder / "raw.jsonl").write_text("".join(json.dumps({"text": f"{i} words here", "other": "x" * i}) + "\n" for i in range(1, 60)))
    (folder / "lines.txt").write_text("".join(f"line {i} of a text\n" for i in range(200)))
    from headway.tokenizer.train_bpe import train_bpe

    text = Path(__file__).read_text(encoding="utf-8")
    for number in (0, 1):
        train_bpe([text], vocab_size=300 + 20 * number, out=folder / f"tok{number}")
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a thing of some length."}]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"text": "plain text", "messages": turns}) + "\n" for _ in range(60)))
    return folder


@functools.cache
def observed(overrides: tuple[str, ...]) -> Seen:
    """Train with these overrides and keep what it wrote."""
    folder = Path(tempfile.mkdtemp(dir=root()))
    texts = [text.replace("$", str(root())) for text in overrides]
    if not any(text.startswith("run.dir") for text in texts):
        texts += [f"run.dir={folder}/runs"]
    if not any(text.startswith("data.cache_dir") for text in texts):
        texts += [f"data.cache_dir={folder}/cache"]
    recipe = load(Recipe, None, [*BASE, *texts])
    train(recipe)
    run = recipe.run.folder
    return Seen(run, (run / "train.log").read_text(), deterministic(run / "metrics.jsonl"))


def numbers(overrides: tuple[str, ...]) -> Any:
    return observed(overrides).numbers


def batches(overrides: tuple[str, ...]) -> Any:
    return [(r["tokens"], r["num_samples_in_batch"], r["loss"], r["micro_num"]) for r in observed(overrides).records]


def engine(look: Callable[[Any], Any]) -> Callable[[tuple[str, ...]], Any]:
    def see(overrides: tuple[str, ...]) -> Any:
        resolved = resolve(load(Recipe, None, [*BASE, *overrides]))
        run = build(resolved, decide_start(resolved.recipe, "never"))
        run.loader.close()
        return look(run)

    return see


def files(pattern: str) -> Callable[[tuple[str, ...]], Any]:
    return lambda overrides: sorted(p.name for p in observed(overrides).folder.glob(pattern))


def valid(overrides: tuple[str, ...]) -> Any:
    return [r.get("valid") for r in observed(overrides).records]


def log_lines(overrides: tuple[str, ...]) -> Any:
    return sum("loss" in line and "tok/s" in line for line in observed(overrides).log.splitlines())


def loader_threads(run: Any) -> Any:
    loader: Loader = run.loader
    return loader._config.workers, loader._config.prefetch, loader._pin


def refused(overrides: tuple[str, ...]) -> Any:
    from headway.errors import HeadwayError

    try:
        return numbers(overrides)
    except HeadwayError as error:
        return str(error)


def shapes(run: Any) -> Any:
    return {name: tuple(value.shape) for name, value in run.engine.masters.items()}


SCALED = (
    "model.rope_scaling.kind=llama3",
    "model.rope_scaling.factor=8",
    "model.rope_scaling.original_max_seq_len=64",
    "model.rope_theta=100",
)
YARN = ("model.rope_scaling.kind=yarn", *SCALED[1:])
STORES = ("data.train=[$/store0, $/store1]",)
RULE = ("optim.groups=[{match: [norms]}]",)
RAW = ("model.vocab_size=null", "tokenizer=$/tok0", "data.train=[{path: $/raw.jsonl}]")
SETS = ("data.valid.sets={one: [{path: $/store0}, {path: $/store1}]}", "eval.rows=1000")
RAW_SET = (
    "model.vocab_size=null",
    "tokenizer=$/tok0",
    "data.train=[{path: $/raw.jsonl}]",
    "data.valid.sets={one: [{path: $/lines.txt}]}",
    "eval.rows=1000",
)
RAW_JSON_SET = (*RAW_SET[:3], "data.valid.sets={one: [{path: $/raw.jsonl}]}", "eval.rows=1000")
RAMP = ("batch.rampup={start: 1, add: 1, every: 1}",)
Row = tuple[tuple[str, ...], Any, Any, Callable[[tuple[str, ...]], Any]]

FP16 = ("precision=fp16",)
OVERFLOWS = (*FP16, "steps=4", "loss_scale.initial=1e30", "loss_scale.max=1e38", "loss_scale.hysteresis=1")


def scales(overrides: tuple[str, ...]) -> Any:
    return [r["loss_scale"] for r in observed(overrides).records]


def bucket_count(run: Any) -> Any:
    return len(run.engine.reducer.buckets)


def on_two_ranks(overrides: tuple[str, ...]) -> Any:
    """The layout and the hook the first of two ranks would have, or why it is refused."""
    import torch

    from headway.errors import HeadwayError
    from headway.parallel.assemble import choose_hook
    from headway.parallel.passes import Settings

    parallel = load(Recipe, None, list(overrides)).parallel
    try:
        mesh = parallel.mesh(0, 2)
        parallel.check(mesh, "float32")
        return mesh, type(choose_hook(parallel, mesh, Settings(torch.device("cpu"), torch.float32, None, 16, 0))).__name__
    except HeadwayError as error:
        return str(error)


def sharding(overrides: tuple[str, ...]) -> Any:
    from headway.parallel.collectives import alone
    from headway.parallel.fsdp import Sharding

    return Sharding.of(load(Recipe, None, list(overrides)).parallel, alone()).reshard_after_forward


POWERSGD = (
    "steps=4", "parallel.hook.kind=powersgd", "parallel.hook.rank=2", "parallel.hook.min_compression_rate=0", "parallel.hook.start_step=0",
)  # fmt: skip
PARALLEL: dict[str, Row] = {
    "loss_scale.initial": (FP16, 65536.0, 1024.0, scales),
    "loss_scale.min": (OVERFLOWS, 1.0, 9e29, scales),
    "loss_scale.max": ((*FP16, "loss_scale.growth_interval=1"), 2.0**24, 65536.0, scales),
    "loss_scale.growth_interval": (FP16, 1000, 1, scales),
    "loss_scale.growth_factor": ((*FP16, "loss_scale.growth_interval=1"), 2.0, 4.0, scales),
    "loss_scale.backoff_factor": (OVERFLOWS, 0.5, 0.25, scales),
    "loss_scale.hysteresis": (OVERFLOWS, 1, 2, scales),
    "parallel.strategy": (("parallel.hook.kind=all_reduce",), "zero1", "fsdp", on_two_ranks),
    "parallel.fsdp.size": (("parallel.strategy=fsdp",), "auto", 1, on_two_ranks),
    "parallel.fsdp.reshard_after_forward": ((), True, False, lambda o: sharding(o)),
    "parallel.zero1.size": ((), "auto", 1, on_two_ranks),
    "parallel.bucket_bytes": ((), 1 << 20, 4096, engine(bucket_count)),
    "parallel.accumulate_dtype": (("precision=bf16",), "fp32", "compute", numbers),
    "parallel.reduce_dtype": ((), "fp32", "bf16", on_two_ranks),
    "parallel.overlap.reduce": ((), True, False, engine(lambda run: run.engine.reducer.overlap)),
    "parallel.overlap.gather": ((), True, False, engine(lambda run: run.engine.overlap.gather)),
    "parallel.overlap.step": ((), True, False, engine(lambda run: run.engine.overlap.step)),
    "parallel.hook[all_reduce].kind": ((), "all_reduce", "reduce_scatter", on_two_ranks),
    "parallel.hook[reduce_scatter].kind": (("parallel.zero1.size=1",), "reduce_scatter", "all_reduce", on_two_ranks),
    "parallel.hook[compress].kind": ((), "compress", "all_reduce", on_two_ranks),
    "parallel.hook[compress].dtype": (("parallel.hook.kind=compress",), "bf16", "fp16", numbers),
    "parallel.hook[powersgd].kind": ((), "powersgd", "all_reduce", on_two_ranks),
    "parallel.hook[powersgd].rank": (POWERSGD, 2, 1, numbers),
    "parallel.hook[powersgd].start_step": (POWERSGD, 0, 2, numbers),
    "parallel.hook[powersgd].error_feedback": (POWERSGD, True, False, numbers),
    "parallel.hook[powersgd].q": (POWERSGD, "warm", "fixed", numbers),
    "parallel.hook[powersgd].min_compression_rate": (POWERSGD, 0.0, 100.0, numbers),
    "parallel.hook[powersgd].max_dim": (POWERSGD, 1000, 8, numbers),
    "parallel.hook[torch_style].kind": ((), "torch_style", "all_reduce", on_two_ranks),
    "parallel.hook[torch_style].function": (("parallel.hook.kind=torch_style",), "operator:add", "operator:nothing", on_two_ranks),
    "parallel.hook[torch_style].state": (("parallel.hook.kind=torch_style",), None, "operator:nothing", on_two_ranks),
    "parallel.hook[torch_style].options": (("parallel.hook.kind=torch_style", "parallel.hook.state=builtins:dict"), "{a: 1}", "{a: 2}", engine(lambda run: run.engine.reducer.hook.state)),
    "parallel.timeout_seconds": ((), 1800.0, 1.0, lambda o: load(Recipe, None, list(o)).parallel.timeout_seconds),
}  # fmt: skip

TABLE: dict[str, Row] = {
    "run.name": ((), "a", "b", lambda o: observed(o).folder.name),
    "run.dir": ((), "$/runs1", "$/runs2", lambda o: observed(o).folder.parent.name),
    "run.gpus": ((), None, "none", lambda o: plan_job(load(Recipe, None, o), Wishes(), {}).choice),
    "model.family": ((), "llama", "mistral", lambda o: json.loads((observed(o).folder / "final/config.json").read_text())["model_type"]),
    "model.preset": ((), None, "laptop", lambda o: load(Recipe, None, list(o)).model.max_seq_len + load(Recipe, None, list(o)).model.kv_heads),
    "model.hidden_size": ((), 16, 32, engine(shapes)),
    "model.num_layers": ((), 2, 3, engine(shapes)),
    "model.num_heads": (("model.head_dim=8",), 2, 4, engine(shapes)),
    "model.num_kv_heads": ((), 2, 1, engine(shapes)),
    "model.head_dim": ((), 8, 16, engine(shapes)),
    "model.ffn_size": ((), 24, 32, engine(shapes)),
    "model.vocab_size": ((), 64, 128, engine(shapes)),
    "model.max_seq_len": ((), 128, 16, refused),
    "model.rope_theta": ((), 10000.0, 50.0, numbers),
    "model.rope_scaling.kind": (("model.rope_scaling.factor=8", *SCALED[2:]), "linear", "llama3", numbers),
    "model.rope_scaling.factor": ((), 1.0, 4.0, numbers),
    "model.rope_scaling.low_freq_factor": (SCALED, 1.0, 2.0, numbers),
    "model.rope_scaling.high_freq_factor": (SCALED, 4.0, 3.0, numbers),
    "model.rope_scaling.original_max_seq_len": (SCALED, 64, 256, numbers),
    "model.rope_scaling.beta_fast": (YARN, 32.0, 2.0, numbers),
    "model.rope_scaling.beta_slow": (YARN, 1.0, 0.1, numbers),
    "model.rope_scaling.attention_factor": (YARN, None, 2.0, numbers),
    "model.rope_scaling.truncate": (YARN, True, False, numbers),
    "model.no_rope_layers": ((), [], [1], numbers),
    "model.norm": ((), "rmsnorm", "layernorm", numbers),
    "model.norm_eps": ((), 1e-5, 1e-1, numbers),
    "model.qkv_bias": ((), False, True, engine(shapes)),
    "model.output_bias": ((), False, True, engine(shapes)),
    "model.ffn_bias": ((), False, True, engine(shapes)),
    "model.qk_norm": ((), False, True, engine(shapes)),
    "model.tie_embeddings": ((), True, False, engine(shapes)),
    "model.sliding_window": (("model.family=mistral",), None, 4, numbers),
    "model.window_layers": (("model.family=qwen2", "model.qkv_bias=true", "model.sliding_window=4"), [0], [1], numbers),
    "model.dropout": ((), 0.0, 0.5, numbers),
    "model.embed_grad_scale": ((), 1.0, 0.1, numbers),
    "model.init_std": ((), 0.02, 0.1, numbers),
    "init.from": (("run.name=x", "model.hidden_size=16"), None, "$/runs1/run", numbers),
    "tokenizer": (RAW, "$/tok0", "$/tok1", numbers),
    "data.train.path": ((), ["$/store0"], ["$/store1"], numbers),
    "data.train.weight": ((), ["{path: $/store0, weight: 1}", "{path: $/store1, weight: 1}"], ["{path: $/store0, weight: 1}", "{path: $/store1, weight: 9}"], numbers),
    "data.train.repeat": (("steps=null", "epochs=1"), ["{path: $/store0}"], ["{path: $/store0, repeat: 2}"], lambda o: len(observed(o).records)),
    "data.train.limit": (("steps=null", "epochs=1"), ["{path: $/store0}"], ["{path: $/store0, limit: 10}"], lambda o: len(observed(o).records)),
    "data.train.min_length": ((), ["{path: $/store0}"], ["{path: $/store0, min_length: 40}"], numbers),
    "data.train.text_key": (RAW, ["{path: $/raw.jsonl}"], ["{path: $/raw.jsonl, text_key: other}"], numbers),
    "data.train.template": (RAW, ["{path: $/raw.jsonl}"], ["{path: $/raw.jsonl, template: '{other} {text}'}"], numbers),
    "data.train.split": (RAW, ["{path: $/lines.txt}"], ["{path: $/lines.txt, split: line}"], batches),
    "data.train.kind": (RAW, ["{path: $/chat.jsonl}"], ["{path: $/chat.jsonl, kind: chat, chat_template: chatml}"], batches),
    "data.train.chat_template": (RAW, ["{path: $/chat.jsonl, kind: chat, chat_template: chatml}"], ["{path: $/chat.jsonl, kind: chat, chat_template: alpaca}"], batches),
    "data.valid.fraction": (("data.train=[$/store0]",), 0.1, 0.4, valid),
    "data.valid.sets.path": (STORES, "{one: [{path: $/store0}]}", "{one: [{path: $/store1}]}", valid),
    "data.valid.sets.weight": ((*STORES, "eval.rows=2"), "{one: [{path: $/store0, weight: 1}, {path: $/store1, weight: 9}]}", "{one: [{path: $/store0, weight: 9}, {path: $/store1, weight: 1}]}", valid),
    "data.valid.sets.repeat": ((*STORES, "eval.rows=1000"), "{one: [{path: $/store0}]}", "{one: [{path: $/store0, repeat: 2}]}", valid),
    "data.valid.sets.limit": ((*STORES, "eval.rows=1000"), "{one: [{path: $/store0}]}", "{one: [{path: $/store0, limit: 5}]}", valid),
    "data.valid.sets.min_length": ((*STORES, "eval.rows=1000"), "{one: [{path: $/store0}]}", "{one: [{path: $/store0, min_length: 40}]}", valid),
    "data.valid.sets.text_key": (RAW_JSON_SET, "{one: [{path: $/raw.jsonl}]}", "{one: [{path: $/raw.jsonl, text_key: other}]}", valid),
    "data.valid.sets.template": (RAW_JSON_SET, "{one: [{path: $/raw.jsonl}]}", "{one: [{path: $/raw.jsonl, template: '{other} {text}'}]}", valid),
    "data.valid.sets.split": (RAW_SET, "{one: [{path: $/lines.txt}]}", "{one: [{path: $/lines.txt, split: line}]}", valid),
    "data.valid.sets.kind": (RAW, "{one: [{path: $/chat.jsonl}]}", "{one: [{path: $/chat.jsonl, kind: chat, chat_template: chatml}]}", valid),
    "data.valid.sets.chat_template": (RAW, "{one: [{path: $/chat.jsonl, kind: chat, chat_template: chatml}]}", "{one: [{path: $/chat.jsonl, kind: chat, chat_template: alpaca}]}", valid),
    "data.seq_len": ((), 32, 64, batches),
    "data.packing": (STORES, "best_fit", "concat", numbers),
    "data.max_documents": (STORES, "auto", 2, batches),
    "data.window_tokens": (STORES, "auto", 64, numbers),
    "data.skip_batches": (STORES, "", "'0'", numbers),
    "data.max_tokens": (STORES, None, 64, batches),
    "data.balance": (STORES, False, True, batches),
    "data.tokenizer_unchecked": (STORES, True, False, refused),
    "data.workers": ((), 2, 0, engine(loader_threads)),
    "data.prefetch": ((), 4, 1, engine(loader_threads)),
    "data.pin_memory": ((), False, True, refused),
    "data.stage_to": (STORES, None, "$/staged", lambda o: (numbers(o), "null" in o[-1] or sorted(p.name for p in (root() / "staged").iterdir()))[1]),
    "data.cache_dir": (RAW, "$/cache1", "$/cache2", lambda o: (numbers(o), sorted(str(p) for p in root().glob("cache*") if p.is_dir()))[1]),
    "objective[next_token].kind": ((), "next_token", "nothing", refused),
    "objective[next_token].label_smoothing": ((), 0.0, 0.3, numbers),
    "objective[next_token].z_loss": ((), 0.0, 0.1, numbers),
    "optim[adamw].kind": ((), "adamw", "nothing", refused),
    "optim[adamw].lr": ((), 1e-2, 1e-3, numbers),
    "optim[adamw].weight_decay": ((), 0.1, 10.0, numbers),
    "optim[adamw].decay": (("optim.weight_decay=10",), ["matrices"], ["weights"], numbers),
    "optim[adamw].clip": ((), 1.0, 0.01, lambda o: [r["loss"] for r in observed((*o, "optim.eps=1e-1")).records]),
    "optim[adamw].schedule.kind": (("steps=4",), "cosine", "linear", numbers),
    "optim[adamw].schedule.warmup": ((), 1, 3, numbers),
    "optim[adamw].schedule.decay": (("steps=6", "optim.schedule.kind=wsd"), 2, 4, numbers),
    "optim[adamw].schedule.decay_shape": (("steps=6", "optim.schedule.kind=wsd", "optim.schedule.decay=4"), "linear", "sqrt", numbers),
    "optim[adamw].schedule.floor": ((), 0.1, 0.9, numbers),
    "optim[adamw].schedule.zero_steps": ((), 0, 2, numbers),
    "optim[adamw].groups.match": ((), ["{match: [norms], lr: 0.5}"], ["{match: [embeddings], lr: 0.5}"], numbers),
    "optim[adamw].groups.lr": (RULE, ["{match: [norms]}"], ["{match: [norms], lr: 0.5}"], numbers),
    "optim[adamw].groups.betas": (RULE, ["{match: [norms]}"], ["{match: [norms], betas: [0.1, 0.1]}"], numbers),
    "optim[adamw].groups.eps": (RULE, ["{match: [norms]}"], ["{match: [norms], eps: 1.0}"], numbers),
    "optim[adamw].groups.weight_decay": (RULE, ["{match: [norms]}"], ["{match: [norms], weight_decay: 10}"], numbers),
    "optim[adamw].groups.maximize": (RULE, ["{match: [norms], lr: 0.1}"], ["{match: [norms], lr: 0.1, maximize: true}"], numbers),
    "optim[adamw].betas": ((), [0.9, 0.95], [0.1, 0.2], numbers),
    "optim[adamw].beta2_c": (("optim.betas=[0.9, 0.1]",), 0.0, 0.9, numbers),
    "optim[adamw].eps": ((), 1e-8, 1.0, numbers),
    "batch.tokens": (("batch.rows=null",), 128, 256, batches),
    "batch.rows": ((), 4, 8, batches),
    "batch.rows_per_rank": (("batch.rows=null", "batch.micro_rows=null"), 2, 3, batches),
    "batch.accumulate": (("batch.rows=null", "batch.micro_rows=null", "batch.rows_per_rank=2"), 1, 2, batches),
    "batch.micro_rows": ((), 2, 1, batches),
    "batch.rampup.start": (RAMP, 1, 2, batches),
    "batch.rampup.add": (RAMP, 1, 2, batches),
    "batch.rampup.every": (RAMP, 1, 2, batches),
    "steps": ((), 3, 4, lambda o: len(observed(o).records)),
    "epochs": ((*STORES, "steps=null"), 1, 2, lambda o: len(observed(o).records)),
    "freeze": ((), [], ["embeddings"], numbers),
    "train": ((), [], ["norms"], numbers),
    "precision": ((), "fp32", "bf16", numbers),
    "device": ((), "cpu", "cuda", refused),
    **PARALLEL,
    "kernels.attention": ((), "auto", "varlen", refused),
    "kernels.compile": ((), False, True, engine(lambda run: type(run.engine.model.model.layers["0"].before).__name__)),
    "kernels.tf32": ((), True, False, engine(lambda run: __import__("torch").backends.cuda.matmul.allow_tf32)),
    "memory.loss_chunk_tokens": ((), "auto", 16, engine(lambda run: run.engine.settings.chunk_tokens)),
    "checkpoint.every": ((), None, 1, files("checkpoints/step-*")),
    "checkpoint.keep_last": (("checkpoint.every=1",), 1, 3, files("checkpoints/step-*")),
    "checkpoint.at_end": ((), True, False, files("*")),
    "eval.every": ((*STORES, "data.valid.fraction=0.2"), None, 1, lambda o: sum("valid" in r for r in observed(o).records)),
    "eval.rows": ((*STORES, "data.valid.fraction=0.4"), 2, 8, valid),
    "log.every": ((), 10, 1, log_lines),
    "track[alert].kind": ((), [], alert(), lambda o: alert_lines(observed(o).log)),
    "track[alert].form": ((), alert(), alert("form: webhook, url_env: NO_SUCH"), refused),
    "track[alert].url_env": ((), alert("form: slack, url_env: NO_SUCH"), alert("form: slack, url_env: NOR_THIS"), refused),
    "track[alert].command": ((), alert(), alert("command: ['false']"), lambda o: alert_lines(observed(o).log)),
    "track[alert].events": ((), alert("events: [start]"), alert("events: [finish]"), lambda o: alert_lines(observed(o).log)),
    "track[alert].spike_ratio": (("optim.lr=10", "log.every=1"), alert("spike_ratio: 1.01"), alert("spike_ratio: 1e9"), lambda o: alert_lines(observed(o).log)),
    "track[alert].every_seconds": (("optim.lr=1", "steps=12", "log.every=1"), alert("spike_ratio: 1.01, every_seconds: 0"), alert("spike_ratio: 1.01, every_seconds: 600"), lambda o: alert_lines(observed(o).log)),
    "track[alert].timeout_seconds": ((), alert("command: [sleep, '0.5'], timeout_seconds: 0.1"), alert("command: [sleep, '0.5'], timeout_seconds: 30"), lambda o: alert_lines(observed(o).log)),
    "track[tensorboard].kind": ((), [], ["{kind: tensorboard}"], files("tensorboard/*")),
    "seed": ((), 42, 43, numbers),
    "deterministic": ((), False, True, engine(lambda run: __import__("torch").are_deterministic_algorithms_enabled())),
}  # fmt: skip


def as_override(path: str, value: Any) -> str:
    """`optim[adamw].lr`, 1e-3 -> `optim.lr=0.001`; a list stands for the whole list that holds the setting."""
    key = path.split("[")[0] + (path.split("]")[1] if "]" in path else "")
    if isinstance(value, list) and path.startswith(("data.train.", "optim[adamw].groups.", "track[")):
        key = key.split(".")[0] if path.startswith("track") else ".".join(key.split(".")[:2])
        return f"{key}=[{', '.join(value)}]"
    if path.startswith("data.valid.sets."):
        return f"data.valid.sets={value}"
    text = "null" if value is None else json.dumps(value) if not isinstance(value, str) else value or '""'
    return f"{key}={text}"


@pytest.fixture(scope="module", autouse=True)
def restored() -> Any:
    import torch

    yield
    torch.use_deterministic_algorithms(False)
    shutil.rmtree(root(), ignore_errors=True)


def test_every_setting_has_a_row() -> None:
    assert set(setting_paths(Recipe)) == set(TABLE)


@pytest.mark.parametrize("path", TABLE)
def test_a_second_value_changes_what_is_seen(path: str) -> None:
    before, first, second, look = TABLE[path]
    if path == "init.from":
        observed(("run.dir=$/runs1",))
    seen = [look(tuple(text.replace("$", str(root())) for text in (*before, as_override(path, value)))) for value in (first, second)]
    assert seen[0] != seen[1], f"{path}={first} and {path}={second} look the same: {seen[0]}"
