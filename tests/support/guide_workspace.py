"""The working directory of a reader of the guides, in small: every file, model and run folder that README and docs name.

`build(folder)` makes it once. A command runs in a copy of it. Models are tiny and random; run folders are links to a few of them.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from headway.export.huggingface import export_huggingface
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from support.byte_model import byte_tokenizer
from support.internlm_folder import write_optimizer, write_weights
from support.packed_folders import Packing, pack_folder
from support.runs import headway
from support.small_video import film
from support.small_vision import build_vision, write_conversations, write_vision

ROOT = Path(__file__).parents[2]
IMPORTED = ROOT / "tests" / "support" / "imported"
CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=320,
    max_seq_len=4096,
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"instruction": f"Say {number}.", "output": f"{number}"} for number in range(40)]
PAIRS = [
    {"prompt": record["instruction"], "chosen": record["output"], "rejected": "No."}
    for record in CHAT
]
TEXTS = [
    {"text": f"Document {number} says: " + "over the hills and far away. " * 8}
    for number in range(40)
]
FAST = [
    "data.seq_len=64", "batch={rows: 2, micro_rows: 1}", "epochs=null", "steps=1", "eval.every=1", "eval.rows=1", "track=[]",
    "device=cpu", "data.cache_dir=cache", "data.packing=best_fit",
]  # fmt: skip
POLICY = [
    "data.valid={fraction: 0.4}",
    "data.seq_len=128",
    "rollout={prompts: 2, samples: 2, max_new_tokens: 2}",
    "batch={micro_rows: 1}",
]
"""For recipes that sample answers."""
SCRATCH = [
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=48",
]
RECIPE = """\
run: {name: my-run}
model: {hidden_size: 32, num_layers: 4, num_heads: 4, num_kv_heads: 2, ffn_size: 48, max_seq_len: 128}
tokenizer: tokenizers/mine
data: {train: [corpus/text.jsonl], seq_len: 64, cache_dir: cache}
batch: {rows: 16, micro_rows: 1}
steps: 2
device: cpu
"""
INTERNLM: dict[str, Any] = {
    "family": "internlm", "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 48, "vocab_size": 320,
    "max_seq_len": 128, "qkv_bias": True, "output_bias": True, "tie_embeddings": False,
}  # fmt: skip
STAGES = "stages: [{name: one, steps: 1}, {name: two, steps: 1}]\n"
LINKS = {
    "chat": (
        "runs/lora-laptop", "runs/pretrain-laptop", "runs/sft-laptop", "runs/dpo-laptop", "runs/one", "runs/two", "runs/before",
        "runs/after", "runs/mine", "runs/dense", "runs/large", "runs/small", "runs/base", "runs/big", "runs/sft", "runs/dpo", "models/base",
        "models/large", "models/qwen", "demo/runs/pretrain", "demo/runs/sft", "runs/style", "runs/alone", "runs/student",
        "runs/rated", "runs/tuned",
        "models/llama-3.1-8b-instruct", "models/qwen2.5-7b", "M", "hf/internlm", "models/tiny",
    ),
    "deep": ("models/qwen2.5-3b", "runs/nope-stage1", "runs/nope-stage2", "runs/extend-yarn"),
    "deep3": ("runs/nope3-stage2",),
    "mixture": ("models/mixture",),
    "whole": ("models/whole",),
    "packed": ("models/NAME-GPTQ",),
    "gated": ("runs/sparsify-laptop", "runs/shorter", "runs/prulong-masks", "runs/prulong-weights", "runs/sparse"),
    "run": ("runs/my-run", "runs/NAME"),
    "policy": ("runs/grpo-laptop",),
    "reward": ("runs/reward", "runs/reward-laptop"),
    "seeing": ("runs/tune", "outputs/phase2"),
    "aligned": ("runs/align",),
}  # fmt: skip
"""What was made -> where the guides have such a model."""


def build(folder: Path) -> None:
    """Make everything in a folder, which becomes the working directory."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    _write_data()
    _write_tokenizers()
    _write_models()
    _write_recipes()
    _write_stores()
    _write_imports()
    _write_media()
    _write_pictures()
    _train_models()
    for name, places in LINKS.items():
        for link in places:
            Path(link).parent.mkdir(parents=True, exist_ok=True)
            Path(link).symlink_to(os.path.relpath(Path("made") / name, Path(link).parent))
    Path("runs/law").mkdir()
    shutil.copytree("made/adapter", "runs/law/adapter")
    run(
        "masks",
        "export",
        "--model",
        "runs/prulong-masks",
        "--sparsity",
        "0.5",
        "--out",
        "masks.tsv",
    )
    shutil.copy("masks.tsv", "masks_sp0.7.tsv")
    run("export", "gguf", "--model", "models/tiny", "--out", "NAME.gguf")


