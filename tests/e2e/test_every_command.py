"""Every command line of README and docs is run, in small, or is listed here with the reason why it is not.

The lines come from the fenced blocks of the pages. Models, data and run folders that they name are tiny stand-ins
(tests/support/guide_workspace.py); only sizes, hub names and devices are changed. A line that is new on a page is run as it is; if that cannot
work, it needs an entry in LISTED.
"""

import os
import re
import shlex
import shutil
import signal
import time
import tomllib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from support import guide_workspace
from support.forked_command import Forked
from support.runs import headway

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?ms)^```(\w*)\n(.*?)^```")
SHELL = ("", "sh", "bash", "console")

LISTED = {
    r"headway demo --rl.*": "minutes; tests/unit/workflows/demo/test_reinforcement.py has a small one",
    r"headway demo": "minutes; `make demo` runs it in CI",
    r"headway download .*": "a hub; tests/unit/text/test_hub.py has a stand-in",
    r"headway push (?!.*--dry-run).*|headway pull .*": "a hub; tests/unit/workflows/test_publish.py has a stand-in",
    r"headway board (?!.*--list).*|headway top .*": "runs until Ctrl-C; tests/e2e/test_board_page.py and tests/unit/board",
    r"headway .* --on (ray|slurm).*": "a cluster; tests/e2e/test_ray.py and tests/cluster/test_data_arrays.py",
    r"headway launch ssh .*": "hosts; tests/cluster/test_ssh_jobs.py and tests/unit/launch",
    r"headway launch (status|logs|cancel) .*": "a job; tests/unit/launch and tests/cluster/test_slurm.py",
    r"headway launch slurm next\.yaml --after runs/my-run": "a job to wait for; tests/cluster/test_slurm.py",
    r"headway stop .*": "a run that is training; tests/e2e/test_stop_request.py",
    r"headway chat --url .*": "a server; tests/e2e/test_serve.py",
    r"headway data self-instruct .*": "a server with a model; tests/unit/text/self_instruct",
    r"headway data clean .* --simplified": "OpenCC, which is not among the developers' packages; tests/unit/text/test_clean.py",
    r"headway eval rewards .*kind: judge.*": "a server with a model; tests/unit/rewards/test_judge.py",
    r"headway eval rewards .*kind: code.*": "namespaces, which not every system has; tests/unit/rewards/test_code.py",
    r"headway eval harness .*": "lm-evaluation-harness, which is not among the developers' packages; tests/unit/eval/test_harness.py",
    r"headway eval (ppl|compare) .*--suite default.*": "data of a hub; tests/unit/eval",
    r"headway train .* --nnodes 2 .*": "two machines; tests/e2e/test_launch_nodes.py",
    r"headway supervise .*torchrun.*": "torchrun; tests/e2e/test_supervised_training.py",
}
"""Lines that are not run, as a pattern of the whole line, and what they need or who runs them."""

OTHER_TOOLS = {
    "HEADWAY_BOARD_TOKEN=$(openssl", "HEADWAY_SERVE_TOKEN=$(openssl", "cd", "curl", "docker", "export", "git", "llama-cli", "llama-server",
    "ollama", "python", "python3", "srun", "ssh", "torchrun", "vllm", "tensorboard", "openssl", ".venv/bin/pip", "sbatch", "scp", "rsync",
}  # fmt: skip
"""First words of lines that start another program."""

STAND_INS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "models/tiny",
    "Qwen/Qwen2.5-0.5B": "models/tiny",
    "Qwen/Qwen3-0.6B": "models/tiny",
    "Qwen/Qwen2.5-VL-3B-Instruct": "models/whole",
    "Qwen/Qwen3-30B-A3B": "models/mixture",
    "openai/gpt-oss-20b": "models/mixture",
}
"""Names of the hub -> models of the small world."""

