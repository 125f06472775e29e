"""Model and tokenizer folders that are damaged, forged or strange: healthy ones come in, every mutation of each of their files goes out.

`hostile_folders(root)` yields (name, folder) for all enumerable mutations; `random_folders(root, seed)` goes on for ever with several at
once. Folders are removed when the next one is asked for. Nothing here knows what a reader should say: only that it must be one line.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headway.model.config import ModelConfig
from headway.model.families.base import family_of
from headway.model.layout import param_specs
from headway.tokenizer.train import train_bpe
from support.internlm_folder import write_weights

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_size": 24,
    "vocab_size": 384,
    "max_seq_len": 64,
}
TEXTS = ["The river had frozen early that year.\n" * 6, "那年河水结冰很早。\n" * 6]
DEEP = "[" * 100_000 + "]" * 100_000
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 10**30, 1e308, -0.5, float("nan"), "", "x", "\0", "\ud800", "../../etc/passwd", [], {}, [None], [[]],
    [1, "x"], {"a": 1}, {"type": "x"}, {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": "2"}, {"rope_type": ["llama3"], "factor": 2},
    {"type": "linear", "factor": None}, {"content": None}, {"content": ["x"]}, {"0": {}}, {"x": {"content": "a"}}, "x" * 5000,
]  # fmt: skip
CONTENTS: dict[str, bytes] = {
    "empty": b"", "null": b"null", "list": b"[]", "number": b"3", "text": b'"x"', "deep": DEEP.encode(),
    "digits": b'{"a": ' + b"9" * 9000 + b"}",
    "deep object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "binary": bytes(range(256)) * 8, "latin": '{"ä": "é"}'.encode("latin-1"),
    "bom": b"\xef\xbb\xbf{}", "object": b"{}", "nul": b"\0" * 64, "gguf": b"GGUF" + b"\0" * 60,
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
}  # fmt: skip
Write = Callable[[Path], object]
Mutation = tuple[str, Write]


def healthy_folders(root: Path) -> dict[str, Path]:
    """One folder of each kind that is read."""
    root.mkdir(parents=True, exist_ok=True)
    kinds = {
        "llama": {"rope_scaling": {"kind": "llama3", "factor": 2.0}, "tie_embeddings": False},
        "qwen2": {"qkv_bias": True, "sliding_window": 8, "window_layers": (1,)},
        "qwen3": {
            "qk_norm": True,
            "rope_scaling": {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 32},
        },
        "mistral": {"sliding_window": 8},
        "smollm3": {"no_rope_layers": (1,)},
    }
    folders = {
        kind: _model(root / kind, ModelConfig.model_validate({"family": kind, **SHAPE, **more}))
        for kind, more in kinds.items()
    }
    folders["bin"] = _pickled(root / "bin", folders["llama"])
    folders["sharded"] = _sharded(root / "sharded", folders["llama"])
    folders["z2all"] = _zero2all(root / "z2all")
    folders["internlm"] = root / "internlm"
    write_weights(_values(_internlm()), folders["internlm"], 2, 1)
    folders["adapter"] = _adapter(root / "adapter", folders["llama"])
    return folders


def _internlm() -> ModelConfig:
    return ModelConfig(
        family="internlm",
        qkv_bias=True,
        output_bias=True,
        tie_embeddings=False,
        **{**SHAPE, "num_heads": 4},
    )


def _values(config: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {spec.name: torch.randn(spec.shape) * 0.1 for spec in param_specs(config)}


def _model(folder: Path, config: ModelConfig) -> Path:
    folder.mkdir()
    values = _values(config)
    (folder / "config.json").write_text(json.dumps(family_of(config.family).write(config)))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 2], "bos_token_id": 1})
    )
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = train_bpe(TEXTS, vocab_size=300, out=folder)
    tokenizer.with_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}").save(
        folder
    )
    return folder


def _pickled(folder: Path, source: Path) -> Path:
    from safetensors.torch import load_file

    shutil.copytree(source, folder)
    torch.save(load_file(source / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def _sharded(folder: Path, source: Path) -> Path:
    from safetensors.torch import load_file

    shutil.copytree(source, folder)
    values = load_file(source / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(values)
    halves = {f"model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in halves.items():
        save_file({name: values[name] for name in part}, folder / file)
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {name: file for file, part in halves.items() for name in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _zero2all(folder: Path) -> Path:
    (folder / "ckpt").mkdir(parents=True)
    config = {
        "model_type": "z2all", "hidden_dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "intermediate_size": 24, "vocab_size": 384,
        "attention_bias": True, "tie_word_embeddings": False, "max_seq_len": 64, "multiple_of": 8, "rope_interleaved": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    values = _values(family_of("z2all").read(config))
    torch.save(values, folder / "ckpt" / "best1_model.pt")
    return folder


def _adapter(folder: Path, base: Path) -> Path:
    folder.mkdir()
    settings = {
        "peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj"], "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {"q_proj": 8},
        "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {f"{path}.lora_A.weight": torch.ones(2, 16), f"{path}.lora_B.weight": torch.ones(16, 2)}
    save_file(parts, folder / "adapter_model.safetensors")
    return folder


def _place(write: Write) -> Write:
    def apply(path: Path) -> None:
        path.unlink()
        write(path)

    return apply


def _file_mutations(path: Path) -> Iterator[Mutation]:
    """What can be wrong with any file."""
    size = path.stat().st_size
    for name, content in CONTENTS.items():
        yield name, _place(lambda target, content=content: target.write_bytes(content))
    for part in (1, size // 3, size - 1):
        yield (
            f"cut at {part}",
            lambda target, part=part: target.write_bytes(target.read_bytes()[:part]),
        )
    yield "missing", lambda target: target.unlink()
    yield "a folder", _place(lambda target: target.mkdir())
    yield "a loop", _place(lambda target: target.symlink_to(target.name))
    yield "dangling", _place(lambda target: target.symlink_to("nowhere"))


def _json_mutations(path: Path) -> Iterator[Mutation]:
    """Every key with every value, one level down too."""
    content = json.loads(path.read_text())

    def put(change: Callable[[dict[str, Any]], None]) -> Write:
        def apply(target: Path) -> None:
            content = json.loads(target.read_text())
            change(content)
            target.write_text(json.dumps(content))

        return apply

    for key, below in content.items():
        yield f"without {key}", put(lambda content, key=key: content.pop(key))
        for number, value in enumerate(VALUES):
            yield (
                f"{key}={str(value)[:20]!r} ({number})",
                put(lambda content, key=key, value=value: content.__setitem__(key, value)),
            )
        if isinstance(below, dict):
            for inner in list(below)[:12]:
                for number, value in enumerate(VALUES):
                    yield (
                        f"{key}.{inner} {number}",
                        put(
                            lambda content, k=key, i=inner, value=value: content[k].__setitem__(
                                i, value
                            )
                        ),
                    )
    for number, value in enumerate(VALUES):
        yield (
            f"unknown key {number}",
            put(lambda content, value=value: content.__setitem__("rope_scaling", value)),
        )


def _tensor_mutations(path: Path) -> Iterator[Mutation]:
    """What can be wrong with a safetensors file that is one."""

    def header(length: int, text: bytes) -> Write:
        return lambda target: target.write_bytes(struct.pack("<Q", length) + text)

    yield "huge header", header(1 << 62, b"{}")
    yield "deep header", header(len(DEEP), DEEP.encode())
    yield "no tensors", header(2, b"{}")
    yield "odd entry", header(len(b'{"a": 3}'), b'{"a": 3}')

    def again(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Write:
        def apply(target: Path) -> None:
            from safetensors.torch import load

            save_file(change(load(target.read_bytes())), target)

        return apply

    def first(
        values: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        name = sorted(values)[0]
        return {**values, name: change(values[name]).contiguous()}

    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn, torch.float64, torch.int64):
        yield (
            f"of type {dtype}",
            again(lambda values, dtype=dtype: first(values, lambda tensor: tensor.to(dtype))),
        )
    yield "nan", again(lambda values: first(values, lambda tensor: tensor * float("nan")))
    yield "infinite", again(lambda values: first(values, lambda tensor: tensor / 0))
    yield "flat", again(lambda values: first(values, lambda tensor: tensor.flatten()))
    yield "none of it", again(lambda values: first(values, lambda tensor: tensor[:0]))
    yield "one more", again(lambda values: {**values, "extra": torch.ones(1)})
    yield "one less", again(lambda values: dict(sorted(values.items())[1:]))


def _pickle_mutations(path: Path) -> Iterator[Mutation]:
    """What can be wrong with a file of torch.save that is one."""
    for number, value in enumerate(
        [
            3,
            [1],
            {},
            {"a": 1},
            {1: torch.ones(2)},
            {"model.norm.weight": "x"},
            torch.ones(3),
            {"a": {}},
        ]
    ):
        yield f"holds {number}", lambda target, value=value: torch.save(value, target)

    def first(change: Callable[[torch.Tensor], Any]) -> Write:
        def apply(target: Path) -> None:
            values = torch.load(target, weights_only=True)
            name = sorted(values)[0]
            torch.save({**values, name: change(values[name])}, target)

        return apply

    for name, change in {
        "sparse": lambda tensor: tensor.to_sparse(), "flat": torch.flatten, "nan": lambda tensor: tensor * float("nan"), "text": str,
        "int8": lambda tensor: tensor.to(torch.int8), "meta": lambda tensor: tensor.to("meta"), "scalar": lambda tensor: tensor.sum(),
    }.items():  # fmt: skip
        if path.name != "model_config.pt":
            yield name, first(change)
    size = path.stat().st_size
    for number in range(24):
        position = random.Random(number).randrange(size)
        yield f"flip at {position}", lambda target, offset=position: _flip(target, offset)


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset % max(1, len(content))] ^= 0xFF
    path.write_bytes(content)


def mutations(path: Path) -> Iterator[Mutation]:
    """Everything that can be wrong with one file of a healthy folder."""
    yield from _file_mutations(path)
    if path.suffix == ".json" and path.name != "tokenizer.json":
        yield from _json_mutations(path)
    if path.name == "tokenizer.json":
        yield from (
            mutation for number, mutation in enumerate(_json_mutations(path)) if number % 3 == 0
        )
    if path.suffix == ".safetensors":
        yield from _tensor_mutations(path)
    if path.suffix in (".bin", ".pt"):
        yield from _pickle_mutations(path)


def hostile_folders(
    root: Path, only: tuple[str, ...] | None = None, every: int = 1
) -> Iterator[tuple[str, Path]]:
    """Every healthy folder with one thing wrong: of some kinds only, or of each so many one."""
    count = 0
    for kind, source in healthy_folders(root / "healthy").items():
        if only is not None and kind not in only:
            continue
        for path in sorted(file for file in source.rglob("*") if file.is_file()):
            inside = path.relative_to(source)
            for name, mutate in mutations(path):
                count += 1
                if count % every:
                    continue
                with_one = _copy(source, root / "hostile")
                mutate(with_one / inside)
                yield f"{kind}/{inside}: {name}", with_one


def random_folders(root: Path, seed: int) -> Iterator[tuple[str, Path]]:
    """Folders with several things wrong, without end."""
    rng = random.Random(seed)
    healthy = healthy_folders(root / "healthy")
    while True:
        kind = rng.choice(sorted(healthy))
        source = healthy[kind]
        folder = _copy(source, root / "hostile")
        said = []
        for _ in range(rng.randint(1, 4)):
            inside = rng.choice(
                sorted(file.relative_to(source) for file in source.rglob("*") if file.is_file())
            )
            name, mutate = rng.choice(list(mutations(source / inside)))
            try:
                mutate(folder / inside)
            except Exception:  # an earlier mutation may have left anything
                continue
            said.append(f"{inside}: {name}")
        yield f"{kind} seed {seed}: {'; '.join(said)}", folder


def _copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))
