"""Writes FOLDER.tar.xz with the headway that is installed: python make.py FOLDER. It was run once, with the first release.

Each recipe is trained twice: undisturbed, for the expected numbers, and killed between two checkpoints, as the run to resume.
"""

import hashlib
import json
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import torch
from safetensors import safe_open

MODEL = "{hidden_size: 16, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 24, vocab_size: 320, max_seq_len: 64, dropout: 0.1}"
RECIPES = {
    "pretrain": f"""\
model: {MODEL}
tokenizer: tokenizer
data:
  train: [{{path: store, weight: 0.7}}, {{path: more.jsonl, weight: 0.3}}]
  valid: {{fraction: 0.1}}
  seq_len: 64
  packing: best_fit
  cache_dir: cache
optim: {{lr: 1e-2}}
steps: 10
eval: {{every: 3, rows: 4}}
checkpoint: {{every: 4, keep_last: 1}}
""",
    "stages": f"""\
model: {MODEL}
tokenizer: tokenizer
data: {{train: [store], valid: {{fraction: 0.1}}, seq_len: 64, cache_dir: cache}}
optim: {{lr: 1e-2}}
eval: {{every: 2, rows: 4, stop: {{patience: 9}}}}
checkpoint: {{every: 2, keep_last: 1}}
steps: 3
stages:
  - {{name: changed, train: [layers.1], optim: {{lr: 1e-3}}}}
  - {{name: answers, data: {{train: [{{path: chat.jsonl, kind: chat, chat_template: chatml}}]}}, steps: 6}}
""",
    "dpo": """\
init: {from: base}
data: {train: [{path: pairs.jsonl, kind: preference, chat_template: chatml}], valid: {fraction: 0.2}, seq_len: 64, cache_dir: cache}
objective: {kind: dpo, reference_logps: cached}
optim: {lr: 5e-3}
steps: 6
eval: {every: 2, rows: 4}
checkpoint: {every: 2, keep_last: 1, keep_best: 1}
""",
    "lora": """\
init: {from: base}
adapter: {kind: lora, rank: 2, alpha: 4.0, dropout: 0.1}
data: {train: [chat-store], valid: {fraction: 0.1}, seq_len: 64, cache_dir: cache}
optim: {lr: 1e-2}
steps: 6
eval: {every: 2, rows: 4}
checkpoint: {every: 2, keep_last: 1}
""",
    "gates": """\
init: {from: base}
objective: {kind: head_sparsity, target: 0.5, window: 16, sinks: 2}
freeze: [weights]
data: {train: [store], valid: {fraction: 0.1}, seq_len: 64, cache_dir: cache}
steps: 6
eval: {every: 2, rows: 4}
checkpoint: {every: 2, keep_last: 1}
""",
}
KILL_AFTER = {"pretrain": 6, "stages": 7, "dpo": 3, "lora": 3, "gates": 3}
COMMON = "run: {{name: {name}, dir: runs}}\nbatch: {{rows: 4, micro_rows: 2}}\ndevice: cpu\n"


def headway(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headway", *arguments]


def write_text(folder: Path) -> None:
    words = "the a model reads text and learns to answer plain questions in short sentences 模型 读 文字 学会 回答".split()  # noqa: SIM905

    def sentence(seed: int, length: int) -> str:
        return " ".join(words[(seed * 7 + i * (seed % 5 + 1)) % len(words)] for i in range(length)) + "."

    def lines(name: str, records: list[dict[str, object]]) -> None:
        (folder / name).write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")

    lines("text.jsonl", [{"text": sentence(i, 8 + i % 20)} for i in range(60)])
    lines("more.jsonl", [{"text": sentence(100 + i, 6 + i % 9)} for i in range(40)])
    turn = lambda role, text: {"role": role, "content": text}  # noqa: E731
    lines("chat.jsonl", [{"messages": [turn("user", sentence(i, 4)), turn("assistant", sentence(i + 1, 6))]} for i in range(40)])
    lines("pairs.jsonl", [{"prompt": sentence(i, 4), "chosen": sentence(i + 1, 5), "rejected": sentence(i + 2, 3)} for i in range(40)])


def interrupt(folder: Path, recipe: str, run: Path, steps: int) -> None:
    pattern = "stages/02-*/checkpoints/step-*" if recipe == "stages.yaml" else "checkpoints/step-*"
    saved = lambda: any((path / "manifest.json").exists() for path in run.glob(pattern))  # noqa: E731
    process = subprocess.Popen(headway("train", recipe), cwd=folder, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    while process.poll() is None and ((run / "metrics.jsonl").read_bytes().count(b"\n") < steps or not saved()):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def weights_of(run: Path) -> dict[str, str]:
    """Checksums of every tensor of the final model."""
    found: dict[str, str] = {}
    for path in sorted((run / "final").rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                found[f"{path.relative_to(run / 'final')}:{name}"] = hashlib.sha256(
                    file.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
                ).hexdigest()
    return found


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_text(folder)
    run = lambda *arguments: subprocess.run(headway(*arguments), cwd=folder, check=True)  # noqa: E731
    run("tokenizer", "train", "--input", "text.jsonl", "--vocab-size", "320", "--out", "tokenizer")
    run("data", "tokenize", "--input", "text.jsonl", "--tokenizer", "tokenizer", "--out", "store")
    run(
        "data",
        "tokenize",
        "--kind",
        "chat",
        "--template",
        "chatml",
        "--input",
        "chat.jsonl",
        "--tokenizer",
        "tokenizer",
        "--out",
        "chat-store",
    )
    expected: dict[str, object] = {"cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}", "torch": torch.__version__}
    for name, text in RECIPES.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name) + text, encoding="utf-8")
        run("train", f"{name}.yaml")
        whole = folder / "runs" / name
        metrics = [
            {k: v for k, v in json.loads(line).items() if k != "time"} for line in (whole / "metrics.jsonl").read_text().splitlines()
        ]
        expected[name] = {"metrics": metrics, "weights": weights_of(whole)}
        if name == "pretrain":
            shutil.copytree(whole / "final", folder / "base")
        if name == "gates":
            run("masks", "export", "--model", "runs/gates", "--sparsity", "0.5", "--out", "masks.tsv")
        if name == "lora":
            shutil.copytree(whole / "final" / "adapter", folder / "adapter")
        shutil.rmtree(whole)
        interrupt(folder, f"{name}.yaml", whole, KILL_AFTER[name])
    prompts = ["the model reads", "学会"]
    answers = {}
    for flags in ("--model base", "--model base --masks masks.tsv", "--model adapter"):
        command = headway("generate", "--max-new-tokens", "40", "--temperature", "1", "--seed", "3", "--json", *flags.split())
        for prompt in prompts:
            out = subprocess.run([*command, "--prompt", prompt], cwd=folder, capture_output=True, text=True, check=True)
            answers[f"{flags} --prompt {prompt}"] = json.loads(out.stdout)["token_ids"]
    expected["generate"] = answers
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1), encoding="utf-8")
    for path in [*folder.rglob("environment.json"), *folder.rglob("command.txt"), *folder.rglob("lock.json"), *folder.rglob("logs")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)  # they name the machine
    with tarfile.open(f"{folder}.tar.xz", "w:xz") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=anonymous)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
