"""Writes expected.json: what RULER's own generators make of the small files in `files`, which this script writes first.

Not run by the tests. In an environment with headway and scipy:

    git clone https://github.com/NVIDIA/RULER && python tests/golden/ruler/make.py RULER

expected.json was made from commit c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a. Each of RULER's scripts runs as it is, up to its `main`;
then its functions are called with a seed and a size. What is replaced:

- the tokenizer: a token is a word;
- wonderwords: its lists are those in `files`;
- nltk: a sentence ends at a stop and a blank, as in the essays of `files`;
- numpy's random numbers: `randint` draws from `random`, so that one seed decides all.
"""

import hashlib
import json
import random
import re
import runpy
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy

from headway.config.load import read_yaml

HERE = Path(__file__).parent
FILES = HERE / "files"
SEEDS = (0, 1, 7)
SIZES = {
    "niah": (6, 40),
    "variable_tracking": (6, 30),
    "common_words_extraction": (20, 45),
    "freq_words_extraction": (60, 900),
    "qa": (3, 9),
}
"""How many lines, words or documents: of every task in these two sizes."""
LENGTHS = (2048, 8192)
"""Of common words, whose lists are smaller below 4,096 tokens, and of frequent words, whose vocabulary grows."""
QUESTIONS = 4
EXAMPLE_LINES = 7
EXAMPLE_SEED = 42


def write_files() -> None:
    """Words, essays and questions of this script's own."""
    FILES.mkdir(exist_ok=True)
    for kind in ("noun", "adjective", "verb"):
        lines = "".join(f"{kind}{number:02}\n" for number in range(40))
        (FILES / f"{kind}list.txt").write_text(lines)
    sentences = [f"Line {number} of the essay has some words." for number in range(30)]
    (FILES / "PaulGrahamEssays.json").write_text(json.dumps({"text": " ".join(sentences)}))
    words = {str(number): f"large{number}" for number in range(200)}
    (FILES / "english_words.json").write_text(json.dumps(words))
    squad = [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {part} of article {article}.",
                    "qas": [
                        {
                            "question": f"What is {part} of {article}?",
                            "is_impossible": part == 2,
                            "answers": [{"text": f"answer {article} {part}"}, {"text": "other"}],
                        }
                    ],
                }
                for part in range(4)
            ]
        }
        for article in range(3)
    ]
    (FILES / "squad.json").write_text(json.dumps({"data": squad}))
    hotpot = [
        {
            "question": f"Question {number}?",
            "answer": f"answer {number}",
            "context": [[f"Title {number} {part}", ["One. ", "Two."]] for part in range(2)],
        }
        for number in range(6)
    ]
    (FILES / "hotpotqa.json").write_text(json.dumps(hotpot))


class Words:
    """A tokenizer whose tokens are words."""

    def text_to_tokens(self, text: str) -> list[str]:
        return text.split()


def stand_ins() -> dict[str, types.ModuleType]:
    """Modules that RULER's scripts import and that are not needed for what they make."""
    tokenizer = types.ModuleType("tokenizer")
    tokenizer.select_tokenizer = lambda *_: Words()  # pyright: ignore[reportAttributeAccessIssue]
    wonderwords = types.ModuleType("wonderwords")
    wonderwords.random_word = types.SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        _get_words_from_text_file=lambda name: (FILES / name).read_text().split()
    )
    nltk = types.ModuleType("nltk.tokenize")
    nltk.sent_tokenize = lambda text: re.split(r"(?<=\.) ", text)  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "tokenizer": tokenizer,
        "wonderwords": wonderwords,
        "nltk": types.ModuleType("nltk"),
        "nltk.tokenize": nltk,
    }


