"""Where the tasks of data verbs run.

`KINDS` names the modules that `--on KIND` may choose: each has `build(suffix, workers)`,
where `suffix` is the text after `KIND:`.

--on local                  processes of this machine
--on ray[://HOST:PORT]      a Ray cluster; without an address one on this machine
--on slurm[:KEY=VALUE,...]  array jobs, with these options of sbatch
"""

KINDS = ("local", "ray", "slurm")
