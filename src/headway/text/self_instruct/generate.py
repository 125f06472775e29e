"""Self-instruct: seed tasks and an endpoint in, `tasks.jsonl` in Alpaca's form out.

    examples ──prompt──▶ endpoint ──answer──▶ tasks ──filter──▶ kept ──▶ journal ──▶ tasks.jsonl

Requests go out in rounds, and answers are judged in the order of request numbers, so equal
answers give equal tasks. Only seed tasks serve as examples, so mistakes of the model do not
accumulate. When a run ends for any reason, kept tasks are written to tasks.jsonl.

The journal has the settings in its first line, then one line per answered request. Each line is
on disk before the next request starts. A killed process leaves whole lines and at most one
partial line, which is removed; a restart repeats no request and loses no task. Only one process
at a time may write to a folder.
"""

from __future__ import annotations

import fcntl
import json
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import Any

from headway.config.regular_file import regular_only
from headway.errors import ConfigError, DataError
from headway.runtime.progress import Advance, progress
from headway.runtime.storage import fsync_file, fsync_folder, writing
from headway.text.self_instruct.endpoint import Client, EndpointError, Reply
from headway.text.self_instruct.filters import KeptTask, TaskFilter
from headway.text.self_instruct.settings import Endpoint, SelfInstruct
from headway.text.self_instruct.tasks import (
    LANGUAGES,
    InstructionTask,
    fingerprint,
    load_seeds,
    make_prompt,
    parse_answer,
)
from headway.text.write import record_file

NAME = ".journal.jsonl"
"""Hidden, so that a reader of the folder does not take it for tasks."""
TASKS = "tasks.jsonl"
SHOWN_REASONS = 5
"""Reasons of dropped tasks in a message."""