@contextmanager
def script(scripts: Path, kind: str, **options: object) -> Iterator[dict[str, Any]]:
    """The functions of one of RULER's scripts, run with these options."""
    with patch.object(sys, "path", [str(scripts / "synthetic"), str(scripts), *sys.path]):
        constants = runpy.run_path(str(scripts / "synthetic/constants.py"))["TASKS"][kind]
        arguments = {
            "save_dir": "unused",
            "save_name": "unused",
            "tokenizer_path": "unused",
            "max_seq_length": 8192,
            "num_samples": 1,
            "tokens_to_generate": constants["tokens_to_generate"],
            # As scripts/data/prepare.py joins them for a model without a template.
            "template": constants["template"] + constants["answer_prefix"],
            **options,
        }
        argv = [kind]
        for name, value in arguments.items():
            argv += [f"--{name}", str(value)]
        with (
            patch.object(sys, "argv", argv),
            patch.object(numpy.random, "randint", random.randrange),
        ):
            yield runpy.run_path(str(scripts / f"synthetic/{kind}.py"))


def summary(task: str, seed: int, size: int, made: tuple[str, list[str]], **more: Any) -> dict[str, Any]:  # fmt: skip
    prompt, answers = made
    return {
        "task": task,
        "seed": seed,
        "size": size,
        **more,
        "sha256": hashlib.sha256(prompt.encode()).hexdigest(),
        "begin": prompt[:60],
        "end": prompt[-60:],
        "answers": list(answers),
    }


def seeded(seed: int, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    random.seed(seed)
    return make(*arguments, **named)


def main() -> None:
    (checkout,) = sys.argv[1:]
    write_files()
    sys.modules.update(stand_ins())
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        # The scripts read the files beside them.
        scripts = Path(place) / "data"
        shutil.copytree(Path(checkout) / "scripts/data", scripts)
        for name in ("PaulGrahamEssays", "english_words", "squad", "hotpotqa"):
            shutil.copy(FILES / f"{name}.json", scripts / "synthetic/json")
        tasks = read_yaml(Path(checkout) / "scripts/synthetic.yaml")
        example: dict[str, Any] = {}
        for task, settings in tasks.items():
            kind = settings["task"]
            for length in LENGTHS if kind in ("common_words_extraction", "freq_words_extraction") else LENGTHS[-1:]:  # fmt: skip
                with script(scripts, kind, max_seq_length=length, **settings["args"]) as made:
                    make = made["generate_input_output"]
                    for seed in SEEDS:
                        for size in SIZES[kind]:
                            more: dict[str, Any] = {"length": length}
                            if kind == "variable_tracking":
                                solved = seeded(EXAMPLE_SEED, make, EXAMPLE_LINES, 1, 4, is_icl=True)  # fmt: skip
                                solved = f"{solved[0]} {' '.join(solved[1])}\n"
                                text, answers = seeded(seed, make, size, 1, 4)
                                # As `sys_vartrack_w_noise_random` joins the two.
                                result = (f"{made['randomize_icl'](solved)}\n{text}", answers)
                            elif kind == "freq_words_extraction":
                                room = length - 50
                                text, answers, _ = seeded(
                                    seed, make, 10**9, num_words=size, vocab_size=room // 50
                                )
                                result = (text, answers)
                            elif kind == "qa":
                                more["question"] = seed % QUESTIONS
                                result = seeded(seed, make, seed % QUESTIONS, size)
                            else:
                                result = seeded(seed, make, size)
                            cases.append(summary(task, seed, size, result, **more))
                    if kind == "variable_tracking":
                        random.seed(EXAMPLE_SEED)
                        (solved,) = made["sys_vartrack_w_noise_random"](
                            num_samples=1, max_seq_length=500, incremental=5, num_chains=1, num_hops=4
                        )  # fmt: skip
                        example = {"lines": solved["input"].count("The grass is green.")}
    head = json.dumps({"example": example, "example_lines": EXAMPLE_LINES})
    lines = ",\n".join(map(json.dumps, cases))
    (HERE / "expected.json").write_text(f'{head[:-1]}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