def run(*words: str) -> None:
    """A command that must work."""
    done = headway(*words, timeout=300)
    assert done.returncode == 0, (
        f"headway {' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )


def write_lines(path: str, records: Iterable[dict[str, Any]]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )


def _write_data() -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    for path in ("chat.jsonl", "chats.jsonl", "my.jsonl", "tasks/en/tasks.jsonl"):
        write_lines(path, CHAT)
    Path("alpaca.json").write_text(json.dumps(CHAT), encoding="utf-8")
    write_lines("pairs.jsonl", PAIRS)
    write_lines("style.jsonl", CHAT)
    Path("examples/cookbook").mkdir(parents=True)
    shutil.copy(ROOT / "examples/cookbook/style_reward.py", "examples/cookbook")
    write_lines("questions.jsonl", ({"prompt": f"Say {number}."} for number in range(2)))
    write_lines(
        "graded.jsonl",
        ({"prompt": f"Say {n}.", "response": f"{n}", "grade": n / 16} for n in range(16)),
    )
    write_lines(
        "held-out.jsonl", ({**pair, **text} for pair, text in zip(PAIRS[:4], TEXTS, strict=False))
    )
    write_lines(
        "labelled.jsonl",
        (
            {"prompt": record["instruction"], "completion": record["output"], "label": bool(n % 2)}
            for n, record in enumerate(CHAT)
        ),
    )
    shutil.copy("labelled.jsonl", "ratings.jsonl")
    turns = [
        {
            "messages": [
                {"role": "user", "content": record["instruction"]},
                {"role": "assistant", "content": record["output"]},
            ]
        }
        for record in CHAT
    ]
    write_lines("demo/instructions/docstrings.jsonl", turns)
    write_lines("demo/pairs/docstrings.jsonl", PAIRS)
    sampled_style = [{"text": "Well: a stone. Clear?", "stopped_by": "eos", "tokens": 5}]
    write_lines("after.jsonl", [{"prompt": "Say 1.", "generations": sampled_style}])
    write_lines(
        "answers.jsonl",
        (
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Yes."},
                ]
            }
            for _ in range(3)
        ),
    )
    write_lines(
        "prompts.jsonl",
        ({"prompt": f"Say {number}.", "answer": str(number)} for number in range(8)),
    )
    sampled = ["it is 0", {"text": "1", "stopped_by": "length", "tokens": 2}]
    write_lines(
        "sampled.jsonl",
        (
            {"prompt": f"Say {number}.", "answer": str(number), "generations": sampled}
            for number in range(2)
        ),
    )
    Path("talk.json").write_text(
        json.dumps({"messages": [{"role": "user", "content": "Hi"}]}), encoding="utf-8"
    )
    Path("questions.txt").write_text("What is an index?\n", encoding="utf-8")
    texts = (
        "corpus/text.jsonl",
        "corpus/more.jsonl",
        "corpus.jsonl",
        "text.jsonl",
        "long.jsonl",
        "raw/a.jsonl",
        "zh/a.jsonl",
        "en/a.jsonl",
        "code/a.jsonl",
    )
    for path in texts:
        write_lines(path, TEXTS)
    write_lines("togethercomputer/RedPajama-Data-1T-Sample/docs.jsonl", TEXTS)
    write_lines(
        "big.jsonl",
        ({**record, "meta": {"source": f"s{n % 2}"}} for n, record in enumerate(TEXTS[:4])),
    )
    plain = " ".join(record["text"] for record in TEXTS[:4])
    for path in ("held-out.txt", "wiki/a.txt", "wiki/b.txt", "books/a.txt", "raw_data.txt"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(plain * (30 if path.startswith("books") else 1), encoding="utf-8")
    lines = "".join(json.dumps(record) + "\n" for record in TEXTS).encode()
    for name in ("b", "c"):
        Path(f"raw/{name}.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    Path("data").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TEXTS), "data/a.parquet")
    choices = ["a stone", "an apple"]
    write_lines(
        "quiz.jsonl",
        ({"ask": f"Fruit {n}?", "choices": choices, "right": n % 2} for n in range(20)),
    )
    Path("fortunes").mkdir()
    Path("fortunes/one").write_text(
        "\n%\n".join(f"fortune {number} says hello" for number in range(20)) + "\n",
        encoding="utf-8",
    )


def _write_tokenizers() -> None:
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    for path in ("tokenizers/mine", "tokenizer", "T"):
        tokenizer.save(Path(path))
    run(
        "tokenizer",
        "train",
        "--kind",
        "sentencepiece",
        "--input",
        "raw_data.txt",
        "--vocab-size",
        "300",
        "--out",
        "made/pieces",
    )
    shutil.copy("made/pieces/tokenizer.model", "V7_sft.model")
    settings = Path("made/templated")
    tokenizer.save(settings)
    path = settings / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), "chat_template": TEMPLATE}),
        encoding="utf-8",
    )


