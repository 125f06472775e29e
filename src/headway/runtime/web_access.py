"""Who may ask a web server of headway: an address to listen on and the head of a request come in.

Yes, or why not, goes out.

- Loopback needs no token, unless one is given. Any other address does.
- The Host header must name this machine, so that a page of another site whose name now points here
  (DNS rebinding) gets nothing.
- A request that another site's page makes (Origin, Sec-Fetch-Site) is refused; no CORS header is
  ever sent.
- Names of headers are compared without case, as HTTP defines them. A header that decides and is
  given twice is refused.

`ConnectionTable` decides which connections a server keeps: a connection whose request never
completes makes room for another one.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from headway.errors import ConfigError

SHORTEST_TOKEN = 16
"""Characters."""
SINGLE_HEADERS = (
    "host",
    "origin",
    "authorization",
    "sec-fetch-site",
    "sec-fetch-mode",
    "sec-fetch-dest",
)
"""Headers that decide who may ask.

With two values, a proxy in front may have checked the other one.
"""


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


def check_token(token: str, where: str) -> str:
    """A token that is long enough and fits into a header, a cookie and an address."""
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isalnum():
        raise ConfigError(
            f"{where} must have at least {SHORTEST_TOKEN} characters, letters and digits only. "
            "Set a longer one, or unset it."
        )
    return token


class Access:
    """The rules of one server. `what` is its name in refusals, `verb` the verb that started it."""

    def __init__(
        self,
        host: str,
        token: str | None,
        names: Sequence[str] = (),
        *,
        what: str = "board",
        verb: str = "board",
    ) -> None:
        self.host = host
        self.token = token
        self.what = what
        self.verb = verb
        self.cookie = f"headway-{verb}"
        """Carries the token of a browser."""
        self.is_loopback = is_loopback(host)
        self.names = {"localhost", *(name.lower() for name in names)}
        if not self.is_loopback:
            self.names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    def check(
        self,
        pairs: Iterable[tuple[str, str]],
        given_token: str | None = None,
        *,
        is_page: bool = False,
    ) -> Refusal | None:
        """None if the request may be answered.

        `pairs`: names and values of its headers. `is_page`: a person may follow a link from
        elsewhere to it.
        """
        headers, repeated = read_headers(pairs)
        if repeated is not None:
            return Refusal(400, f"The header {repeated} is given twice.")
        host = headers.get("host", "")
        if not self._is_our_host(host):
            return Refusal(
                403,
                f"The Host header does not name this {self.what}. Open it by its address, or pass "
                "--allow-host NAME.",
            )
        # A browser sends it with every request that could change something.
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return Refusal(403, "Requests from other sites are refused.")

        # Browsers send these three themselves; other clients do not, and are not what this is for.
        site = headers.get("sec-fetch-site", "same-origin")
        is_navigation = (
            is_page
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        if site not in ("same-origin", "none") and not is_navigation:
            return Refusal(403, "Requests from other sites are refused.")

        if self.token is not None and not self._has_token(headers, given_token):
            return Refusal(
                401,
                f"This {self.what} needs its token: open the address that `headway {self.verb}` "
                "printed, with ?token=.",
            )
        return None

    def _is_our_host(self, host: str) -> bool:
        """Whether a Host header names this machine."""
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        # Characters that end the host part of an address: parsers disagree about them.
        if not name or any(character in host for character in "/@?#\\"):
            return False
        if name.lower() in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # An address cannot be rebound. A server on loopback accepts only addresses of loopback.
        return address.is_loopback or not self.is_loopback

    def _has_token(self, headers: Mapping[str, str], query_token: str | None) -> bool:
        """Whether the address, the Authorization header or the cookie carries the token."""
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        bearer = ""
        if scheme.lower() == "bearer":
            bearer = credentials.strip()
        candidates = [query_token or "", bearer, self._cookie(headers.get("cookie", ""))]
        return any(is_same(candidate, self.token or "") for candidate in candidates)

    def _cookie(self, text: str) -> str:
        try:
            cookie = SimpleCookie(text)
        except CookieError:
            return ""
        if self.cookie in cookie:
            return cookie[self.cookie].value
        return ""


def read_headers(pairs: Iterable[tuple[str, str]]) -> tuple[dict[str, str], str | None]:
    """Headers by their names in lower case, and the name of a deciding header that came twice."""
    headers: dict[str, str] = {}
    for name, value in pairs:
        key = name.lower()
        if key in SINGLE_HEADERS and key in headers:
            return headers, key
        if key == "cookie" and key in headers:
            # HTTP/2 allows to send each cookie in a header of its own.
            headers[key] += f"; {value}"
        else:
            headers[key] = value
    return headers, None


@dataclass
class _Connection:
    """What a table knows of a connection."""

    client: str
    since: float
    """When it began to wait for a request."""
    is_answered: bool = False
    """A whole request has arrived and its answer is not complete."""
    was_useful: bool = False
    """It brought a whole request before."""


class ConnectionTable:
    """The open connections of a server, at most `most`, of one client address at most three
    quarters of them.

    Where one too many arrives, the connection that has waited longest for its request gives way: of
    the client that has most, and first those that never sent a whole request. So half-open
    connections lock nobody out, also where clients share an address (a proxy, loopback).
    Connections whose request is being answered are never closed; if there are no others, the new
    one is refused.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # A quarter stays for other clients.
        self.most_of_client = most - most // 4
        self._known: dict[Hashable, _Connection] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: Hashable, client: str, now: float) -> tuple[bool, Hashable | None]:
        """Whether a new connection may stay, and the connection to close for it."""
        counts = Counter(known.client for known in self._known.values())
        closed: Hashable | None = None
        # A client over its share gives way itself; otherwise the client with most connections does.
        if counts[client] >= self.most_of_client:
            closed = self._waiting_longest((client,))
            if closed is None:
                return False, None
        elif len(self._known) >= self.most:
            closed = self._waiting_longest([name for name, _ in counts.most_common()])
            if closed is None:
                return False, None
        if closed is not None:
            del self._known[closed]
        self._known[key] = _Connection(client, now)
        return True, closed

    def begin_answer(self, key: Hashable) -> None:
        """A whole request has arrived."""
        connection = self._known.get(key)
        if connection is not None:
            connection.is_answered = True
            connection.was_useful = True

    def end_answer(self, key: Hashable, now: float) -> None:
        """An answer is complete; the connection waits for the next request."""
        connection = self._known.get(key)
        if connection is not None and connection.is_answered:
            connection.is_answered = False
            connection.since = now

    def remove(self, key: Hashable) -> None:
        """A connection is closed."""
        self._known.pop(key, None)

    def _waiting_longest(self, clients: Sequence[str]) -> Hashable | None:
        """The connection that gives way: of the first of these clients that has one."""
        for client in clients:
            # The number decides between equal times; keys need not be comparable.
            waiting = [
                (known.was_useful, known.since, number, key)
                for number, (key, known) in enumerate(self._known.items())
                if known.client == client and not known.is_answered
            ]
            if waiting:
                return min(waiting, key=lambda entry: entry[:3])[3]
        return None


def is_same(text: str, other: str) -> bool:
    """Compared in constant time; an empty one is never the same."""
    # A comparison that ends at the first difference would tell how much of a guess is right.
    return bool(text) and hmac.compare_digest(
        text.encode(errors="replace"), other.encode(errors="replace")
    )


def page_address(host: str, port: int) -> str:
    """The address to open; all interfaces are shown as this machine's name."""
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    elif ":" in host:
        shown = f"[{host}]"
    else:
        shown = host
    return f"http://{shown}:{port}/"