SIZES = {
    "--vocab-size": "280", "--max-new-tokens": "2", "--max-samples": "2", "--window": "64", "--stride": "32", "--samples": "1",
    "--heldout": "2", "--bytes": "4KB", "--lengths": "128", "--max-memory": "300MB", "--steps": "4", "--kill-at": "2", "--n": "2",
    "--speculate-tokens": "2", "--top-k": "8", "--gpus": "none", "--device": "cpu", "--document": "1",
}  # fmt: skip
"""Values of options that would be slow or need a GPU."""
ADDED = {
    "generate": ["--max-new-tokens", "2"],
    "chat": ["--max-new-tokens", "2"],
    "eval ppl": ["--max-samples", "2", "--window", "64"],
    "eval compare": ["--max-samples", "2", "--window", "64", "--max-new-tokens", "2"],
    "eval long": [
        "--samples",
        "1",
        "--tasks",
        "key_value",
        "--depths",
        "0",
        "--chunk-tokens",
        "64",
    ],
    "eval attention": ["--samples", "1", "--task", "key_value", "--depths", "0"],
    "eval multimodal": ["--limit", "2", "--max-new-tokens", "2"],
    "sparsify": ["--samples", "1", "--depths", "0", "--lengths", "64"],
    "verify resume": ["--steps", "4", "--kill-at", "2"],
    "data synthetic-media": ["--samples", "8", "--heldout", "2"],
}
"""Options that a verb gets unless the line has them."""
OUTPUTS = ("--out", "--output", "--plot", "--report")
WRITTEN = ("data clean", "data dedup", "data synthetic-media")
"""Verbs whose last argument is their output."""
FEWER = {
    "parallel.context": "2", "parallel.tensor": "2", "parallel.expert": "2", "parallel.pipeline": "2", "data.seq_len": "64",
    "batch.rows_per_rank": "1", "batch.accumulate": "4", "steps": "1", "batch.tokens": "128",
}  # fmt: skip
RECIPES_OF_NODES = {
    "grpo": guide_workspace.POLICY,
    "node/nope_stage1": [
        "model.no_rope_layers=[3, 4, 5]",
        "train=[layers.3-5]",
        "data.train.0.limit=20",
    ],
    "node/nope_stage2": ["data.train.0.limit=20"],
    "node/extend-yarn": ["model.max_seq_len=128"],
    "node/prulong-masks": ["model.max_seq_len=128", "objective.window=16", "objective.sinks=4"],
    "node/prulong-masks-and-weights": [
        "model.max_seq_len=128",
        "objective.window=16",
        "objective.sinks=4",
    ],
    "node/prulong-sft": ["model.max_seq_len=128"],
}


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of the command lines in the page's blocks."""
    for kind, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if kind not in SHELL:
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if re.match(r"(\$ )?([A-Z_]+=\S+ )?[a-z.]", line):
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words and is_command(words):
                    yield words


def is_command(words: list[str]) -> bool:
    """Drawings, trees of files and log lines are no commands."""
    return words[0] in ("headway", "pip", "make") or words[0] in OTHER_TOOLS


def reason_for(words: list[str]) -> str | None:
    line = " ".join(words)
    return next((reason for pattern, reason in LISTED.items() if re.fullmatch(pattern, line)), None)


def lines_to_run() -> dict[str, str]:
    """Every different line of headway that is to be run, and the page it is on first."""
    lines: dict[str, str] = {}
    for page in PAGES:
        for words in command_lines(page):
            if words[0] == "headway" and reason_for(words) is None:
                lines.setdefault(shlex.join(words[1:]), page.name)
    return lines


GROUPS = ("config", "data", "doctor", "eval", "export", "launch", "masks", "tokenizer", "verify")


def verb_of(words: list[str]) -> str:
    """`train`, or two words such as `eval ppl`."""
    is_below = (
        words[0] in GROUPS
        and len(words) > 1
        and re.fullmatch(r"[a-z0-9-]+", words[1])
        and not words[1].startswith("-")
    )
    return " ".join(words[:2]) if is_below else words[0]


