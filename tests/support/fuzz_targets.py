"""Every surface that takes input from outside, as fuzz targets."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.config.load import load
from headway.config.yaml_reader import parse_yaml
from headway.train import dry_run
from headway.train.config import Recipe
from support.fuzz_files import file_targets
from support.fuzz_media import media_target
from support.fuzz_serve import serve_target
from support.fuzzing import HOSTILE_TEXTS, Target, hostile_text, mutate_bytes, run_verb
from support.recipe_settings import setting_paths
from support.runs import make_stores, tiny_settings

SHALLOW = ("run.supervise", "device", "kernels.compile")
"""Settings whose hostile values are validated alone: they would start processes or the compiler."""
RECIPE_TEXT = b"""\
run: {name: a, dir: runs}
model: &shape {hidden_size: 32, num_layers: 2, num_heads: 4, ffn_size: 48, vocab_size: 64, max_seq_len: 64}
data:
  train: [{path: store0, weight: 0.7}, {path: store1, weight: 0.3}]
  valid: {fraction: 0.1}
optim: {lr: 3e-4, schedule: {kind: cosine, warmup: 0.05, floor: 0.1}, groups: [{match: "*.bias", weight_decay: 0}]}
batch: {rows: 4, micro_rows: 2}   # a comment
stages:
  - {name: one, steps: 4}
  - {name: two, steps: 4, freeze: [embeddings]}
"""
BOMBS = (
    "[" * 100_000, "{" * 100_000, "- " * 50_000, "? " * 50_000, "a: &a [*a]", "&a [*a]", "a: &x {b: *x}", "a: !!python/object:os.system x",
    "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c]\n"
    "e: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]",
    "%YAML 1.3\n---\na: 1", "%YAML 9.9\n---\na: 1", "---\na: 1\n---\nb: 2", "<<: [1]", "<<: {a: 1}", "<<: *x", "? [1, 2]\n: 3", "? {a: 1}\n: 3",
    "a: " + "9" * 5000, "a: 1e" + "9" * 5000, "a: 2026-11-31", "a: 12:99:99", "a: !!int x", "a: !!float x", "a: !!binary x", "a: !!set {1, 2}",
    "a: !!omap [a: 1]", "a: 0o99", "a: 1__", "!!map [1]", "!!seq {a: 1}", "a: \x00", "\ufeff\ufeffa: 1", "a: b: c", "x" * 600_000, "null", "3", "[]",
    "#" * 300_000, "a: '" + "x\n" * 100_000, "\t", "a:\n\tb: 1", "? " , ": 1", "=: 1", "a: =", "a: <<", "[<<]", "&a << : {b: 1}",
)  # fmt: skip


def all_targets() -> list[Target]:
    """Every target, in the order of their names."""
    return [
        Target("recipe files", _recipe_file),
        Target("settings, read", _setting_read),
        Target("settings, one step", _setting_step, make_stores_in),
        Target("options", _option, make_stores_in),
        *file_targets(),
        media_target(),
        serve_target(),
    ]


def make_stores_in(folder: Path) -> None:
    """Two stores that cases share."""
    if not (folder / "store0").exists():
        make_stores(folder)


def _recipe_file(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    if rng.random() < 0.3:
        text = rng.choice(BOMBS)
    else:
        text = mutate_bytes(RECIPE_TEXT, rng).decode("utf-8", "replace")
    path = folder / "recipe.yaml"

    def read() -> None:
        path.write_text(text, encoding="utf-8")
        load(Recipe, path)

    return repr(text[:300]), rng.choice((read, lambda: parse_yaml(text, "recipe.yaml")))


PATHS = tuple(
    path.replace("[", "\0").split("\0")[0] if path.endswith("].kind") else path
    for path in setting_paths(Recipe)
)


def _override(rng: random.Random) -> list[str]:
    """One setting with a hostile value, with the kind it belongs to chosen first."""
    path = rng.choice(PATHS)
    before: list[str] = []
    if "[" in path:
        holder, _, rest = path.partition("[")
        kind, _, key = rest.partition("]")
        if holder == "track":
            return [f"track=[{{kind: {kind}, {key.removeprefix('.')}: {hostile_text(rng)}}}]"]
        before = [f"{holder}.kind={kind}"]
        path = holder + key
    for holder in ("data.train.", "data.valid.sets.", "stages.", "optim.groups."):
        if path.startswith(holder):
            key = path.removeprefix(holder)
            source = (
                f"{{path: store0, {key}: {hostile_text(rng)}}}"
                if holder.startswith("data")
                else f"{{{key}: {hostile_text(rng)}}}"
            )
            return [
                f"{holder[:-1]}={{a: {source}}}"
                if "sets" in holder
                else f"{holder[:-1]}=[{source}]"
            ]
    return [*before, f"{path}={hostile_text(rng)}"]


def _setting_read(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    overrides = [override for _ in range(rng.choice((1, 1, 2))) for override in _override(rng)]
    if rng.random() < 0.1:
        overrides.append(
            rng.choice(
                (
                    hostile_text(rng),
                    f"{hostile_text(rng)}={hostile_text(rng)}",
                    f"x.{hostile_text(rng)}.y=1",
                )
            )
        )
    return repr(overrides), lambda: load(Recipe, None, overrides)


def _setting_step(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    overrides = _override(rng)
    name = overrides[-1].partition("=")[0]

    def step() -> None:
        os.chdir(folder)
        recipe = load(Recipe, None, [*tiny_settings(folder, "run"), "steps=3", *overrides])
        if name not in SHALLOW and recipe.device == "cpu":
            dry_run(recipe)

    return repr(overrides), step


STARTS_WORK = (
    "demo", "supervise", "download", "doctor", "data self-instruct", "verify resume", "launch local", "launch ssh", "launch slurm",
)  # fmt: skip
"""Verbs that are tried with options of the wrong form alone: what they start is not what is tried here."""


def _verbs() -> list[tuple[str, Any]]:
    import typer.main

    from headway.cli import build_app

    verbs: list[tuple[str, Any]] = []

    def walk(command: Any, name: str) -> None:
        for key, below in getattr(command, "commands", {}).items():
            walk(below, f"{name} {key}".strip())
        if not getattr(command, "commands", {}):
            verbs.append((name, command))

    walk(typer.main.get_command(build_app()), "")
    return verbs


VERBS = _verbs()


def _option(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    name, command = rng.choice([verb for verb in VERBS if verb[0] not in STARTS_WORK])
    line = name.split()
    for parameter in command.params:
        is_flag = getattr(parameter, "is_flag", False)
        if (
            not parameter.opts
            or not (parameter.required or rng.random() < 0.25)
            or parameter.name == "help"
        ):
            continue
        value = _plausible(parameter, rng)
        if parameter.param_type_name == "argument":
            line += [value] if rng.random() < 0.9 else []
        elif is_flag:
            line.append(rng.choice(parameter.opts))
        elif rng.random() < 0.95:
            line += [parameter.opts[-1], value]
    if (
        line[0] == "train"
    ):  # without a recipe it trains on generated data: that works, but takes longer than a case may
        line.append("steps=1")
    out = folder / "out"

    def call() -> int:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.chdir(out)
        return run_verb(line)

    return repr(line), call


def _plausible(parameter: Any, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(
            (
                "../store0",
                "../store1",
                "out",
                "x.jsonl",
                "1",
                "0.5",
                "llama",
                "steps=1",
                "../recipe.yaml",
            )
        )
    return rng.choice(HOSTILE_TEXTS).replace("\x00", "")