@dataclass(frozen=True)
class AnsweredRequest:
    """One answered request: the kept tasks, the dropped ones by reason, retries and token
    counts.
    """

    number: int
    kept: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    retries: dict[str, int] = field(default_factory=dict[str, int])
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Journal:
    """The journal of an output folder, open for appending and locked."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        self.answered: list[AnsweredRequest] = []
        # Open for as long as the run: the lock belongs to the open file.
        with writing(self.path, error=DataError):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", opener=regular_only)  # noqa: SIM115

        try:
            self._lock()
            self._read(dict(settings))
        except BaseException:
            self._file.close()
            raise

    def append(self, answered: AnsweredRequest) -> None:
        """Add one request; it is on disk when this returns."""
        self._write(asdict(answered))
        self.answered.append(answered)

    def kept(self) -> list[dict[str, Any]]:
        """The records of all tasks kept so far, in order."""
        return [record for answered in self.answered for record in answered.kept]

    def totals(self) -> tuple[Counter[str], Counter[str]]:
        """Dropped tasks by reason and retries by reason, of all requests."""
        dropped: Counter[str] = Counter()
        retries: Counter[str] = Counter()
        for answered in self.answered:
            dropped.update(answered.dropped)
            retries.update(answered.retries)
        return dropped, retries

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Refuse a second process: both would send the same requests."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path.parent}: another process writes tasks here. Wait until it ends, or "
                "choose another --out."
            ) from None
        except OSError as problem:
            raise DataError(
                f"{self.path}: cannot be locked: {problem.strerror}. Choose another --out."
            ) from None

    def _read(self, settings: dict[str, Any]) -> None:
        """Take over the answered requests of an earlier start; its settings must be the same."""
        self._file.seek(0)
        content = self._file.read()
        # A killed process may leave a partial last line.
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with writing(self.path, error=DataError):
                self._file.truncate(len(whole))

        lines = whole.splitlines()
        # No request was answered yet, so the settings may still change.
        if len(lines) <= 1:
            with writing(self.path, error=DataError):
                self._file.truncate(0)
                fsync_folder(self.path.parent)

            self._write({"settings": settings})
            return

        try:
            before: dict[str, Any] = json.loads(lines[0])["settings"]
            changed = [key for key in settings if before.get(key) != settings[key]]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise DataError(f"{self.path}:1: damaged. Choose another --out.") from None

        if changed:
            changes = ", ".join(
                f"{key} was {before.get(key)!r} and is {settings[key]!r}" for key in changed
            )
            raise ConfigError(
                f"{self.path.parent} holds tasks made with other settings: {changes}. Use the "
                "same settings or another --out."
            )

        # Line 1 has the settings.
        for number, line in enumerate(lines[1:], start=2):
            try:
                self.answered.append(AnsweredRequest(**json.loads(line)))
            except (ValueError, TypeError):
                raise DataError(
                    f"{self.path}:{number}: damaged. Remove the line; its tasks are lost."
                ) from None

    def _write(self, line: Mapping[str, Any]) -> None:
        with writing(self.path, error=DataError):
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            fsync_file(self._file.fileno())


@dataclass(frozen=True)
class SelfInstructReport:
    """The result over all starts of the run."""

    tasks: Path
    kept: int
    wanted: int
    requests: int
    dropped: dict[str, int]
    retries: dict[str, int]
    prompt_tokens: int
    completion_tokens: int


def self_instruct(wanted: SelfInstruct, endpoint: Endpoint) -> SelfInstructReport:
    """Request tasks until there are enough.

    Tasks in the output folder count; a complete run sends no request.
    """
    _check(wanted, endpoint)
    seeds = load_seeds(wanted.language, wanted.seeds)
    # What decides the tasks. Another number of tasks or another address may continue a run.
    settings = {
        "language": wanted.language,
        "seeds": fingerprint(seeds),
        "model": endpoint.model,
        "temperature": endpoint.temperature,
        "max_tokens": endpoint.max_tokens,
        "per_request": wanted.per_request,
        "seed": wanted.seed,
    }
    with Journal(wanted.out, settings) as journal:
        run = _Run(wanted, seeds, journal, Client(endpoint))
        try:
            with progress("self-instruct", total=wanted.num, unit="tasks") as advance:
                advance(min(run.num_kept, wanted.num))
                run.fill(advance)
        finally:
            # Also after an error or Ctrl-C: what was paid for is not lost.
            run.client.stop()
            if run.num_kept:
                with record_file(wanted.out / TASKS) as write:
                    for record in journal.kept():
                        write(record)

        dropped, retries = journal.totals()
        return SelfInstructReport(
            tasks=wanted.out / TASKS,
            kept=run.num_kept,
            wanted=wanted.num,
            requests=len(journal.answered),
            dropped=dict(dropped.most_common()),
            retries=dict(retries.most_common()),
            prompt_tokens=sum(answered.prompt_tokens for answered in journal.answered),
            completion_tokens=sum(answered.completion_tokens for answered in journal.answered),
        )


class _Run:
    """The tasks kept so far, and the rounds of requests for more."""

    def __init__(
        self, wanted: SelfInstruct, seeds: list[InstructionTask], journal: Journal, client: Client
    ) -> None:
        self.wanted = wanted
        self.seeds = seeds
        self.journal = journal
        self.client = client
        self.filter = TaskFilter(wanted.language, seeds)
        # New tasks are compared with those of earlier starts.
        self.num_kept = 0
        self._answers_without_task = 0
        for record in journal.kept():
            self.filter.remember(
                InstructionTask(record["instruction"], record["input"], record["output"])
            )
            self.num_kept += 1

    def fill(self, advance: Advance) -> None:
        """Send requests in rounds until there are enough tasks."""
        while self.num_kept < self.wanted.num:
            # The lowest numbers without an answer: after a failure, gaps are filled first.
            done = {answered.number for answered in self.journal.answered}
            numbers = list(
                islice(
                    (number for number in count() if number not in done),
                    self.wanted.requests_per_round,
                )
            )

            # One failed request does not discard the answers of the others.
            failure: EndpointError | None = None
            for number, reply in self._replies(numbers):
                if isinstance(reply, EndpointError):
                    failure = failure or reply
                else:
                    advance(self._record(number, reply))

            if failure is not None:
                raise EndpointError(f"{failure} {self._state()}")

            if self._answers_without_task >= self.wanted.give_up_after:
                reasons, _ = self.journal.totals()
                dropped = ", ".join(
                    f"{reason} {times}" for reason, times in reasons.most_common(SHOWN_REASONS)
                )
                raise EndpointError(
                    f"{self.client.endpoint.shown_address}: {self._answers_without_task} answers "
                    f"in a row had no task to keep (dropped so far: {dropped}). Try another "
                    f"--model, other --seeds or a higher --temperature. {self._state()}"
                )

    def _state(self) -> str:
        return (
            f"{self.num_kept}/{self.wanted.num} tasks are in {self.wanted.out}; the same command "
            "continues."
        )

    def _replies(self, numbers: list[int]) -> Iterator[tuple[int, Reply | EndpointError]]:
        """The replies to concurrent requests in the order of their numbers, each as soon as all
        earlier ones have arrived.
        """
        arrived: queue.SimpleQueue[tuple[int, Reply | BaseException]] = queue.SimpleQueue()

        def ask(number: int) -> None:
            prompt = make_prompt(
                self.seeds, self.wanted.language, self.wanted.per_request, self.wanted.seed, number
            )
            try:
                arrived.put((number, self.client.ask(prompt)))
            except BaseException as error:
                # Passed to the waiting thread, which raises it.
                arrived.put((number, error))

        for number in numbers:
            # Daemons: Ctrl-C must not wait for a server that does not answer.
            threading.Thread(
                target=ask, args=(number,), name=f"headway-ask-{number}", daemon=True
            ).start()

        waiting: dict[int, Reply | EndpointError] = {}
        for number in numbers:
            while number not in waiting:
                other, reply = arrived.get()
                if isinstance(reply, BaseException) and not isinstance(reply, EndpointError):
                    raise reply

                waiting[other] = reply

            yield number, waiting.pop(number)

    def _record(self, number: int, reply: Reply) -> int:
        """Judge the tasks of a reply and record them in the journal; returns how many were kept."""
        tasks, dropped = parse_answer(reply.text, reply.was_cut)
        kept: list[KeptTask] = []
        for task in tasks:
            if self.num_kept + len(kept) == self.wanted.num:
                dropped["more than wanted"] += 1
                continue

            # Judged in order, because a kept task makes later ones too similar.
            verdict = self.filter.judge(task)
            if isinstance(verdict, KeptTask):
                kept.append(verdict)
            else:
                dropped[verdict] += 1

        records = [kept_task.record() for kept_task in kept]
        self.journal.append(
            AnsweredRequest(
                number,
                records,
                dict(dropped),
                reply.retries,
                reply.prompt_tokens,
                reply.completion_tokens,
            )
        )
        self.num_kept += len(kept)
        self._answers_without_task += 1
        if kept or dropped["more than wanted"]:
            self._answers_without_task = 0

        return len(kept)


def _check(wanted: SelfInstruct, endpoint: Endpoint) -> None:
    """Refuse impossible settings, by the names of their options."""
    if wanted.language not in LANGUAGES:
        raise ConfigError(
            f"--language is {wanted.language!r}; it must be one of {', '.join(LANGUAGES)}."
        )

    least = {
        "--num": (wanted.num, 1),
        "--per-request": (wanted.per_request, 1),
        "--requests-per-round": (wanted.requests_per_round, 1),
        "--give-up-after": (wanted.give_up_after, 1),
        "--max-tokens": (endpoint.max_tokens, 1),
        "--max-retries": (endpoint.max_retries, 0),
        "--temperature": (endpoint.temperature, 0),
        "--rate-limit": (endpoint.requests_per_minute, 0),
        "--timeout": (endpoint.timeout_seconds, 0.001),
    }
    for name, (value, low) in least.items():
        if not low <= value < float("inf"):
            raise ConfigError(f"{name} is {value}; it must be a number of at least {low}.")
