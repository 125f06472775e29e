"""Ratings as a chat page or a spreadsheet would export them: PAIRS.jsonl -> ratings.jsonl with prompt, completion, label."""

import json
import sys
from pathlib import Path

RATED = 300

with open("ratings.jsonl", "w", encoding="utf-8") as file:
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()[:RATED]:
        pair = json.loads(line)
        for completion, label in ((pair["chosen"], True), (pair["rejected"], False)):
            rating = {"prompt": pair["prompt"], "completion": completion, "label": label}
            file.write(json.dumps(rating) + "\n")
