"""Writes FOLDER.tar.xz with the headway on the Python path: python make.py FOLDER. It was run once, with the second release.

Each recipe is trained twice: undisturbed, for the expected numbers, and killed between two checkpoints, as the run to resume.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from release import headway, interrupt, machine, metrics_of, pack, sentence, weights_of, write_lines

SHAPE = "hidden_size: 16, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 24, vocab_size: 320, max_seq_len: 96"
DATA = "valid: {fraction: 0.2}, seq_len: 64, cache_dir: cache"
PAIRS = f"data: {{train: [{{path: pairs.jsonl, kind: preference, chat_template: chatml}}], {DATA}}}"
ENCODERS = """\
      text: {kind: text_bytes, max_bytes: 12, width: 16, layers: 1, heads: 2}
      image: {kind: vit, image_size: 16, patch: 8, width: 16, layers: 2, heads: 2}
      audio: {kind: audio_cnn, frames: 16, width: 32, stages: 2}"""
RECIPES = {
    "base": f"""\
model: {{{SHAPE}}}
tokenizer: tokenizer
data: {{train: [text.jsonl], {DATA}}}
""",
    "sft": f"""\
init: {{from: base}}
data: {{train: [{{path: chat.jsonl, kind: chat, chat_template: chatml, weight: 0.7}}, {{path: more.jsonl, weight: 0.3}}], {DATA}}}
""",
    "orpo": f"init: {{from: base}}\n{PAIRS}\nobjective: {{kind: orpo}}\n",
    "simpo": f"init: {{from: base}}\n{PAIRS}\nobjective: {{kind: simpo}}\n",
    "dpo": f"init: {{from: base}}\n{PAIRS}\nobjective: {{kind: dpo}}\n",
    "reward": f"init: {{from: base}}\n{PAIRS}\nobjective: {{kind: reward, center_rewards_coefficient: 0.01}}\n",
    "kto": f"""\
init: {{from: base}}
data: {{train: [{{path: labelled.jsonl, kind: unpaired, chat_template: chatml}}], {DATA}}}
objective: {{kind: kto, reference_logps: cached}}
""",
    "distill": f"""\
model: {{{SHAPE}}}
tokenizer: tokenizer
data: {{train: [store], {DATA}}}
objective: {{kind: distill, teacher: base, temperature: 2.0}}
""",
    "stored_logits": f"""\
model: {{{SHAPE}}}
tokenizer: tokenizer
data: {{train: [store], {DATA}}}
objective: {{kind: distill, cache: logits, temperature: 2.0}}
""",
    "experts": f"""\
model: {{{SHAPE}, experts: {{num: 4, per_token: 2, ffn_size: 16}}}}
tokenizer: tokenizer
data: {{train: [store], {DATA}}}
""",
    "quantised": f"""\
init: {{from: base}}
adapter: {{rank: 2, alpha: 4.0, dropout: 0.1, base: nf4}}
data: {{train: [{{path: chat.jsonl, kind: chat, chat_template: chatml}}], {DATA}}}
""",
    "gates": f"""\
init: {{from: base}}
objective: {{kind: head_sparsity, target: 0.5, window: 16, sinks: 2}}
data: {{train: [store], {DATA}}}
""",
    "align": f"""\
model:
  aligner:
    dim: 8
    encoders:
{ENCODERS}
objective: {{kind: contrastive}}
data: {{train: [media/captions.jsonl], valid: {{fraction: 0.2}}, cache_dir: cache}}
""",
    "tune": f"""\
init: {{from: base}}
multimodal: {{aligner: aligned, image: {{tokens: 2}}, audio: {{tokens: 2}}, hidden: 16}}
adapter: {{rank: 2, alpha: 4.0}}
data: {{train: [{{path: media/chat.jsonl, kind: multimodal, chat_template: chatml}}], {DATA.replace("64", "96")}}}
""",
}
COMMON = """\
run: {{name: {name}, dir: runs}}
batch: {{rows: 4, micro_rows: 2}}
optim: {{lr: 1e-2}}
steps: 6
eval: {{every: 2, rows: 4}}
checkpoint: {{every: 2, keep_last: 1}}
device: cpu
"""
KILL_AFTER_STEPS = 3


def write_text(folder: Path) -> None:
    write_lines(folder / "text.jsonl", [{"text": sentence(i, 8 + i % 20)} for i in range(60)])
    write_lines(folder / "more.jsonl", [{"text": sentence(100 + i, 6 + i % 9)} for i in range(40)])
    chats: list[dict[str, object]] = []
    pairs: list[dict[str, object]] = []
    labelled: list[dict[str, object]] = []
    for i in range(40):
        question = {"role": "user", "content": sentence(i, 4)}
        answer = {"role": "assistant", "content": sentence(i + 1, 6)}
        chats.append({"messages": [question, answer]})
        pairs.append(
            {"prompt": sentence(i, 4), "chosen": sentence(i + 1, 5), "rejected": sentence(i + 2, 3)}
        )
        labelled.append(
            {"prompt": sentence(i, 4), "completion": sentence(i + 3, 5), "label": i % 3 == 0}
        )
    write_lines(folder / "chat.jsonl", chats)
    write_lines(folder / "pairs.jsonl", pairs)
    write_lines(folder / "labelled.jsonl", labelled)


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_text(folder)

    def run(*arguments: str) -> None:
        subprocess.run(headway(*arguments), cwd=folder, check=True)

    run("tokenizer", "train", "--input", "text.jsonl", "--vocab-size", "320", "--out", "tokenizer")
    run("data", "tokenize", "--input", "text.jsonl", "--tokenizer", "tokenizer", "--out", "store")
    media = ("--samples", "12", "--heldout", "4", "--image-size", "16")
    run("data", "synthetic-media", "media", *media)
    expected: dict[str, object] = machine()
    runs: dict[str, object] = {}
    for name, text in RECIPES.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name) + text, encoding="utf-8")
        run("train", f"{name}.yaml")
        whole = folder / "runs" / name
        runs[name] = {"metrics": metrics_of(whole), "weights": weights_of(whole)}
        if name == "base":
            shutil.copytree(whole / "final", folder / "base")
            run(
                "data",
                "teacher-logits",
                "store",
                "--teacher",
                "base",
                "--top-k",
                "8",
                "--temperature",
                "2",
                "--out",
                "logits",
            )
        if name == "align":
            shutil.copytree(whole / "final", folder / "aligned")
        if name == "reward":
            shutil.copytree(whole / "final", folder / "reward")
        shutil.rmtree(whole)
        interrupt(folder, f"{name}.yaml", whole, KILL_AFTER_STEPS)
    expected["runs"] = runs
    scored = subprocess.run(
        headway("eval", "reward", "--model", "reward", "--data", "pairs.jsonl", "--chat-template", "chatml", "--json"),
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected["reward"] = json.loads(scored.stdout)
    (folder / "expected.json").write_text(
        json.dumps(expected, ensure_ascii=False, indent=1), encoding="utf-8"
    )
    pack(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
