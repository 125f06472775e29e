"""Self-instruct: seed tasks and an endpoint in, `tasks.jsonl` in Alpaca's form out.

    examples ──prompt──▶ endpoint ──answer──▶ tasks ──filter──▶ kept ──▶ journal ──▶ tasks.jsonl

Requests go out in rounds and are judged in the order of their numbers, so that equal answers give equal tasks. Only seed tasks are shown
as examples: mistakes of the model do not feed on themselves. Whatever ends a run, what is kept is written; started again, it continues.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from headway.errors import ConfigError
from headway.runtime.progress import Advance, progress
from headway.text.self_instruct.endpoint import Client, Endpoint, EndpointError, Reply
from headway.text.self_instruct.filters import Filter, Kept
from headway.text.self_instruct.journal import Answered, Journal
from headway.text.self_instruct.prompt import make_prompt, parse_answer
from headway.text.self_instruct.task import LANGUAGES, Language, Task, fingerprint, load_seeds
from headway.text.write import record_file

TASKS = "tasks.jsonl"


@dataclass(frozen=True)
class SelfInstruct:
    """What to make: so many tasks, in which language, from which seed tasks, in requests of which size."""

    num: int
    out: Path
    language: Language = "en"
    seeds: Path | None = None
    per_request: int = 20
    requests_per_round: int = 5
    seed: int = 0
    give_up_after: int = 20
    """So many answers in a row without a task that is kept end the run."""


@dataclass(frozen=True)
class Report:
    """What came of it, over all starts of the run."""

    tasks: Path
    kept: int
    wanted: int
    requests: int
    dropped: dict[str, int]
    retries: dict[str, int]
    prompt_tokens: int
    completion_tokens: int


def self_instruct(wanted: SelfInstruct, endpoint: Endpoint) -> Report:
    """Ask until there are enough tasks. What is in the output folder already counts; a run that is complete asks nothing."""
    _check(wanted, endpoint)
    seeds = load_seeds(wanted.language, wanted.seeds)
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
            run.client.stop()
            if run.num_kept:
                with record_file(wanted.out / TASKS) as write:
                    for record in journal.kept():
                        write(record)
        dropped, retries = journal.totals()
        return Report(
            tasks=wanted.out / TASKS,
            kept=run.num_kept,
            wanted=wanted.num,
            requests=len(journal.answered),
            dropped=dict(dropped.most_common()),
            retries=dict(retries.most_common()),
            prompt_tokens=sum(one.prompt_tokens for one in journal.answered),
            completion_tokens=sum(one.completion_tokens for one in journal.answered),
        )


class _Run:
    """The tasks kept so far and how to get more."""

    def __init__(self, wanted: SelfInstruct, seeds: list[Task], journal: Journal, client: Client) -> None:
        self.wanted = wanted
        self.seeds = seeds
        self.journal = journal
        self.client = client
        self.filter = Filter(wanted.language, seeds)
        self.num_kept = 0
        self._barren = 0
        for record in journal.kept():
            self.filter.remember(Task(record["instruction"], record["input"], record["output"]))
            self.num_kept += 1

    def fill(self, advance: Advance) -> None:
        """Ask in rounds until there are enough tasks."""
        while self.num_kept < self.wanted.num:
            done = {one.number for one in self.journal.answered}
            numbers = list(islice((number for number in count() if number not in done), self.wanted.requests_per_round))
            failure: EndpointError | None = None
            for number, reply in self._ask(numbers):
                if isinstance(reply, EndpointError):
                    failure = failure or reply
                else:
                    advance(self._take(number, reply))
            if failure is not None:
                raise EndpointError(f"{failure} {self._state()}")
            if self._barren >= self.wanted.give_up_after:
                dropped = ", ".join(f"{reason} {times}" for reason, times in self.journal.totals()[0].most_common(5))
                raise EndpointError(
                    f"{self.client.endpoint.shown}: {self._barren} answers in a row held no task to keep (dropped so far: {dropped}). "
                    f"Try another --model, other --seeds or a higher --temperature. {self._state()}"
                )

    def _state(self) -> str:
        return f"{self.num_kept} of {self.wanted.num} tasks are kept in {self.wanted.out}; the same command continues."

    def _ask(self, numbers: list[int]) -> Iterator[tuple[int, Reply | EndpointError]]:
        """The replies to requests asked at the same time, in the order of their numbers, each as soon as those before it are there."""
        arrived: queue.SimpleQueue[tuple[int, Reply | BaseException]] = queue.SimpleQueue()

        def ask(number: int) -> None:
            prompt = make_prompt(self.seeds, self.wanted.language, self.wanted.per_request, self.wanted.seed, number)
            try:
                arrived.put((number, self.client.ask(prompt)))
            except BaseException as error:  # carried to the thread that waits for it, which raises it
                arrived.put((number, error))

        for number in numbers:
            # daemons: Ctrl-C must not wait for a server that does not answer
            threading.Thread(target=ask, args=(number,), name=f"headway-ask-{number}", daemon=True).start()
        waiting: dict[int, Reply | EndpointError] = {}
        for number in numbers:
            while number not in waiting:
                other, reply = arrived.get()
                if isinstance(reply, BaseException) and not isinstance(reply, EndpointError):
                    raise reply
                waiting[other] = reply
            yield number, waiting.pop(number)

    def _take(self, number: int, reply: Reply) -> int:
        """Judge the tasks of a reply and write them down; how many were kept."""
        tasks, dropped = parse_answer(reply.text, reply.was_cut)
        kept: list[Kept] = []
        for task in tasks:
            if self.num_kept + len(kept) == self.wanted.num:
                dropped["more than wanted"] += 1
                continue
            verdict = self.filter.judge(task)
            if isinstance(verdict, Kept):
                kept.append(verdict)
            else:
                dropped[verdict] += 1
        records = [one.record() for one in kept]
        self.journal.append(Answered(number, records, dict(dropped), reply.retries, reply.prompt_tokens, reply.completion_tokens))
        self.num_kept += len(kept)
        self._barren = 0 if kept or dropped["more than wanted"] else self._barren + 1
        return len(kept)


def _check(wanted: SelfInstruct, endpoint: Endpoint) -> None:
    if wanted.language not in LANGUAGES:
        raise ConfigError(f"--language is {wanted.language!r}; it must be one of {', '.join(LANGUAGES)}.")
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
