"""Writes expected.json: prompts, draws and scores of HELMET's recall tasks by HELMET's own code, and the small files they come from.

Not run by the tests. In an environment with torch, transformers and datasets:

    git clone https://github.com/princeton-nlp/HELMET && python tests/golden/helmet/make.py HELMET

expected.json was made from commit 4526dfbdc512bd9ff721da336bff4e3e75ecfd27. The metrics that recall does not use need packages that
are replaced here.
"""

import hashlib
import json
import random
import sys
import types
import uuid
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEED = 42
LENGTH = 8192
LINES = 7
DRAWN = 4
DATASETS = {
    "helmet_json_kv": ("json_kv", "json_kv/test_k105_dep6.jsonl"),
    "helmet_niah_mk_2": ("ruler_niah_mk_2", f"ruler/niah_multikey_2/validation_{LENGTH}.jsonl"),
    "helmet_niah_mk_3": ("ruler_niah_mk_3", f"ruler/niah_multikey_3/validation_{LENGTH}.jsonl"),
    "helmet_niah_mv": ("ruler_niah_mv", f"ruler/niah_multivalue/validation_{LENGTH}.jsonl"),
}


def write_files(folder: Path) -> None:
    """A few questions of each task, in the form of HELMET's files and far shorter."""
    rng = random.Random(0)

    def name() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    for task, (_, file) in DATASETS.items():
        lines: list[dict[str, Any]] = []
        for number in range(LINES):
            if task == "helmet_json_kv":
                pairs = [(name(), name()) for _ in range(6)]
                key, value = pairs[number % len(pairs)]
                lines.append(
                    {
                        "context": "JSON data:\n" + json.dumps(dict(pairs), indent=1),
                        "question": key,
                        "answer": value,
                        "demos": [[name(), name()] for _ in range(3)],
                        "num_kvs": len(pairs),
                    }
                )
                continue
            kind = "uuids" if task == "helmet_niah_mk_3" else "numbers"
            values = [name() if kind == "uuids" else str(rng.randint(10**6, 10**7 - 1)) for _ in range(4)]  # fmt: skip
            asked = values if task == "helmet_niah_mv" else values[:1]
            query = f"word-{number}"
            context = "\n".join(
                f"One of the special magic {kind} for {query} is: {value}." for value in values
            )
            lines.append(
                {
                    "index": number,
                    "context": context,
                    "query": query,
                    "type_needle_v": kind if task == "helmet_niah_mv" else kind[:-1],
                    "outputs": asked,
                }
            )
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))


def texts_for(answers: list[str]) -> list[str]:
    """What a model may write: right, wrong, in other words."""
    first = answers[0]
    return [
        f" {first}",
        f" {first.upper()}.\n\nKey: x\nCorresponding value: y",
        f" the value is\nCorresponding value: {first}",
        f" {first[:-1]}",
        f" {' '.join(answers)}",
        f" {', '.join(answers[1:])}",
        f" {first.replace('-', '')} a",
        "",
        "\n",
    ]


def replace_packages() -> None:
    """Stand-ins for what only other metrics need."""

    class Scorer:
        rouge_types = ()

        def __init__(self, *arguments: object, **options: object) -> None: ...

        def score(self, **texts: str) -> dict[str, float]:
            return {}

    rouge = types.ModuleType("rouge_score")
    rouge.rouge_scorer = types.ModuleType("rouge_score.rouge_scorer")  # pyright: ignore[reportAttributeAccessIssue]
    rouge.rouge_scorer.RougeScorer = Scorer
    sys.modules["rouge_score"] = rouge
    sys.modules["pytrec_eval"] = types.ModuleType("pytrec_eval")


def main() -> None:
    (checkout,) = sys.argv[1:]
    replace_packages()
    sys.path.insert(0, checkout)
    import data  # pyright: ignore[reportMissingImports]

    folder = HERE / "data"
    write_files(folder)
    tasks: dict[str, Any] = {}
    for task, (dataset, file) in DATASETS.items():
        options = types.SimpleNamespace(shots=2, max_test_samples=DRAWN, seed=SEED)
        loaded = data.load_data(options, dataset, str(folder / file), "")
        questions: list[dict[str, Any]] = []
        for sample in loaded["data"]:
            prompt = loaded["prompt_template"].format(**sample)
            answers = sample["answer"]
            if isinstance(answers, str):
                answers = [answers]
            prefix = loaded["system_template"].format(**sample)
            scores: list[float] = []
            for text in texts_for(answers):
                metrics, _ = loaded["post_process"]({"output": prefix + text}, sample)
                name = "substring_exact_match" if dataset == "json_kv" else "ruler_recall"
                scores.append(float(metrics[name]))
            questions.append(
                {
                    "sha256": hashlib.sha256(prompt.encode()).hexdigest(),
                    "end": prompt[-120:],
                    "user": hashlib.sha256(
                        loaded["user_template"].format(**sample).encode()
                    ).hexdigest(),
                    "texts": texts_for(answers),
                    "scores": scores,
                }
            )
        tasks[task] = questions
    content = {"seed": SEED, "length": LENGTH, "drawn": DRAWN, "tasks": tasks}
    (HERE / "expected.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