def _write_model(name: str, config: ModelConfig) -> dict[str, torch.Tensor]:
    weights = {spec.name: initial_value(spec, config, 4) for spec in param_specs(config)}
    export_huggingface(
        config, iter(weights.items()), Path("made") / name, tokenizer=Path("made/templated")
    )
    return weights


def _write_models() -> None:
    _write_model("chat", CONFIG)
    _write_model("deep", CONFIG.with_(family="qwen2", num_layers=6, qkv_bias=True))
    _write_model("qwen3", CONFIG.with_(family="qwen3", num_layers=6, qk_norm=True))
    _write_model("mixture", CONFIG.with_(family="mixtral", experts={"num": 4, "per_token": 2}))
    _write_whole_model()
    pack_folder(Path("made/chat"), Path("made/packed"), Packing("gptq"))
    # A checkpoint of InternLM with its optimizer: one tensor rank, one stage, one zero rank.
    config = ModelConfig(**INTERNLM)
    weights = {spec.name: initial_value(spec, config, 4) for spec in param_specs(config)}
    folder = Path("llm_ckpts/49")
    folder.parent.mkdir()
    write_weights(weights, folder, 1, 1)
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    context = {"step_count": 1, "num_consumed_tokens": 128, "inf_nan_skip_batches": 0}
    write_optimizer(
        {"master": weights, "exp_avg": zeros, "exp_avg_sq": zeros},
        folder,
        1,
        1,
        1,
        updates=1,
        context=context,
    )


def _write_whole_model() -> None:
    """A Qwen2.5-VL with the files of a published folder."""
    folder = write_vision(Path("made/whole"), build_vision({"max_position_embeddings": 4096}))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "chat_template": TEMPLATE}), encoding="utf-8")


def _write_recipes() -> None:
    for name in ("recipe.yaml", "my.yaml", "RECIPE", "next.yaml"):
        Path(name).write_text(RECIPE, encoding="utf-8")
    Path("staged.yaml").write_text(RECIPE.replace("steps: 2\n", STAGES), encoding="utf-8")
    shape = next(line for line in RECIPE.splitlines() if line.startswith("model: "))
    Path("internlm-7b.yaml").write_text(
        RECIPE.replace(shape, f"model: {json.dumps(INTERNLM)}"), encoding="utf-8"
    )
    Path("sweep.txt").write_text("optim.lr=1e-3\noptim.lr=3e-4 seed=2\n", encoding="utf-8")


def _write_stores() -> None:
    tokens = ["--input", "corpus.jsonl", "--tokenizer", "tokenizers/mine"]
    run("data", "tokenize", *tokens, "--out", "stores/mine")
    shutil.copytree("stores/mine", "stores/text")
    # What `headway demo` leaves, which the cookbook uses.
    shutil.copytree("stores/mine", "demo/store")
    shutil.copytree("tokenizers/mine", "demo/tokenizer")
    for part in range(8):
        run("data", "tokenize", *tokens, "--out", f"part{part}", "--shard", f"{part}/8")
    long = "datasets/long-context-65536"
    run("data", "tokenize", *tokens, "--to", "mds", "--out", f"{long}/book-65536")
    for name in (
        f"{long}/thestackv1_concat_by_repo-65536",
        f"{long}/fineweb-edu",
        "datasets/prolong-ultrachat-64K",
    ):
        shutil.copytree(f"{long}/book-65536", name)
    internlm = ["--tokenizer", "V7_sft.model", "--to", "internlm", "--type", "cn", "--no-eos"]
    run("data", "tokenize", "--input", "raw_data.txt", *internlm, "--out", "data/train")


