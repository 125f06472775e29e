"""Fine-tune a model with several learning rates, score and ask the best one, and export it: python sweep.py MODEL OUT"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import headway as hw


def sums(first: int, last: int) -> Iterator[dict[str, str]]:
    for number in range(first, last):
        yield {"prompt": f"What is {number} plus 1?", "response": f"{number + 1}."}


class Progress(hw.Callback):
    def on_validate(self, step: int, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        print(f"step {step}: valid loss {metrics['valid']['loss']:.3f}")


def main(model: str, out: str, steps: int = 100) -> None:
    settings = {"init.from": model, "run.dir": out, "data.seq_len": 128}
    base = hw.Recipe.load("laptop/sft", settings, steps=steps)
    runs: list[hw.TrainResult] = []
    for lr in (1e-3, 3e-4):
        recipe = base.with_({"run.name": f"lr-{lr:g}", "optim.lr": lr})
        shown = [Progress()]
        runs.append(hw.train(recipe, data=sums(0, 200), valid=sums(200, 240), callbacks=shown))
    best = min(runs, key=lambda run: run.last_valid_loss or float("inf"))
    print(best)
    print(hw.evaluate(best, {"sums": [{"text": "7 plus 1 is 8."}], "letters": [{"text": "abc"}]}))
    question = [{"role": "user", "content": "What is 3 plus 1?"}]
    print(hw.load_model(best).chat(question, max_new_tokens=8).text)
    print(hw.export(best, f"{out}/best", dtype="bfloat16"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
