"""Writes FOLDER.tar.xz with the headway that is installed: python make.py FOLDER. It was run once, with the first release.

Each recipe is trained twice: undisturbed, for the expected numbers, and killed between two checkpoints, as the run to resume.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from release import headway, interrupt, machine, metrics_of, pack, sentence, weights_of, write_lines

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


def write_text(folder: Path) -> None:
    write_lines(folder / "text.jsonl", [{"text": sentence(i, 8 + i % 20)} for i in range(60)])
    write_lines(folder / "more.jsonl", [{"text": sentence(100 + i, 6 + i % 9)} for i in range(40)])
    chats: list[dict[str, object]] = []
    pairs: list[dict[str, object]] = []
    for i in range(40):
        question = {"role": "user", "content": sentence(i, 4)}
        answer = {"role": "assistant", "content": sentence(i + 1, 6)}
        chats.append({"messages": [question, answer]})
        pairs.append(
            {"prompt": sentence(i, 4), "chosen": sentence(i + 1, 5), "rejected": sentence(i + 2, 3)}
        )
    write_lines(folder / "chat.jsonl", chats)
    write_lines(folder / "pairs.jsonl", pairs)


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
    expected: dict[str, object] = machine()
    for name, text in RECIPES.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name) + text, encoding="utf-8")
        run("train", f"{name}.yaml")
        whole = folder / "runs" / name
        expected[name] = {"metrics": metrics_of(whole), "weights": weights_of(whole)}
        if name == "pretrain":
            shutil.copytree(whole / "final", folder / "base")
        if name == "gates":
            run(
                "masks",
                "export",
                "--model",
                "runs/gates",
                "--sparsity",
                "0.5",
                "--out",
                "masks.tsv",
            )
        if name == "lora":
            shutil.copytree(whole / "final" / "adapter", folder / "adapter")
        shutil.rmtree(whole)
        checkpoints = "stages/02-*/checkpoints/step-*" if name == "stages" else "checkpoints/step-*"
        interrupt(folder, f"{name}.yaml", whole, KILL_AFTER[name], checkpoints)
    prompts = ["the model reads", "学会"]
    answers = {}
    for flags in ("--model base", "--model base --masks masks.tsv", "--model adapter"):
        command = headway(
            "generate",
            "--max-new-tokens",
            "40",
            "--temperature",
            "1",
            "--seed",
            "3",
            "--json",
            *flags.split(),
        )
        for prompt in prompts:
            out = subprocess.run(
                [*command, "--prompt", prompt],
                cwd=folder,
                capture_output=True,
                text=True,
                check=True,
            )
            answers[f"{flags} --prompt {prompt}"] = json.loads(out.stdout)["token_ids"]
    expected["generate"] = answers
    (folder / "expected.json").write_text(
        json.dumps(expected, ensure_ascii=False, indent=1), encoding="utf-8"
    )
    pack(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
