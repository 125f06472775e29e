"""S3 through boto3: small objects whole, large files in parts that are not sent twice, ranges read
in place.

Endpoint, keys and region come from the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, ...). A call that fails because the store is down, slow or
overloaded is retried for up to `retry_seconds`; one that can never succeed is not. A failure is one
line that names the object. Every byte is sent with its MD5, which the server checks.
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

from headway.errors import CheckpointError, ConfigError, ObjectStoreUnavailable, hide_credentials
from headway.runtime.optional import need
from headway.runtime.paths import S3Path

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
"""How long one request may be silent before it counts as failed."""
PART_BYTES = 16 << 20
"""Files up to this size are sent in one request; the parts of larger ones have at least this."""
MAX_PARTS = 9000
"""S3 takes 10,000 parts of a file at most."""
THREADS = 4
"""Parts of a file that are sent at a time."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0
HURRY_SECONDS = 2.0
"""How long a call is retried once a caller waits for it."""
TRANSIENT_CODES = {
    "InternalError",
    "SlowDown",
    "ServiceUnavailable",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "Throttling",
    "ThrottlingException",
}
"""Codes of errors after which the same call may succeed, whatever their HTTP status is."""


class S3:
    """One object store. All methods may be called from many threads."""

    def __init__(self, endpoint: str | None = None, retry_seconds: float = 120.0) -> None:
        need("boto3", "an s3:// place")
        self.endpoint = endpoint
        self.retry_seconds = retry_seconds
        self.on_retry: Callable[[str], None] = lambda text: None
        """Called when a call fails and is retried, once until one succeeds."""
        self._is_failing = False
        """Whether `on_retry` was called since the last call that succeeded."""
        self._hurry = threading.Event()

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Inside, failing calls in other threads are retried only briefly.

        A call that the store answers may finish.
        """
        self.hurry(on=True)
        try:
            yield
        finally:
            self.hurry(on=False)

    def hurry(self, *, on: bool) -> None:
        """Like `hurried`, until it is turned off."""
        if on:
            self._hurry.set()
        else:
            self._hurry.clear()

    @property
    def client(self) -> Any:
        """boto3's client; it may be used from many threads."""
        # boto3 reads these variables once. As a part of the cache's key they count at each call.
        variables = [item for item in os.environ.items() if item[0].startswith("AWS_")]
        return _client(self.endpoint, READ_SECONDS, tuple(sorted(variables)))

    def call(self, location: S3Path, name: str, **arguments: Any) -> Any:
        """One request about an object, made again while that can help."""
        from botocore.exceptions import BotoCoreError, ClientError

        begun = time.monotonic()
        deadline = begun + self.retry_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                answer = getattr(self.client, name)(Bucket=location.bucket, **arguments)
                self._is_failing = False
                return answer
            except ClientError as problem:
                error = problem.response.get("Error", {})
                status = problem.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                code = str(error.get("Code", status))
                reason = f"{code}: {error.get('Message', '')}".rstrip(": ")
                # 429: too many requests.
                is_transient = status >= 500 or status == 429 or code in TRANSIENT_CODES
                if not is_transient:
                    raise S3Refusal(location, code, reason) from None
            except BotoCoreError as problem:
                reason = hide_credentials(str(problem))
                # boto3 has several classes for missing or partial credentials.
                if "credentials" in reason.lower():
                    raise ConfigError(
                        f"{location}: no credentials. Set AWS_ACCESS_KEY_ID and "
                        "AWS_SECRET_ACCESS_KEY."
                    ) from None

            if self._hurry.is_set():
                deadline = min(deadline, time.monotonic() + HURRY_SECONDS)
                pause = min(pause, FIRST_PAUSE_SECONDS)
            if time.monotonic() + pause > deadline:
                raise ObjectStoreUnavailable(
                    f"{location}: the store does not answer: {reason}. "
                    f"Tried for {time.monotonic() - begun:.0f} s."
                )
            if not self._is_failing:
                self._is_failing = True
                self.on_retry(
                    f"{location}: {reason}; trying again for up to {self.retry_seconds:.0f} s"
                )

            # A hurry that begins ends this pause. During one, the event is set already.
            if self._hurry.is_set():
                time.sleep(pause)
            else:
                self._hurry.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def read(self, location: S3Path) -> bytes | None:
        """The content of an object; None if it does not exist."""
        try:
            return self._read_body(location)
        except S3Refusal as refusal:
            if refusal.is_missing:
                return None
            raise

    def read_range(self, location: S3Path, start: int, size: int) -> bytes:
        """Bytes `start` to `start + size` of an object."""
        # A range of no bytes cannot be written in HTTP.
        content = b""
        if size:
            content = self._read_body(location, Range=f"bytes={start}-{start + size - 1}")
        if len(content) != size:
            raise CheckpointError(
                f"{location}: gave {len(content)} bytes where {size} were requested. "
                "Use another checkpoint."
            )
        return content

    def _read_body(self, location: S3Path, **arguments: Any) -> bytes:
        """What an object holds; a connection that breaks is opened again.

        `call` retries until an answer begins. The bytes come later, and may stop halfway.
        """
        from botocore.exceptions import BotoCoreError

        deadline = time.monotonic() + self.retry_seconds
        while True:
            answer = self.call(location, "get_object", Key=location.key, **arguments)
            try:
                return answer["Body"].read()
            except BotoCoreError as problem:
                if time.monotonic() > deadline:
                    raise ObjectStoreUnavailable(
                        f"{location}: the connection breaks: {problem}."
                    ) from None
            time.sleep(FIRST_PAUSE_SECONDS)

    def write(self, location: S3Path, content: bytes) -> None:
        """A small object, whole."""
        self.call(
            location, "put_object", Key=location.key, Body=content, ContentMD5=_md5(content)[1]
        )

    def upload(self, location: S3Path, path: Path) -> None:
        """Send a file.

        Parts that an interrupted upload of the same bytes has left there are not sent again.
        """
        size = path.stat().st_size
        if size <= PART_BYTES:
            self.write(location, path.read_bytes())
            return

        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
        upload_id, sent_parts = self._unfinished(location)
        if upload_id is None:
            answer = self.call(location, "create_multipart_upload", Key=location.key)
            upload_id = answer["UploadId"]

        def send(number: int) -> dict[str, Any]:
            """Send one part, unless it is there; parts count from 1."""
            with open(path, "rb") as file:
                file.seek((number - 1) * part_bytes)
                content = file.read(part_bytes)
            checksum, encoded = _md5(content)
            # The ETag of a part is the MD5 of its bytes.
            if sent_parts.get(number) == (checksum, len(content)):
                return {"PartNumber": number, "ETag": f'"{checksum}"'}
            answer = self.call(
                location,
                "upload_part",
                Key=location.key,
                UploadId=upload_id,
                PartNumber=number,
                Body=content,
                ContentMD5=encoded,
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        num_parts = -(-size // part_bytes)
        with ThreadPoolExecutor(THREADS) as pool:
            parts = list(pool.map(send, range(1, num_parts + 1)))
        self.call(
            location,
            "complete_multipart_upload",
            Key=location.key,
            UploadId=upload_id,
            MultipartUpload={"Parts": parts},
        )

        # Parts were checked one by one; this notices a part that is missing or of another upload.
        if (stored_bytes := self.size(location)) != size:
            raise CheckpointError(
                f"{location}: has {stored_bytes} bytes after {size} were sent. Check the store."
            )

    def _unfinished(self, location: S3Path) -> tuple[str | None, dict[int, tuple[str, int]]]:
        """The newest unfinished upload of an object and its parts: number -> (MD5, size)."""
        # The prefix also matches longer keys.
        uploads = [
            upload
            for upload in self._uploads(location, location.key)
            if upload["Key"] == location.key
        ]
        if not uploads:
            return None, {}
        newest = max(uploads, key=lambda upload: upload["Initiated"])

        parts: dict[int, tuple[str, int]] = {}
        last_listed = 0
        while True:
            page = self.call(
                location,
                "list_parts",
                Key=location.key,
                UploadId=newest["UploadId"],
                PartNumberMarker=last_listed,
            )
            for part in page.get("Parts", []):
                parts[part["PartNumber"]] = (part["ETag"].strip('"'), part["Size"])
            if not page.get("IsTruncated"):
                return newest["UploadId"], parts
            last_listed = page["NextPartNumberMarker"]

    def _uploads(self, location: S3Path, prefix: str) -> list[dict[str, Any]]:
        """All unfinished uploads of keys that begin with `prefix`."""
        uploads: list[dict[str, Any]] = []
        markers: dict[str, Any] = {}
        while True:
            page = self.call(location, "list_multipart_uploads", Prefix=prefix, **markers)
            uploads += page.get("Uploads", [])
            if not page.get("IsTruncated"):
                return uploads
            markers = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort_uploads(self, location: S3Path) -> int:
        """Drop all unfinished uploads below a location; returns how many there were."""
        unfinished = self._uploads(location, _folder_prefix(location))
        for upload in unfinished:
            self.call(
                location, "abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"]
            )
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
        prefix = _folder_prefix(location)
        return {
            entry["Key"].removeprefix(prefix): int(entry["Size"])
            for entry in self._entries(location, prefix)
        }

    def objects(self, location: S3Path) -> dict[str, tuple[int, float]]:
        """Every object below a location: its size, and when it changed in seconds since 1970."""
        prefix = _folder_prefix(location)
        entries = self._entries(location, prefix)
        return {
            entry["Key"].removeprefix(prefix): (
                int(entry["Size"]),
                entry["LastModified"].timestamp(),
            )
            for entry in entries
        }

    def _entries(self, location: S3Path, prefix: str) -> Iterator[dict[str, Any]]:
        """All objects whose keys begin with `prefix`, page by page."""
        marker: dict[str, Any] = {}
        while True:
            page = self.call(location, "list_objects_v2", Prefix=prefix, **marker)
            yield from page.get("Contents", [])
            if not page.get("IsTruncated"):
                return
            marker = {"ContinuationToken": page["NextContinuationToken"]}

    def remove(self, location: S3Path, names: Iterable[str]) -> None:
        """Delete objects below a location, one after another in the order given."""
        # Not by one request for all: that has no order, and callers rely on theirs.
        for name in names:
            self.call(location, "delete_object", Key=(location / name).key)


@cache
def _client(
    endpoint: str | None, read_seconds: float, environment: tuple[tuple[str, str], ...]
) -> Any:
    """One client for all calls with the same arguments: to make one takes half a second."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    variables = dict(environment)
    custom_endpoint = (
        endpoint or variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")
    )
    # Amazon wants the bucket in the host name; other stores seldom have a DNS entry for each.
    addressing = {"addressing_style": "path"} if custom_endpoint else None
    settings = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=read_seconds,
        # `S3.call` retries, where it can be reported and the pause can be long.
        retries={"total_max_attempts": 1},
        max_pool_connections=2 * THREADS,
        # Stores other than Amazon's do not all know the newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=addressing,
    )
    try:
        return boto3.Session().client("s3", endpoint_url=endpoint, config=settings)
    except (BotoCoreError, ValueError) as problem:
        raise ConfigError(f"s3: {problem}. Check AWS_ENDPOINT_URL and AWS_REGION.") from None


class S3Refusal(CheckpointError):
    """The store rejected the request."""

    def __init__(self, location: S3Path, code: str, reason: str) -> None:
        super().__init__(
            f"{location}: the store refuses: {reason}. Check the bucket, the keys and their "
            "permissions."
        )
        self.is_missing = code in ("404", "NoSuchKey", "NotFound")


def _folder_prefix(location: S3Path) -> str:
    """With the slash: `runs/one` is not the beginning of `runs/one-more`."""
    if location.key:
        return f"{location.key}/"
    return ""


def _md5(content: bytes) -> tuple[str, str]:
    """In hexadecimal and as Content-MD5 has it; a checksum against accidents, not a secret."""
    digest = hashlib.md5(content, usedforsecurity=False)
    return digest.hexdigest(), base64.b64encode(digest.digest()).decode()
