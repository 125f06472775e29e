"""Runs on the other machine, sent there over ssh: lists runs below one folder and reads their
files. Any Python from 3.6 on will do.

Requests are lines of JSON on standard input; an answer is a line of JSON with the size of what
follows, then that many bytes, compressed. It reads files of known kinds below the folder and
nothing else; a link that leads out of the folder is not followed. It writes nothing.
"""

import json
import os
import re
import stat
import sys
import time
import zlib

SKIPPED = {
    "checkpoints",
    "final",
    "logs",
    "tensorboard",
    "tokenizer",
    "node_modules",
    "wandb",
    "mlruns",
    "code",
    "__pycache__",
}
TOP = (
    "recipe.yaml",
    "metrics.jsonl",
    "events.jsonl",
    "train.log",
    "summary.json",
    "command.txt",
    "environment.json",
    "logs/supervisor.json",
)
SHOWN = (".png", ".jpg", ".jpeg", ".webp", ".tsv")
STEP = re.compile(r"(step|snapshot)-\d{8,}$")
# board/runs.py looks below folders of this machine with SKIPPED and these three. They stand here,
# because this file is sent alone and can import nothing of headway.
MAX_DEPTH = 6
# A look below a root ends there: a home folder is no place for runs.
MAX_FOLDERS = 50000
MAX_RUNS = 2000
MAX_FILES = 200
MAX_BEATS = 64
SHOWN_DEPTH = 3
FIND_SECONDS = 5
LARGEST_READ = 8 << 20


def is_kind(path):
    """Whether a path below a run folder may be read."""
    name = path.rsplit("/", 1)[-1]
    return (
        path in TOP
        or name in ("report.md", "results.json")
        or name.endswith(SHOWN)
        or path.startswith("logs/heartbeat/rank-")
    )


def entries(folder):
    """Names of the files and of the folders in a folder; links to folders are neither."""
    files = []
    folders = []
    try:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif entry.is_file():
                files.append(entry.name)
    except OSError:
        pass
    return sorted(files), sorted(folders)


def find(root):
    """Paths of run folders below the root."""
    runs = []
    # Breadth first, as in find_runs of board/runs.py.
    queue = [("", 0)]
    num_folders = 0
    while queue and len(runs) < MAX_RUNS and num_folders < MAX_FOLDERS:
        folder, depth = queue.pop(0)
        num_folders += 1
        files, folders = entries(os.path.join(root, folder))
        if "metrics.jsonl" in files or ("recipe.yaml" in files and "events.jsonl" in files):
            runs.append(folder)

        if depth < MAX_DEPTH:
            queue += [
                (os.path.join(folder, name), depth + 1)
                for name in folders
                if name[0] != "." and name not in SKIPPED and not STEP.match(name)
            ]

    return runs


def shown(folder):
    """Reports, pictures and tables below a run folder."""
    paths = []
    queue = [("", 0)]
    while queue and len(paths) < MAX_FILES:
        subfolder, depth = queue.pop(0)
        files, folders = entries(os.path.join(folder, subfolder))
        paths += [
            os.path.join(subfolder, name)
            for name in files
            if name in ("report.md", "results.json") or name.endswith(SHOWN)
        ]
        if depth < SHOWN_DEPTH:
            queue += [
                (os.path.join(subfolder, name), depth + 1)
                for name in folders
                if name[0] != "." and name not in SKIPPED and name != "stages"
            ]

    return paths[:MAX_FILES]


def checkpoints(folder):
    """Checkpoints of a run: name, bytes, time, whether complete, links."""
    checkpoints_folder = os.path.join(folder, "checkpoints")
    rows = []
    links = {}
    try:
        names = list(os.scandir(checkpoints_folder))
    except OSError:
        return []

    for entry in names:
        if entry.is_symlink():
            links.setdefault(os.readlink(entry.path), []).append(entry.name)

    for entry in names:
        if entry.is_symlink() or not STEP.match(entry.name):
            continue

        try:
            sizes = {
                file.name: file.stat(follow_symlinks=False).st_size
                for file in os.scandir(entry.path)
            }
            changed_at = entry.stat().st_mtime
        except OSError:
            continue

        # A manifest is written last: with it a checkpoint is complete.
        is_complete = "manifest.json" in sizes
        names_of_it = links.get(entry.name, [])
        rows.append([entry.name, sum(sizes.values()), changed_at, is_complete, names_of_it])

    return rows


class RunReader:
    """Answers requests about one folder."""

    def __init__(self):
        self.runs = []
        self.extra = {}
        self.found_at = 0.0

    def list(self, request):
        """Files of all runs with size, time of change and inode.

        Folders are searched again every five seconds.
        """
        root = request["root"]
        if not os.path.isdir(root):
            return {"error": "is not a folder there"}, b""

        if time.time() - self.found_at > FIND_SECONDS:
            self.runs = find(root)
            self.found_at = time.time()
            self.extra = {
                run: (shown(os.path.join(root, run)), checkpoints(os.path.join(root, run)))
                for run in self.runs
            }

        answer = {}
        for run in self.runs:
            folder = os.path.join(root, run)
            beats = [
                os.path.join("logs/heartbeat", name)
                for name in entries(os.path.join(folder, "logs/heartbeat"))[0]
                if name.startswith("rank-")
            ]
            files = {}
            for path in list(TOP) + beats[:MAX_BEATS] + self.extra[run][0]:
                try:
                    status = os.stat(os.path.join(folder, path))
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    files[path] = [status.st_size, status.st_mtime_ns, status.st_ino]

            answer[run] = [files, self.extra[run][1]]

        return {"now": time.time()}, json.dumps(answer).encode()

    def read(self, request):
        """Bytes of one file."""
        # Both with all links followed: what lies outside of the root is not read.
        folder = os.path.join(request["root"], request["run"])
        path = os.path.realpath(os.path.join(folder, request["path"]))
        root = os.path.realpath(request["root"])
        if not is_kind(request["path"]) or not (path + "/").startswith(root.rstrip("/") + "/"):
            return {"error": "is not a file of a run"}, b""

        # O_NONBLOCK: opening a pipe would wait for somebody who writes to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return {"error": "is not a file"}, b""
            file.seek(int(request["offset"]))
            return {}, file.read(min(int(request["size"]), LARGEST_READ))


def main():
    """Answer requests until standard input ends."""
    reader = RunReader()
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        request = json.loads(line.decode())
        try:
            if request["do"] == "list":
                head, content = reader.list(request)
            else:
                head, content = reader.read(request)
        except OSError as problem:
            head = {"error": problem.strerror or str(problem)}
            content = b""

        packed = zlib.compress(content, 1)
        out.write(json.dumps(dict(head, size=len(packed))).encode() + b"\n" + packed)
        out.flush()


if __name__ == "__main__":
    main()