def replaced(words: list[str], option: str, value: str) -> list[str]:
    """The words with another value of an option."""
    return [
        value if before == option else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def smaller(words: list[str]) -> list[str]:
    """The same command with small sizes, stand-ins for names of the hub, and a CPU."""
    verb = verb_of(words)
    for name, local in STAND_INS.items():
        words = [re.sub(rf"(^|=){re.escape(name)}$", rf"\g<1>{local}", word) for word in words]
    for option, value in SIZES.items():
        words = replaced(words, option, value)
    added = ADDED.get(verb, [])
    for option, value in zip(added[::2], added[1::2], strict=True):
        if option not in words:
            words = [*words, option, value]
    if verb in ("launch k8s", "launch slurm") and "--dry-run" not in words:
        words = [*words, "--dry-run"]
    if verb == "plan" and "recipe.yaml" in words:
        return [*words, "batch.rows=256"]  # the recipe of a reader with so many GPUs
    if verb in ("train", "sparsify"):
        return small_training(words)
    return replaced(words, "--nproc", "2") if verb in ("doctor", "supervise") else words


def small_training(words: list[str]) -> list[str]:
    """A training command: one step of few tokens, at most four ranks, in a run folder of its own."""
    named = [word.partition("=")[0] for word in words if "=" in word and not word.startswith("-")]
    axes = [key for key in named if key in FEWER and key.startswith("parallel.")]
    # Without an axis to split over, ranks only divide the rows: tests/distributed has that, and each rank starts an interpreter here.
    words = replaced(words, "--nproc", ("1", "2", "4")[len(axes)])
    words = [
        f"{key}={FEWER[key]}" if (key := word.partition("=")[0]) in FEWER else word
        for word in words
    ]
    words = [word for word in words if not word.startswith(("epochs=", "device="))]
    recipe = next((word for word in words[1:] if "=" not in word and not word.startswith("-")), "")
    more = ["run.dir=out"]
    if recipe in ("recipe.yaml", "internlm-7b.yaml", "RECIPE"):  # small already
        more += ["model.experts={num: 4, per_token: 2}"] if "parallel.expert" in named else []
    elif recipe.startswith("multimodal/"):
        more += [
            setting
            for setting in guide_workspace.FAST
            if not setting.startswith(("data.seq_len", "data.packing", "batch"))
        ]
        more += [
            "batch={rows: 4, micro_rows: 4}",
            "model.aligner.dim=16" if recipe == "multimodal/align" else "data.seq_len=512",
        ]
        if recipe == "multimodal/native":
            more += ["multimodal.native.max_pixels=16384"]
    else:
        more += guide_workspace.FAST
        more += (
            guide_workspace.SCRATCH
            if recipe in ("pretrain", "laptop/pretrain", "laptop/moe")
            else []
        )
    more += RECIPES_OF_NODES.get(recipe, [])
    return [
        *words,
        *(
            setting
            for setting in more
            if setting.partition("=")[0] not in named or setting.startswith(("epochs", "device"))
        ),
    ]


def clear_outputs(words: list[str]) -> None:
    """Remove what the small world has where the command writes."""
    verb = verb_of(words)
    paths = [word for before, word in zip(["", *words], words, strict=False) if before in OUTPUTS]
    if verb in WRITTEN:
        paths.append([*takewhile(lambda word: not word.startswith("-"), words[2:])][-1])
    for name in paths:
        path = Path(name)
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)


def run_line(words: list[str]) -> str:
    """Run one command in small; returns what went wrong, empty if nothing did."""
    command = smaller(expanded(words))
    clear_outputs(command)
    if command[0] == "serve":
        return serve(command)
    done = headway(*command, timeout=280)
    # `doctor` reports what is wrong with the machine the tests run on, and an answer of a random model is not valid by a schema.
    allowed = (0, 1) if command[0] == "doctor" or "--schema" in command else (0,)
    if done.returncode in allowed and "Traceback" not in done.stderr:
        return ""
    return f"headway {shlex.join(words)}\n  as headway {shlex.join(command)}\n  exit code {done.returncode}: {done.stderr.strip()[-700:]}"


