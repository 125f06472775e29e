"""Talking to other machines: addresses that hold secrets come from the environment alone, and no
redirect takes them elsewhere.
"""

import http.client
import netrc
import os
import urllib.parse
import urllib.request
from typing import IO

from headway.errors import ConfigError


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