def _write_imports() -> None:
    for name, source in {
        "lora-1b.yml": "axolotl-qlora.yml",
        "training_config.json": "flare.json",
        "configs/7B_sft.py": "internlm-1b.py.txt",
        "qwen3_lora_sft.yaml": "llamafactory-sft.yaml",
        "run_scripts/prulong_masksonly.sh": "prulong-masks.sh",
        "config/phase2_cluster.yaml": "purrsight.yaml",
        "verl.sh": "verl-dapo.sh",
        "openrlhf.sh": "openrlhf-grpo.sh",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(IMPORTED / source, name)
    shutil.copytree(IMPORTED / "llamafactory-data", "llamafactory-data")


def _write_pictures() -> None:
    """Conversations about pictures alone, whose paths are relative to their file."""
    path = write_conversations(Path("pictures"))
    records = path.read_text(encoding="utf-8").replace("pictures/pictures/", "pictures/")
    path.write_text(f"{records}\n" * 10, encoding="utf-8")


def _write_media() -> None:
    from PIL import Image

    report = {
        "diagnostic": {
            "physical_markers": {
                "ears": "forward",
                "tail": "upright",
                "posture": "relaxed",
                "vocalization": "purr",
            },
            "classification": {
                "ethogram_group": "maintenance",
                "affective_state": "content",
                "arousal_level": "low",
                "risk_rating": 1,
            },
        },
        "behavioral_summary": "The cat rests.",
        "human_actionable_insight": "让它休息。",
    }
    run("data", "synthetic-media", "media", "--samples", "8", "--heldout", "2")
    shutil.copytree("media", "data/shapes")
    picture = next(Path("media/images").iterdir())
    sound = next(Path("media/sounds").iterdir())
    for name in ("cat.png", "a.png"):
        shutil.copy(picture, name)
    Image.open(picture).convert("RGB").save("cat.jpg")
    for name in ("cat.wav", "b.wav"):
        shutil.copy(sound, name)
    Path("clip.mp4").write_bytes(film())
    record = {
        "messages": [
            {"role": "user", "content": "<image>\nWhat now?"},
            {"role": "assistant", "content": json.dumps(report)},
        ],
        "images": [str(Path("cat.png").resolve())],
    }
    for path in ("data/train.jsonl", "data/phase2/train.jsonl"):
        write_lines(path, [record])


def _train_models() -> None:
    """Run folders of runs that a stand-in cannot replace: with checkpoints, gates, a score head, media inputs, an adapter."""
    run("train", "recipe.yaml", "run.dir=made", "run.name=run")
    fine_tune = ["init.from=made/chat", *FAST, "run.dir=made"]
    run("train", "sparsify", *fine_tune, "objective.window=16", "run.name=gated")
    run("train", "reward", *fine_tune, "run.name=reward")
    run("train", "lora", *fine_tune, "run.name=lora")
    run("train", "grpo", "data.train=prompts.jsonl", *fine_tune, *POLICY, "run.name=policy")
    run(
        "train",
        "sft",
        *fine_tune,
        "init.from=made/qwen3",
        "model.no_rope_layers=[3, 4, 5]",
        "run.name=deep3",
    )
    shutil.move("made/lora/final/adapter", "made/adapter")
    align = [
        setting
        for setting in FAST
        if not setting.startswith(("batch", "data.seq_len", "data.packing"))
    ]
    run(
        "train",
        "multimodal/align",
        *align,
        "batch={rows: 4, micro_rows: 4}",
        "model.aligner.dim=16",
        "run.dir=made",
        "run.name=aligned",
    )
    tune = [setting for setting in FAST if not setting.startswith(("data.seq_len", "data.packing"))]
    settings = [
        "multimodal.aligner=made/aligned",
        "data.seq_len=512",
        "run.dir=made",
        "run.name=seeing",
    ]
    run("train", "multimodal/tune", "init.from=made/chat", *tune, *settings)


def copy_to(world: Path, folder: Path) -> None:
    """The working directory of one command: nothing that it writes is seen by the others."""
    shutil.copytree(world, folder, symlinks=True)
