"""sbatch, squeue and scancel without a cluster: array elements are processes of this machine. Put `install(folder)` on the PATH.

FOLDER/jobs/ID/pids      the elements' process ids, by line; a process that is gone has left the queue
FOLDER/jobs/ID/command   the words sbatch was called with
"""

import sys
from pathlib import Path

SBATCH = """#!{python}
import os, subprocess, sys
jobs = "{folder}/jobs"
words = sys.argv[1:]
options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--") and words.index(word) < len(words))
at = next(place for place, word in enumerate(words) if not word.startswith("-"))
if "refused" in options.get("partition", ""):
    sys.exit("sbatch: error: invalid partition specified: refused")
number = str(1 + len(os.listdir(jobs)))
os.mkdir(jobs + "/" + number)
with open(jobs + "/" + number + "/command", "w") as file:
    file.write("\\n".join(words))
last = int(options["array"].partition("%")[0].partition("-")[2])
pids = []
for element in range(last + 1):
    environment = dict(os.environ, SLURM_ARRAY_TASK_ID=str(element), SLURM_JOB_ID=number)
    log = open(options["output"].replace("%a", str(element)), "ab")
    streams = {{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}}
    child = subprocess.Popen(["/bin/sh", *words[at:]], env=environment, start_new_session=True, **streams)
    pids.append(str(child.pid))
with open(jobs + "/" + number + "/pids", "w") as file:
    file.write("\\n".join(pids))
print(number)
"""
SQUEUE = """#!{python}
import os, sys
job = next((word.partition("=")[2] for word in sys.argv if word.startswith("--jobs=")), None)
if job is None:
    sys.exit(0)
for element, pid in enumerate(open("{folder}/jobs/" + job + "/pids").read().split()):
    try:
        state = open("/proc/" + pid + "/stat").read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        continue
    if state != "Z":
        print(element)
"""
SCANCEL = """#!{python}
import os, signal, sys
name = sys.argv[1].replace("--name=", "--job-name=")
for job in os.listdir("{folder}/jobs"):
    folder = "{folder}/jobs/" + job
    if name not in open(folder + "/command").read().splitlines():
        continue
    for pid in open(folder + "/pids").read().split():
        try:
            os.killpg(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    with open(folder + "/cancelled", "w"):
        pass
"""


def install(folder: Path) -> Path:
    """Write the commands; returns their folder."""
    (folder / "bin").mkdir()
    (folder / "jobs").mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL)):
        path = folder / "bin" / name
        path.write_text(text.format(python=f"{sys.executable} -S", folder=folder), encoding="utf-8")
        path.chmod(0o755)
    return folder / "bin"