def expanded(words: list[str]) -> list[str]:
    """Globs as a shell expands them."""
    expanded_words: list[str] = []
    for word in words:
        matches = (
            sorted(str(path) for path in Path().glob(word))
            if "*" in word and "=" not in word
            else []
        )
        expanded_words += matches or [word]
    return expanded_words


def serve(command: list[str]) -> str:
    """Start a server, wait until it listens, and stop it."""
    server = Forked(*command, "--port", "0", "--cache-gib", "0.05", "--device", "cpu", "--json")
    end = time.monotonic() + 120
    said = ""
    while server.poll() is None and time.monotonic() < end and '"url"' not in said:
        time.sleep(0.02)
        said = os.pread(server._files[0], 1 << 16, 0).decode()
    server.send_signal(signal.SIGTERM)
    server.wait(60)
    return (
        "" if '"url"' in said else f"headway {shlex.join(command)}: {server.stderr.strip()[-700:]}"
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The small world, made once."""
    here = Path.cwd()
    folder = tmp_path_factory.mktemp("guides") / "world"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        patched.syspath_prepend(str(ROOT / "examples" / "my_lab"))
        guide_workspace.build(folder)
        os.chdir(here)
        yield folder


def check_lines(
    lines: list[str], world: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str] = []
    for number, line in enumerate(lines):
        guide_workspace.copy_to(world, folder / str(number))
        monkeypatch.chdir(folder / str(number))
        problems += filter(None, [run_line(shlex.split(line))])
        shutil.rmtree(folder / str(number), ignore_errors=True)
    assert not problems, "\n\n".join(problems)


SAID = (
    "train dpo objective.kind=orpo",
    "train dpo objective.kind=simpo",
    "train sft adapter.base=nf4 adapter.rank=4",
    "train kto",
    "train reward",
)
"""What the front page says in a sentence."""
HEAVY = r"serve .*|doctor .*--nproc.*"
"""Lines of the front page that take long: with the guides."""


def test_every_line_of_the_front_page_works(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        line
        for line, page in lines_to_run().items()
        if page == "README.md" and not re.fullmatch(HEAVY, line)
    ]
    assert len(lines) >= 15
    check_lines([*lines, *SAID[:2]], world, tmp_path, monkeypatch)


@pytest.mark.slow
def test_what_the_front_page_says_in_a_sentence_works(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_lines([*SAID[2:]], world, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", sorted(set(lines_to_run().values())))
def test_every_line_of_a_guide_works(
    page: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        line
        for line, first in lines_to_run().items()
        if first == page and (page != "README.md" or re.fullmatch(HEAVY, line))
    ]
    check_lines(lines, world, tmp_path, monkeypatch)


def test_every_line_is_run_or_listed_and_every_entry_is_needed() -> None:
    headway_words = [
        words for page in PAGES for words in command_lines(page) if words[0] == "headway"
    ]
    listed = {" ".join(words) for words in headway_words if reason_for(words) is not None}
    unused = [
        pattern for pattern in LISTED if not any(re.fullmatch(pattern, line) for line in listed)
    ]
    assert not unused, f"no page has such a line any more: {unused}"
    assert len(lines_to_run()) >= 150
    assert len(listed) <= 60


def test_no_line_of_a_block_is_overlooked() -> None:
    """A line that begins with the name of a program and is no command of a known tool would be checked by nobody."""
    for page in PAGES:
        for kind, block in FENCE.findall(page.read_text(encoding="utf-8")):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines() if kind in SHELL[1:] else ():
                if re.match(r"[a-z./]+ ", line) and not line.startswith("#"):
                    assert is_command(shlex.split(line, comments=True)[:1]), f"{page.name}: {line}"


def test_installation_lines_name_extras_and_targets_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    seen = 0
    for page in PAGES:
        for words in command_lines(page):
            if words[0] == "make":
                assert words[1] in targets, f"{page.name}: {words}"
            if words[0] == "pip":
                seen += 1
                assert words[1] == "install", words
                for named in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
                    assert set(named.split(",")) <= set(extras), f"{page.name}: {words}"
    assert seen > 8
