"""A program called `ssh` that runs the remote line on this machine: every host is a folder, in which its "login" begins.

dead      Connection refused        locked   Permission denied       new    Host key verification failed
mute      connects, never answers   old      an agent of another version
any other host: the line runs in ROOT/HOST, after a greeting of the login scripts
"""

import os
import sys
from pathlib import Path

SCRIPT = f"""#!{sys.executable} -S
import os, sys
words = sys.argv[1:]
if "-G" in words:
    print("hostname 127.0.0.1")
    sys.exit(0)
at = words.index("--")
host, line = words[at + 1], words[at + 2]
assert "BatchMode=yes" in words
refusals = {{
    "dead": "ssh: connect to host dead port 22: Connection refused",
    "locked": "me@locked: Permission denied (publickey).",
    "new": "Host key verification failed.",
}}
if host in refusals:
    sys.exit(print(refusals[host], file=sys.stderr) or 255)
if host == "mute":
    sys.exit(bool(sys.stdin.read()))
if host == "old":
    print('@headway {{"hello": {{"headway": "0.0.1", "torch": "1.0", "python": "3.11.0"}}}}', flush=True)
    sys.stdin.read()
    sys.exit(0)
print("Welcome to", host, flush=True)
os.chdir(os.path.join(os.environ["FAKE_SSH_ROOT"], host))
os.execvp("sh", ["sh", "-c", line])
"""


def install(root: Path, *hosts: str) -> dict[str, str]:
    """Write the program and the hosts' folders; returns the variables that make it the `ssh` of a process."""
    folder = root / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ssh").write_text(SCRIPT)
    (folder / "ssh").chmod(0o755)
    for host in hosts:
        (root / host).mkdir(exist_ok=True)
    return {"PATH": f"{folder}:{os.environ.get('PATH', '')}", "FAKE_SSH_ROOT": str(root)}
