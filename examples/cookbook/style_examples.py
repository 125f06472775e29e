"""200 questions and answers in a style, and 40 questions held out: SOURCE.jsonl -> style.jsonl, questions.jsonl."""

import json
import sys
from pathlib import Path

EXAMPLES = 200
HELD_OUT = 40
LONGEST_ANSWER = 60

pairs: list[tuple[str, str]] = []
for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
    question, answer = (turn["content"] for turn in json.loads(line)["messages"][:2])
    if len(answer) <= LONGEST_ANSWER:
        pairs.append((question, answer))

with open("style.jsonl", "w", encoding="utf-8") as file:
    for question, answer in pairs[:EXAMPLES]:
        # The style: an answer begins with "Well:" and ends with "Clear?"
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"Well: {answer} Clear?"},
        ]
        file.write(json.dumps({"messages": turns}) + "\n")

with open("questions.jsonl", "w", encoding="utf-8") as file:
    for question, _ in pairs[EXAMPLES : EXAMPLES + HELD_OUT]:
        turns = [{"role": "user", "content": question}]
        file.write(json.dumps({"messages": turns}) + "\n")
