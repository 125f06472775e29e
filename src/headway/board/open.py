"""Opens a board: the words of the command line come in; sources, a list of runs or a running server
go out.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.board.mirror import MirrorSource
from headway.board.server import BoardServer
from headway.board.watch import Board, LocalSource, Source
from headway.errors import ConfigError, LaunchError
from headway.runtime.paths import S3Path, parse_path
from headway.runtime.web_access import Access, check_token, is_loopback, page_address

DEFAULT = "runs"
TOKEN_VARIABLE = "HEADWAY_BOARD_TOKEN"


def open_sources(locations: Sequence[str], ssh_config: Path | None = None) -> list[Source]:
    """A source for each folder or address; without any, the folder `runs`.

    A folder that does not exist is refused.
    """
    # Before any connection, and with the name of the option.
    if ssh_config is not None and not ssh_config.is_file():
        raise ConfigError(f"--ssh-config is {str(ssh_config)!r}; there is no such file.")
    config = None
    if ssh_config is not None:
        config = str(ssh_config.absolute())
    sources: list[Source] = []
    for location in list(locations or ()) or [DEFAULT]:
        sources.append(_source(location, config, is_default=not locations))
    return sources


def _source(text: str, ssh_config: str | None, *, is_default: bool) -> Source:
    """What one word of the command line means."""
    if text.startswith("ssh://"):
        from headway.board.ssh_files import SshAddress, SshRuns

        return MirrorSource(text, SshRuns(SshAddress.parse(text), ssh_config))

    location = parse_path(text)
    if isinstance(location, S3Path):
        from headway.board.s3_files import S3Runs

        return MirrorSource(text, S3Runs(location))

    path = Path(text).expanduser()
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        remedy = "Give a folder, ssh://host/path or s3://bucket/prefix."
        if is_default:
            remedy = "Give the folder that holds your runs."
        raise ConfigError(f"{text}: {problem}. {remedy}")

    return LocalSource(path)


def list_runs(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The runs of some sources, newest first."""
    board = Board(sources)
    try:
        for source in sources:
            source.refresh()
            # A mirror that has never answered; one with older copies still lists those.
            if not source.is_here and source.problem and not source.folders():
                raise LaunchError(f"{source.label}: {source.problem.rstrip('.')}.")
            board.look(source)
        return sorted(board.rows()["runs"], key=lambda row: (-row["updated"], row["name"]))
    finally:
        board.close()


def choose_token(host: str) -> str | None:
    """The token of a board that listens on `host`: from the environment, or a new one.

    None where none is needed.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if token:
        return check_token(token, TOKEN_VARIABLE)
    # Programs of this machine's users may ask without a token; web_access.py checks the rest.
    if is_loopback(host):
        return None
    return secrets.token_hex(24)


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
    """The address to open, with the token that it asks for."""
    url = page_address(host, port)
    if token is not None:
        url += f"?token={token}"
    return url
