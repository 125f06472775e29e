"""Locations: a local path or a prefix in S3.

InternLM's `local:PATH` and `boto3:s3://bucket.ENDPOINT/dir` are read too.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from headway.errors import ConfigError

LOCAL = "local:"
BOTO3 = "boto3:"
S3_TEXT = re.compile(r"s3:/{1,2}([^/]+)(?:/(.*))?")
"""One slash too: a command line's Path swallows the other."""


def cache_home() -> Path:
    """The folder of a user's caches: XDG_CACHE_HOME, or ~/.cache.

    A relative path there means nothing, as its rules say.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(configured):
        return Path(configured)
    return Path.home() / ".cache"


@dataclass(frozen=True, order=True)
class S3Path:
    """A key or a prefix in a bucket; `/` goes down like in a Path."""

    bucket: str
    key: str
    endpoint: str | None = None
    """Where the store answers; None = as the environment says."""

    def __truediv__(self, name: str) -> S3Path:
        return S3Path(self.bucket, f"{self.key}/{name}".strip("/"), self.endpoint)

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> S3Path:
        """One level up."""
        return S3Path(self.bucket, self.key.rpartition("/")[0], self.endpoint)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


AnyPath: TypeAlias = Path | S3Path


def parse_path(path: str | AnyPath) -> AnyPath:
    """What a text or a path means. A Path may hold the text of an S3 path: options give Paths."""
    if isinstance(path, S3Path):
        return path
    text = str(path)
    plain = text.removeprefix(LOCAL).removeprefix(BOTO3)

    match = S3_TEXT.fullmatch(plain)
    if match is None:
        if text.startswith(BOTO3) or plain.startswith("s3:"):
            raise ConfigError(f"{text}: not an S3 path. Write s3://bucket/prefix.")
        if isinstance(path, Path) and not text.startswith(LOCAL):
            return path
        return Path(plain)

    bucket = match.group(1)
    endpoint = None
    # s3://KEY:SECRET@bucket: paths are logged and stored, secrets must not be.
    if "@" in bucket:
        raise ConfigError(
            f"{text}: an S3 path contains no credentials. Write s3://bucket/prefix and set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    # InternLM writes the endpoint into the bucket: boto3:s3://bucket.10.0.0.7:9000/dir.
    if text.startswith(BOTO3) and "." in bucket:
        bucket, _, host = bucket.partition(".")
        endpoint = f"http://{host}"
    return S3Path(bucket, (match.group(2) or "").strip("/"), endpoint)
