"""Real ssh servers on loopback, each with its own keys, port and folder: what `~/.ssh` and /etc/ssh hold is neither read nor changed."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.daemons import Daemons, find_program, free_ports, short_folder, wait_until

PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile {folder}/sshd-{port}.pid
AuthorizedKeysFile {folder}/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
"""
CLIENT = """\
Host *
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
"""


@dataclass(frozen=True)
class SshHosts:
    """Servers that let this user in with one key. `config` is for ssh -F."""

    folder: Path
    ports: tuple[int, ...]
    daemons: Daemons

    @property
    def config(self) -> Path:
        return self.folder / "config"

    @property
    def names(self) -> list[str]:
        """USER@HOST:PORT of each server."""
        import pwd

        user = pwd.getpwuid(os.geteuid()).pw_name
        return [f"{user}@127.0.0.1:{port}" for port in self.ports]

    def start(self, port: int) -> None:
        """Start a server, again after `kill`."""
        sshd = find_program("sshd")
        pid_file = self.folder / f"sshd-{port}.pid"
        assert sshd is not None
        pid_file.unlink(missing_ok=True)
        self.daemons.start(
            f"sshd-{port}",
            [sshd, "-D", "-e", "-f", str(self.folder / f"sshd-{port}.conf")],
            os.environ,
        )
        wait_until(pid_file.exists, f"sshd on port {port}")

    def kill(self, port: int) -> None:
        """End one server at once; connections that stand stay open."""
        self.daemons.end(f"sshd-{port}", 9)


@contextmanager
def ssh_hosts(count: int = 2) -> Iterator[SshHosts]:
    """Servers that run for the length of a with block."""
    folder = short_folder()
    daemons = Daemons(folder)
    ports = tuple(free_ports(count))
    keygen = find_program("ssh-keygen")
    assert keygen is not None
    hosts = SshHosts(folder, ports, daemons)
    is_new = not Path("/run/sshd").exists()
    try:
        if is_new:
            # the server gives up its rights in there
            Path("/run/sshd").mkdir(mode=0o755, parents=True)
        for name in ("host", "user"):
            subprocess.run(
                [
                    keygen,
                    "-q",
                    "-t",
                    "ed25519",
                    "-N",
                    "",
                    "-C",
                    f"headway-test-{name}",
                    "-f",
                    str(folder / name),
                ],
                check=True,
            )
        key = (folder / "host.pub").read_text().split()[:2]
        (folder / "known_hosts").write_text(
            "".join(f"[127.0.0.1]:{port} {' '.join(key)}\n" for port in ports)
        )
        (folder / "config").write_text(CLIENT.format(folder=folder))
        for port in ports:
            (folder / f"sshd-{port}.conf").write_text(SERVER.format(port=port, folder=folder))
            hosts.start(port)
        yield hosts
    finally:
        daemons.stop()
        shutil.rmtree(folder, ignore_errors=True)
