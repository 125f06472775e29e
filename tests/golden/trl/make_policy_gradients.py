"""Writes policy_gradients.json: every gradient of one case of make_policy.py, entry by entry, by TRL's own GRPOTrainer._compute_loss.

Not run by the tests. In the environment of make.py: python tests/golden/trl/make_policy_gradients.py
The case has most of what a loss can have: a higher upper clip, a reference, importance sampling and an answer without loss.
"""

import json
import tempfile
from pathlib import Path

from make_policy import CASES, batch, make_trainer

CASE = 10
DIGITS = 9
"""Of an entry; those of fp32."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASES[CASE], folder)
        loss = trainer._compute_loss(trainer.model, batch(CASES[CASE], trainer))
        loss.backward()
        gradients = {
            name: p.grad.flatten().tolist() for name, p in trainer.model.named_parameters()
        }
    lines: list[str] = []
    for name, values in sorted(gradients.items()):
        entries = ", ".join(f"{value:.{DIGITS}g}" for value in values)
        lines.append(f'"{name}": [{entries}]')
    content = (
        f'{{"case": {json.dumps(CASES[CASE])},\n"loss": {float(loss.detach())},\n"gradients": {{\n'
    )
    content += ",\n".join(lines) + "\n}}\n"
    Path(__file__).with_name("policy_gradients.json").write_text(content)


if __name__ == "__main__":
    main()
