"""kubectl without a cluster: pods are processes of this machine. Put `install(folder)` on the PATH.

FOLDER/calls              the words of every call, a JSON list on each line
FOLDER/objects/NAME.json  the JobSet as it was created, with the status that a test writes into it
FOLDER/pods/NAME-I.json   pod I: its phase and exit code; FOLDER/pods/NAME-I.log what it printed
FOLDER/start              if it exists, `create` starts the containers' commands; else pods stay pending
"""

import json
import sys
from pathlib import Path
from typing import Any

POD = """
import json, subprocess, sys
path = sys.argv[1]

def note(phase, code, pid):
    with open(path + ".json", "w") as file:
        json.dump({"phase": phase, "exitCode": code, "pid": pid}, file)

with open(path + ".log", "ab") as log:
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
note("Running", None, child.pid)
code = child.wait()
note("Succeeded" if code == 0 else "Failed", code, None)
"""
"""Runs the command of a container and notes how it ended: pod FOLDER/pods/NAME-I, then the words."""
KUBECTL = """#!{python}
import json, os, signal, subprocess, sys, time
folder = "{folder}"
words = [word for word in sys.argv[1:] if not word.startswith(("--context=", "--namespace="))]
with open(folder + "/calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")

def read(path):
    with open(path) as file:
        return json.load(file)

def write(path, value):
    with open(path + ".tmp", "w") as file:
        json.dump(value, file)
    os.replace(path + ".tmp", path)

def pods(name):
    names = sorted(pod for pod in os.listdir(folder + "/pods") if pod.startswith(name) and pod.endswith(".json"))
    return [folder + "/pods/" + pod for pod in names]

def find(name):
    path = folder + "/objects/" + name + ".json"
    if not os.path.exists(path):
        sys.exit('Error from server (NotFound): jobsets.jobset.x-k8s.io "' + name + '" not found')
    return path

def signal_pods(name, number):
    for path in pods(name):
        pid = read(path).get("pid")
        if pid:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

if words[0] == "create":
    jobset = json.load(sys.stdin)
    name = jobset["metadata"]["name"]
    if os.path.exists(folder + "/refuse"):
        sys.exit('Error from server (Forbidden): jobsets is forbidden: User "me" cannot create resource')
    jobset["status"] = {{"restarts": 0, "conditions": []}}
    write(folder + "/objects/" + name + ".json", jobset)
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    template = spec["template"]
    container = template["spec"]["containers"][0]
    recipe = folder + "/" + name + ".yaml"
    with open(recipe, "w") as file:
        file.write(template["metadata"]["annotations"]["headway/recipe"])
    for index in range(spec["completions"]):
        pod = {{"phase": "Pending", "exitCode": None, "pid": None}}
        if os.path.exists(folder + "/start"):
            command = []
            for word in container["command"]:
                word = word.replace("/headway/recipe.yaml", recipe).replace("$(JOB_COMPLETION_INDEX)", str(index))
                # There is no name service: every pod is on this machine.
                host = name + "-node-0-0." + name
                command.append(word.replace(host, "127.0.0.1"))
            path = folder + "/pods/" + name + "-" + str(index)
            write(path + ".json", pod)
            subprocess.Popen([sys.executable, folder + "/pod", path, sys.executable, "-m", *command], start_new_session=True,
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        else:
            write(folder + "/pods/" + name + "-" + str(index) + ".json", pod)
    print("jobset.jobset.x-k8s.io/" + name + " created")
elif words[:2] == ["get", "jobset"]:
    path = find(words[2])
    jobset = read(path)
    states = [read(pod) for pod in pods(words[2])]
    if states and not jobset["status"]["conditions"] and not jobset["spec"].get("suspend"):
        if all(state["phase"] == "Succeeded" for state in states):
            jobset["status"]["conditions"] = [{{"type": "Completed", "status": "True", "message": "jobset completed successfully"}}]
        elif any(state["phase"] == "Failed" for state in states):
            jobset["status"]["conditions"] = [{{"type": "Failed", "status": "True", "message": "jobset failed due to one or more job failures"}}]
    print(json.dumps(jobset))
elif words[:2] == ["get", "pods"]:
    name = words[words.index("-l") + 1].partition("=")[2]
    items = []
    for number, path in enumerate(pods(name)):
        state = read(path)
        status = {{"phase": state["phase"]}}
        if state["phase"] == "Pending":
            reason = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
            status["conditions"] = [{{"type": "PodScheduled", "status": "False", "message": reason}}]
        if state["exitCode"] is not None:
            status["containerStatuses"] = [{{"state": {{"terminated": {{"exitCode": state["exitCode"]}}}}}}]
        items.append({{"spec": {{"nodeName": "node-" + str(number) if state["phase"] != "Pending" else None}}, "status": status}})
    print(json.dumps({{"items": items}}))
elif words[0] == "logs":
    name = words[words.index("-l") + 1].partition("=")[2]
    tail = next((int(word.partition("=")[2]) for word in words if word.startswith("--tail=")), None)
    for path in pods(name):
        log = path.removesuffix(".json") + ".log"
        pod = os.path.basename(path).removesuffix(".json")
        if "--follow" in words:
            while read(path)["phase"] == "Running":
                time.sleep(0.05)
        lines = open(log).read().splitlines() if os.path.exists(log) else []
        # Every line has a time of its own; --since-time is given in whole seconds, so it leaves out none here.
        stamped = [f"2026-01-01T00:00:00.{{number:09d}}Z {{line}}" for number, line in enumerate(lines)]
        for line in stamped if tail is None else stamped[max(0, len(lines) - tail):]:
            print("[pod/" + pod + "/headway] " + line)
elif words[0] == "patch":
    path = find(words[2])
    jobset = read(path)
    jobset["spec"].update(json.loads(words[words.index("-p") + 1])["spec"])
    write(path, jobset)
    signal_pods(words[2], signal.SIGTERM)
elif words[0] == "delete":
    signal_pods(words[2], signal.SIGKILL)
    os.remove(find(words[2]))
else:
    sys.exit("error: unknown command " + words[0])
"""


def install(folder: Path) -> Path:
    """Write kubectl; the folder to put first on the PATH comes back."""
    for name in ("bin", "objects", "pods"):
        (folder / name).mkdir(parents=True)
    (folder / "pod").write_text(POD, encoding="utf-8")
    program = folder / "bin" / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable, folder=folder), encoding="utf-8")
    program.chmod(0o755)
    return folder / "bin"


def calls(folder: Path) -> list[list[str]]:
    """The words of every call so far."""
    path = folder / "calls"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def change_status(folder: Path, name: str, **status: Any) -> None:
    """Write into the status of a JobSet what its controller would."""
    path = folder / "objects" / f"{name}.json"
    jobset = json.loads(path.read_text())
    jobset["status"].update(status)
    path.write_text(json.dumps(jobset))


def change_pods(folder: Path, name: str, phase: str, exit_code: int | None = None) -> None:
    """Let every pod of a JobSet be in a phase."""
    for path in (folder / "pods").glob(f"{name}-*.json"):
        path.write_text(json.dumps({"phase": phase, "exitCode": exit_code, "pid": None}))
