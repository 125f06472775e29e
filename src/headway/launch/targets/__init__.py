"""Where a job can run.

`KINDS` names the modules that `headway launch` knows; each has `build() -> Target` (base.py).
"""

KINDS = ("k8s", "local", "slurm", "ssh")
