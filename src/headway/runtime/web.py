"""Talking to other machines: addresses that hold secrets come from the environment alone, and no
redirect takes them elsewhere.
"""

import functools
import http.client
import netrc
import os
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import IO, Any

from headway.errors import ConfigError

REFUSAL_BYTES = 4096
"""How much is read of a refusal's text."""


def address_from_environment(variable: str, key: str) -> str:
    """The http(s) address in an environment variable that the setting `key` names.

    Never shown, since it may hold a secret.
    """
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(
            f"{key} is {variable!r}, and no such environment variable is set. "
            "Set it to the address, or name another."
        )
    try:
        parts = urllib.parse.urlsplit(value)
        is_address = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        is_address = False
    # Spaces and control characters would end the request line early.
    if not is_address or not value.isascii() or not value.isprintable() or " " in value:
        raise ConfigError(
            f"{key} is {variable!r}, and that environment variable holds no http or https address. "
            "Set it to one."
        )
    return value


def has_secret(variable: str, host: str | None = None) -> bool:
    """Whether a secret is there without being asked for: in an environment variable, or in ~/.netrc
    for a host.

    It is not read out.
    """
    if os.environ.get(variable, "").strip():
        return True
    try:
        return host is not None and netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def secret_from_environment(variable: str, key: str) -> str:
    """The secret in an environment variable that the setting `key` names."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(
            f"{key} is {variable!r}, and no such environment variable is set. Set it to the key."
        )
    return value


def without_password(address: str, key: str) -> str:
    """An address from a recipe.

    One that carries a user name or password is refused, since recipes are kept and shared.
    """
    if "@" in urllib.parse.urlsplit(address).netloc:
        raise ConfigError(
            f"{key} holds a user name or password. Remove it from the address and set it in the "
            "environment."
        )
    return address


def job_id() -> str:
    """The scheduler's name for this job: SLURM's, Kubernetes' or Volcano ML's.

    `none` outside of them.
    """
    # The first word of a pod's name is that of its job.
    pod = os.environ.get("KUBERNETES_POD_NAME", "").split("-")[0]
    return os.environ.get("SLURM_JOB_ID") or pod or os.environ.get("MLP_TASK_ID") or "none"


def cluster_name() -> str:
    """What the environment calls this cluster; `none` where it does not."""
    return os.environ.get("CLUSTER_NAME") or "none"


def direct_opener() -> urllib.request.OpenerDirector:
    """An opener for which a redirect is an error: following it could carry a secret to another
    machine.
    """
    return urllib.request.build_opener(_NoRedirect())


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """None instead of a new request makes urllib raise the redirect as an HTTPError."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        return


class DeadlineOpener:
    """Opens requests like `direct_opener`, for several threads, and breaks the connection of one
    that is not over in time: a server that sends a byte now and then never runs into a socket's
    own time-out.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._opener = urllib.request.build_opener(
            _NoRedirect(), _TimedHttp(self._thread), _TimedHttps(self._thread)
        )

    @contextmanager
    def open(
        self, request: urllib.request.Request, seconds: float
    ) -> Iterator[http.client.HTTPResponse]:
        """The response, while the block runs; a TimeoutError when the time is over."""
        sockets: list[socket.socket] = []
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            for connection in list(sockets):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        self._thread.sockets = sockets
        try:
            with self._opener.open(request, timeout=seconds) as response:
                yield response
                # A connection that was broken may look like the end of an answer.
                if is_over.is_set():
                    raise TimeoutError
        except urllib.error.HTTPError as error:
            raise _read_refusal(error) from None
        except (OSError, ValueError, http.client.HTTPException):
            if is_over.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()


def _read_refusal(error: urllib.error.HTTPError) -> urllib.error.HTTPError:
    """The same error with the beginning of its text in memory: nobody waits for the rest."""
    with error:
        try:
            text = error.read(REFUSAL_BYTES)
        except (OSError, http.client.HTTPException):
            text = b""
    return urllib.error.HTTPError(error.url, error.code, error.reason, error.headers, BytesIO(text))


class _TimedConnection(http.client.HTTPConnection):
    """Says which socket it uses."""

    def __init__(self, *values: Any, sockets: list[socket.socket], **options: Any) -> None:
        super().__init__(*values, **options)
        self._sockets = sockets

    def connect(self) -> None:
        super().connect()
        self._sockets.append(self.sock)


class _TimedSecureConnection(http.client.HTTPSConnection):
    """The same with TLS."""

    def __init__(self, *values: Any, sockets: list[socket.socket], **options: Any) -> None:
        super().__init__(*values, **options)
        self._sockets = sockets

    def connect(self) -> None:
        super().connect()
        self._sockets.append(self.sock)


class _TimedHttp(urllib.request.HTTPHandler):
    def __init__(self, thread: threading.local) -> None:
        super().__init__()
        self._thread = thread

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        kind: Any = functools.partial(_TimedConnection, sockets=self._thread.sockets)
        return self.do_open(kind, req)


class _TimedHttps(urllib.request.HTTPSHandler):
    def __init__(self, thread: threading.local) -> None:
        super().__init__()
        self._thread = thread

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        kind: Any = functools.partial(_TimedSecureConnection, sockets=self._thread.sockets)
        return self.do_open(kind, req)
