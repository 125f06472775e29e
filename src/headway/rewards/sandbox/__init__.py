"""Programs that nobody trusts, run apart from everything: a program and its inputs come in, the
values and texts that it gave go out. The verdict on them is formed elsewhere.

    worker --pipes--> launcher --fork--> builder --fork--> first process --fork, exec--> program
    (verdict)         (a fresh           (namespaces,      (its end kills                (program.py)
                       Python)            mounts)           all others)

    scorer.py      what the worker does: the tests of a record, the verdict on an answer
    trials.py      tests in the formats of data sets, as steps without expected values, and verdicts
    expression.py  computes the trusted part of an assert
    plain.py       values that come out of a sandbox
    client.py      the worker's end of the launcher
    launcher.py    the launcher: namespaces, mounts, limits, the end of a program
    kernel.py      the calls to Linux
    program.py     what Python runs inside, beside the program

Only the worker has expected values. The launcher is a new process, not a fork of the worker, so
that no memory below it holds them.
"""
