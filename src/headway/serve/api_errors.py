"""What a client gets when a request fails: a status and OpenAI's error object. Never a traceback.

{"error": {"message": "...", "type": "invalid_request_error", "param": "max_tokens", "code": null}}
"""

from __future__ import annotations

from typing import Any

from headway.errors import HeadwayError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Of the statuses below 500 that are no invalid_request_error."""


class ApiError(HeadwayError):
    """A request that is not answered. `param` is the field at fault, `code` a word for programs."""

    exit_code = 2

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_seconds = retry_seconds

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = TYPES.get(self.status, default)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def headers(self) -> dict[str, str]:
        """When to try again, for errors that pass by themselves."""
        if self.retry_seconds is None:
            return {}
        return {"Retry-After": str(max(1, round(self.retry_seconds)))}


def bad_field(param: str, problem: str) -> ApiError:
    """A field of the body that is wrong: its name, what it is and what it must be."""
    return ApiError(400, f"{param} {problem}", param)
