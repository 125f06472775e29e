"""What a run must not pay for at its start."""

import subprocess
import sys
from pathlib import Path

import headway

CODE = """
import sys
from headway.cli import main
code = main(sys.argv[1:])
print(*sorted(sys.modules))
sys.exit(code)
"""
COMPILER = ("torch._dynamo", "torch._inductor", "sympy", "transformers")
NOT_NEEDED = (
    "api", "board", "cli.chat", "cli.data", "cli.doctor", "cli.eval", "cli.launch", "cli.serve",
    "data.media", "data.samples", "data.teacher", "diagnose.preflight", "diagnose.trace", "eval", "infer",
    "export.adapter", "export.gguf_writer", "kernels.fp8", "kernels.grouped", "kernels.head_mix", "kernels.policy_scores", "launch.ranks",
    "launch.supervise", "launch.targets", "media", "model.adapter.peft", "model.families.qwen3",
    "model.latent_attention", "model.loading.internlm", "model.loading.native_vision", "model.moe", "model.paged_cache", "objective",
    "parallel.expert_exchange", "parallel.fsdp", "parallel.hooks.compress", "parallel.offload_activations",
    "parallel.offload_optimizer", "parallel.pipeline.microbatch_runner", "parallel.recompute", "parallel.ring",
    "parallel.tensor_exchange", "plugin", "prepare.build", "prepare.features", "prepare.tasks", "records.multimodal",
    "records.preference", "records.unpaired", "rewards",
    "rollout.journal", "rollout.rows", "rollout.sampler", "runtime.executor", "runtime.s3", "serve", "store.convert",
    "store.foreign.internlm", "store.foreign.mds", "store.foreign.zero2all",
    "tasks.answers", "tasks.contrastive", "tasks.distill", "tasks.grpo", "tasks.preference", "text.clean", "text.dedup",
    "text.hub_download", "text.read", "text.tasks", "tokenizer.chat", "train.alignment", "train.multimodal", "train.rollout_check", "train.rollouts",
    "train.staged_run",
)  # fmt: skip
"""Modules and packages of headway that a plain pretrain has no use for. A module that becomes part of every run leaves this list."""


def test_a_plain_run_loads_neither_the_compiler_nor_rooms_it_does_not_need(tmp_path: Path) -> None:
    small = (
        "model.hidden_size=16",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.ffn_size=16",
        "data.seq_len=32",
        "batch.rows=2",
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CODE,
            "train",
            *small,
            "steps=1",
            "device=cpu",
            f"run.dir={tmp_path}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "headway.train.loop" in loaded
    assert not [name for name in COMPILER if name in loaded]
    source = Path(headway.__file__).parent
    files = [source / name.replace(".", "/") for name in NOT_NEEDED]
    assert not [
        file for file in files if not file.is_dir() and not file.with_suffix(".py").is_file()
    ]
    not_needed = {f"headway.{name}" for name in NOT_NEEDED}
    assert not [
        name for name in loaded if not not_needed.isdisjoint({name, *_packages_above(name)})
    ]


def _packages_above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
