"""The files of the chat page, from the package.

Nothing is loaded from elsewhere: the content security policy allows this server alone.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What a model writes is shown as HTML: no script, style or request but those of this server.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
VENDORED = ("markdown-it.umd.min.js", "purify.min.js")
"""The libraries of the page; `headway/vendor` has their versions, checksums and licences."""


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Name -> content and type."""
    folder = files("headway.serve").joinpath("page")
    if not folder.is_dir():
        return {}
    vendor = files("headway").joinpath("vendor")
    contents: dict[str, tuple[bytes, str]] = {}
    for file in (*folder.iterdir(), *(vendor.joinpath(name) for name in VENDORED)):
        suffix = file.name[file.name.rfind(".") :]
        if suffix in TYPES:
            contents[file.name] = (file.read_bytes(), TYPES[suffix])
    return contents
