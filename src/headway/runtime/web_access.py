"""Who may ask a web server of headway: an address to listen on and the head of a request come in; yes, or why not, goes out.

- Loopback needs no token, unless one is given. Any other address does.
- The Host header must name this machine, so that a page of another site whose name now points here (DNS rebinding) gets nothing.
- A request that another site's page makes (Origin, Sec-Fetch-Site) is refused; no CORS header is ever sent.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from headway.errors import ConfigError

SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    text: str


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_token(given: str, where: str) -> str:
    """A token that is long enough and fits into a header, a cookie and an address."""
    if len(given) < SHORTEST_TOKEN or not given.isascii() or not given.isalnum():
        raise ConfigError(
            f"{where} must have at least {SHORTEST_TOKEN} characters, letters and digits only. Set a longer one, or unset it."
        )
    return given


class Access:
    """The rules of one server. `what` is its name in refusals, `verb` the verb that started it."""

    def __init__(self, host: str, token: str | None, names: Sequence[str] = (), *, what: str = "board", verb: str = "board") -> None:
        self.host, self.token, self.what, self.verb = host, token, what, verb
        self.cookie = f"headway-{verb}"
        """Carries the token of a browser."""
        self.is_loopback = is_loopback(host)
        self.names = {"localhost", *(name.lower() for name in names)}
        if not self.is_loopback:
            self.names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    def check(self, headers: Mapping[str, str], given_token: str | None = None, *, is_page: bool = False) -> Refusal | None:
        """None if the request may be answered. `is_page`: a person may follow a link from elsewhere to it."""
        host = headers.get("Host", "")
        if not self._is_our_host(host):
            return Refusal(403, f"The Host header does not name this {self.what}. Open it by its address, or pass --allow-host NAME.")
        origin = headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return Refusal(403, "Requests from other sites are refused.")
        site = headers.get("Sec-Fetch-Site", "same-origin")
        is_navigation = is_page and headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
        if site not in ("same-origin", "none") and not is_navigation:
            return Refusal(403, "Requests from other sites are refused.")
        if self.token is not None and not self._has_token(headers, given_token):
            return Refusal(401, f"This {self.what} needs its token: open the address that `headway {self.verb}` printed, with ?token=.")
        return None

    def _is_our_host(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if not name or any(character in host for character in "/@?#\\"):
            return False
        if name.lower() in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # an address cannot be rebound; on loopback only loopback's own count
        return address.is_loopback or not self.is_loopback

    def _has_token(self, headers: Mapping[str, str], given: str | None) -> bool:
        kind, _, bearer = headers.get("Authorization", "").partition(" ")
        found = [given or "", bearer.strip() if kind.lower() == "bearer" else "", self._cookie(headers.get("Cookie", ""))]
        return any(is_same(one, self.token or "") for one in found)

    def _cookie(self, text: str) -> str:
        try:
            cookie = SimpleCookie(text)
        except CookieError:
            return ""
        return cookie[self.cookie].value if self.cookie in cookie else ""


def is_same(one: str, other: str) -> bool:
    """Compared in constant time; an empty one is never the same."""
    return bool(one) and hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
