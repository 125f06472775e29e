"""Opens a board: the words of the command line come in; sources, a list of runs or a running server go out."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.board.access import Access, choose_token
from headway.board.mirror import MirrorSource
from headway.board.server import BoardServer
from headway.board.watch import Board, LocalSource, Source
from headway.errors import ConfigError, LaunchError
from headway.runtime.paths import S3Path, parse_path

DEFAULT = "runs"


def open_sources(given: Sequence[str], ssh_config: Path | None = None) -> list[Source]:
    """What each text means; a folder that does not exist is refused."""
    if ssh_config is not None and not ssh_config.is_file():
        raise ConfigError(f"--ssh-config is {str(ssh_config)!r}; there is no such file.")
    config = None if ssh_config is None else str(ssh_config.absolute())
    found: list[Source] = []
    for text in list(given or ()) or [DEFAULT]:
        found.append(_source(text, config, is_default=not given))
    return found


def _source(text: str, ssh_config: str | None, *, is_default: bool) -> Source:
    if text.startswith("ssh://"):
        from headway.board.ssh_files import SshAddress, SshRuns

        return MirrorSource(text, SshRuns(SshAddress.parse(text), ssh_config))
    location = parse_path(text)
    if isinstance(location, S3Path):
        from headway.board.s3_files import S3Runs

        return MirrorSource(text, S3Runs(location))
    path = Path(text).expanduser()
    if not path.is_dir():
        remedy = (
            "Give the folder that holds your runs."
            if is_default
            else "Give a folder, ssh://host/path or s3://bucket/prefix."
        )
        raise ConfigError(
            f"{text}: {'is not a folder' if path.exists() else 'does not exist'}. {remedy}"
        )
    return LocalSource(path)


def list_runs(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The runs of some sources, newest first."""
    board = Board(sources)
    try:
        for source in sources:
            source.refresh()
            if not source.is_here and source.problem and not source.folders():
                raise LaunchError(f"{source.label}: {source.problem.rstrip('.')}.")
            board.look(source)
        return sorted(board.rows()["runs"], key=lambda row: (-row["updated"], row["name"]))
    finally:
        board.close()


def serve(
    sources: Sequence[Source],
    host: str,
    port: int,
    names: Sequence[str],
    started: Callable[[dict[str, Any]], None],
) -> None:
    """Serve a board until Ctrl-C or SIGTERM."""
    token = choose_token(host)
    with Board(sources) as board:
        server = BoardServer((host, port), board, Access(host, token, names))
        try:
            started(
                {
                    "url": _url(host, server.port, token),
                    "host": host,
                    "port": server.port,
                    "runs": len(board.runs),
                }
            )
            server.serve_forever(poll_interval=0.5)
        finally:
            server.server_close()


def _url(host: str, port: int, token: str | None) -> str:
    shown = (
        socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    )
    return f"http://{shown}:{port}/" + (f"?token={token}" if token is not None else "")
