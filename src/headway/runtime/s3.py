"""S3 through boto3: small objects whole, large files in parts that are not sent twice, ranges read in place.

Endpoint, keys and region come from the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, ...). A call
that fails because the store is down, slow or overloaded is retried for up to `retry_seconds`; one that can never succeed is not.
A failure is one line that names the object. Every byte is sent with its MD5, which the server checks.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from headway.errors import CheckpointError, ConfigError, hide_credentials
from headway.runtime.optional import need
from headway.runtime.paths import S3Path

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
PART_BYTES = 16 << 20
MAX_PARTS = 9000
THREADS = 4
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0
HURRY_SECONDS = 2.0
"""How long a call is retried once a caller waits for it."""
PASSING = {
    "InternalError",
    "SlowDown",
    "ServiceUnavailable",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "Throttling",
    "ThrottlingException",
}


class S3:
    """One store."""

    def __init__(self, endpoint: str | None = None, retry_seconds: float = 120.0) -> None:
        need("boto3", "an s3:// place")
        self.endpoint = endpoint
        self.retry_seconds = retry_seconds
        self.on_retry: Callable[[str], None] = lambda text: None
        """Called when a call fails and is retried, once until one succeeds."""
        self._troubled = False
        self._hurry = threading.Event()

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Inside, failing calls in other threads are retried only briefly; a call that the store answers may finish."""
        self.hurry(on=True)
        try:
            yield
        finally:
            self.hurry(on=False)

    def hurry(self, *, on: bool) -> None:
        """Like `hurried`, until it is turned off."""
        (self._hurry.set if on else self._hurry.clear)()

    @property
    def client(self) -> Any:
        """boto3's client; it may be used from many threads."""
        return _client(
            self.endpoint,
            READ_SECONDS,
            tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))),
        )

    def call(self, location: S3Path, name: str, **arguments: Any) -> Any:
        """One request about an object, made again while that can help."""
        from botocore.exceptions import BotoCoreError, ClientError

        begun, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        end = begun + self.retry_seconds
        while True:
            try:
                answer = getattr(self.client, name)(Bucket=location.bucket, **arguments)
                self._troubled = False
                return answer
            except ClientError as problem:
                error, status = (
                    problem.response.get("Error", {}),
                    problem.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0),
                )
                code = str(error.get("Code", status))
                reason = f"{code}: {error.get('Message', '')}".rstrip(": ")
                passing = status >= 500 or status == 429 or code in PASSING
                if not passing:
                    raise S3Refusal(location, code, reason) from None
            except BotoCoreError as problem:
                reason = hide_credentials(str(problem))
                if "credentials" in reason.lower():
                    raise ConfigError(
                        f"{location}: no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
                    ) from None
            if self._hurry.is_set():
                end, pause = (
                    min(end, time.monotonic() + HURRY_SECONDS),
                    min(pause, FIRST_PAUSE_SECONDS),
                )
            if time.monotonic() + pause > end:
                raise StoreDown(
                    f"{location}: the store does not answer: {reason}. Tried for {time.monotonic() - begun:.0f} s."
                )
            if not self._troubled:
                self._troubled = True
                self.on_retry(
                    f"{location}: {reason}; trying again for up to {self.retry_seconds:.0f} s"
                )
            self._hurry.wait(pause) if not self._hurry.is_set() else time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def read(self, location: S3Path) -> bytes | None:
        """The content of an object; None if it does not exist."""
        try:
            return self._body(location)
        except S3Refusal as refusal:
            if refusal.is_missing:
                return None
            raise

    def read_range(self, location: S3Path, start: int, size: int) -> bytes:
        """Bytes `start` to `start + size` of an object."""
        content = self._body(location, Range=f"bytes={start}-{start + size - 1}") if size else b""
        if len(content) != size:
            raise CheckpointError(
                f"{location}: gave {len(content)} bytes where {size} were requested. Use another checkpoint."
            )
        return content

    def _body(self, location: S3Path, **arguments: Any) -> bytes:
        """What an object holds; a connection that breaks is opened again."""
        from botocore.exceptions import BotoCoreError

        end = time.monotonic() + self.retry_seconds
        while True:
            answer = self.call(location, "get_object", Key=location.key, **arguments)
            try:
                return answer["Body"].read()
            except BotoCoreError as problem:
                if time.monotonic() > end:
                    raise StoreDown(f"{location}: the connection breaks: {problem}.") from None
            time.sleep(FIRST_PAUSE_SECONDS)

    def write(self, location: S3Path, content: bytes) -> None:
        """A small object, whole."""
        self.call(
            location, "put_object", Key=location.key, Body=content, ContentMD5=_md5(content)[1]
        )

    def upload(self, location: S3Path, path: Path) -> None:
        """A file; parts that an interrupted upload of the same bytes has left there are not sent again."""
        size = path.stat().st_size
        if size <= PART_BYTES:
            self.write(location, path.read_bytes())
            return
        step = max(PART_BYTES, -(-size // MAX_PARTS))
        upload, there = self._unfinished(location)
        if upload is None:
            upload = self.call(location, "create_multipart_upload", Key=location.key)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            with open(path, "rb") as file:
                file.seek((number - 1) * step)
                content = file.read(step)
            checksum, encoded = _md5(content)
            if there.get(number) == (checksum, len(content)):
                return {"PartNumber": number, "ETag": f'"{checksum}"'}
            answer = self.call(
                location,
                "upload_part",
                Key=location.key,
                UploadId=upload,
                PartNumber=number,
                Body=content,
                ContentMD5=encoded,
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(THREADS) as pool:
            parts = list(pool.map(send, range(1, -(-size // step) + 1)))
        self.call(
            location,
            "complete_multipart_upload",
            Key=location.key,
            UploadId=upload,
            MultipartUpload={"Parts": parts},
        )
        if (found := self.size(location)) != size:
            raise CheckpointError(
                f"{location}: has {found} bytes after {size} were sent. Check the store."
            )

    def _unfinished(self, location: S3Path) -> tuple[str | None, dict[int, tuple[str, int]]]:
        """The newest unfinished upload of an object and its parts: number -> (MD5, size)."""
        found = [one for one in self._uploads(location, location.key) if one["Key"] == location.key]
        if not found:
            return None, {}
        newest = max(found, key=lambda one: one["Initiated"])
        parts: dict[int, tuple[str, int]] = {}
        after = 0
        while True:
            page = self.call(
                location,
                "list_parts",
                Key=location.key,
                UploadId=newest["UploadId"],
                PartNumberMarker=after,
            )
            parts |= {
                part["PartNumber"]: (part["ETag"].strip('"'), part["Size"])
                for part in page.get("Parts", [])
            }
            if not page.get("IsTruncated"):
                return newest["UploadId"], parts
            after = page["NextPartNumberMarker"]

    def _uploads(self, location: S3Path, prefix: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        while True:
            page = self.call(location, "list_multipart_uploads", Prefix=prefix, **more)
            found += page.get("Uploads", [])
            if not page.get("IsTruncated"):
                return found
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort_uploads(self, location: S3Path) -> int:
        """Drop all unfinished uploads below a location; returns how many there were."""
        unfinished = self._uploads(location, _below(location))
        for one in unfinished:
            self.call(location, "abort_multipart_upload", Key=one["Key"], UploadId=one["UploadId"])
        return len(unfinished)

    def size(self, location: S3Path) -> int | None:
        """Size of an object in bytes; None if it does not exist."""
        try:
            return int(self.call(location, "head_object", Key=location.key)["ContentLength"])
        except S3Refusal as refusal:
            if refusal.is_missing:
                return None
            raise

    def sizes(self, location: S3Path) -> dict[str, int]:
        """Every object below a location, by its name from there on."""
        prefix = _below(location)
        return {
            entry["Key"].removeprefix(prefix): int(entry["Size"])
            for entry in self._entries(location, prefix)
        }

    def objects(self, location: S3Path) -> dict[str, tuple[int, float]]:
        """Every object below a location: its size, and when it changed in seconds since 1970."""
        prefix = _below(location)
        found = self._entries(location, prefix)
        return {
            entry["Key"].removeprefix(prefix): (
                int(entry["Size"]),
                entry["LastModified"].timestamp(),
            )
            for entry in found
        }

    def _entries(self, location: S3Path, prefix: str) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            page = self.call(location, "list_objects_v2", Prefix=prefix, **more)
            yield from page.get("Contents", [])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def remove(self, location: S3Path, names: Iterable[str]) -> None:
        """Delete objects below a location, one after another in the order given."""
        for name in names:
            self.call(location, "delete_object", Key=(location / name).key)


@cache
def _client(
    endpoint: str | None, read_seconds: float, environment: tuple[tuple[str, str], ...]
) -> Any:
    """One client for all who say the same; making one takes half a second."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    custom_endpoint = (
        endpoint
        or dict(environment).get("AWS_ENDPOINT_URL_S3")
        or dict(environment).get("AWS_ENDPOINT_URL")
    )
    settings = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=read_seconds,
        retries={
            "total_max_attempts": 1
        },  # retried here, where it can be reported and the pause can be long
        max_pool_connections=2 * THREADS,
        request_checksum_calculation="when_required",  # stores other than Amazon's do not all know the newer ones
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"} if custom_endpoint else None,
    )
    try:
        return boto3.Session().client("s3", endpoint_url=endpoint, config=settings)
    except (BotoCoreError, ValueError) as problem:
        raise ConfigError(f"s3: {problem}. Check AWS_ENDPOINT_URL and AWS_REGION.") from None


class StoreDown(CheckpointError):
    """The object store did not answer: the same call may succeed later."""


class S3Refusal(CheckpointError):
    """The store rejected the request."""

    def __init__(self, location: S3Path, code: str, reason: str) -> None:
        super().__init__(
            f"{location}: the store refuses: {reason}. Check the bucket, the keys and their permissions."
        )
        self.is_missing = code in ("404", "NoSuchKey", "NotFound")


def _below(location: S3Path) -> str:
    """With the slash: `runs/one` is not the beginning of `runs/one-more`."""
    return f"{location.key}/" if location.key else ""


def _md5(content: bytes) -> tuple[str, str]:
    """In hexadecimal and as Content-MD5 has it; a checksum against accidents, not a secret."""
    digest = hashlib.md5(content, usedforsecurity=False)
    return digest.hexdigest(), base64.b64encode(digest.digest()).decode()
