"""Rewards: what an answer of a policy is worth. `KINDS` names the modules that an entry of a
recipe's `reward` may choose; a file such as ./mine.py is one of the user.

    base.py            settings, answers and scores; how a recipe's list is read
    panel.py           all rewards of a run: scores in order, failures, the digest
    kept.py            results that were computed before, on the disk
    worker.py          processes with limits that run what may hang or crash
    worker_process.py  the other end of them, and `scoring.py` what they compute
    source_digest.py   what a user's code is made of
    sandbox/           programs of answers, run apart from everything
"""

SETTING = "reward"
"""The setting of a recipe that lists rewards."""

KINDS = ("code", "format", "judge", "length", "math", "model", "number")
