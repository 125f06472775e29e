"""The first signal is a request, a second Ctrl-C is not; the old handlers come back."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from support.foreground_signals import heeded_signals

from headway.errors import Interrupted, Terminated
from headway.runtime import stop as stop_module
from headway.runtime.stop import SIGNALS, StopBeforeStart, StopSignal, raise_for_signal


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Signals reach the test even where the test run itself ignores them."""
    with heeded_signals():
        yield


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_only_asks_and_the_handlers_come_back(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopSignal() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == number.name
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert capfd.readouterr().err.count("finishing this step") == 1


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_ctrl_c_after_any_request_stops_at_once(first: signal.Signals) -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), first)
        assert stop.requested == first.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (0, "nothing is kept: no checkpoint was saved yet"),
        (40, "the checkpoint of step 40 is kept"),
    ],
)
def test_stopping_at_once_says_what_is_kept(
    step: int, kept: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopSignal() as stop:
        stop.saved_step = lambda: step
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.splitlines()[-1] == f"stopped at once; {kept}"


def test_in_another_thread_nothing_happens() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:
        with StopSignal() as stop:
            seen.extend([signal.getsignal(signal.SIGTERM), stop.requested])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, None]


def test_a_signal_the_parent_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested is None


def test_while_starting_a_signal_ends_at_once() -> None:
    with StopSignal(starting=True) as stop, pytest.raises(StopBeforeStart) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.signal_name == stop.requested == "SIGTERM"


def blocked(numbers: list[int], stop: StopSignal) -> int:
    """The exit code of a process that gets signals while its main thread is in a call that never comes back."""
    child = os.fork()
    if child == 0:
        library = ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(128)
        with stop:
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)  # deadlock: no signal interrupts it
        os._exit(99)
    for number in numbers:
        time.sleep(0.3)
        os.kill(child, number)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_second_ctrl_c_works_while_the_main_thread_is_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_module, "AT_ONCE_SECONDS", 0.1)
    assert blocked([signal.SIGTERM, signal.SIGINT], StopSignal()) == 130


def test_the_grace_period_ends_a_blocked_process_unless_it_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert blocked([signal.SIGUSR1], StopSignal(grace_seconds=0.2)) == 138
    monkeypatch.setattr(stop_module, "AT_ONCE_SECONDS", 0.1)
    saving = StopSignal(grace_seconds=0.2)
    saving.is_saving = lambda: True
    # neither of the first two ended it
    assert blocked([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], saving) == 130


def test_who_has_nothing_to_save_leaves_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "NOTHING_TO_SAVE_SECONDS", 0.1)
    stop = StopSignal(grace_seconds=600.0)
    stop.has_something_to_save = lambda: False
    assert blocked([signal.SIGTERM], stop) == 143


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [("SIGINT", Interrupted, 130), ("SIGTERM", Terminated, 143), ("SIGHUP", Terminated, 129)],
)
def test_a_program_learns_of_the_signal_by_a_typed_exception(
    name: str, kind: type[Terminated], code: int
) -> None:
    before = signal.signal(
        signal.Signals[name], signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    )
    try:
        with pytest.raises(kind) as caught:
            raise_for_signal(name, "saved", {"run": "runs/a"})
    finally:
        signal.signal(signal.Signals[name], before)
    assert (caught.value.code, caught.value.exit_code, caught.value.run, str(caught.value)) == (
        code,
        code,
        "runs/a",
        "saved",
    )
    assert isinstance(caught.value, KeyboardInterrupt) == (name == "SIGINT")
    raise_for_signal(None, "", {})
    raise_for_signal("headway stop", "", {})


def test_there_is_a_hurry_once_half_of_the_grace_period_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = StopSignal(grace_seconds=10.0)
    assert not stop.in_hurry(), "nobody has asked"
    stop.requested_at = 100.0
    seen = []
    for now in (100.0, 104.9, 105.1, 109.0, 120.0):
        monkeypatch.setattr("headway.runtime.stop.time.monotonic", lambda now=now: now)
        seen.append(stop.in_hurry())
    assert seen == [False, False, True, True, True]
    stop.grace_seconds = None
    assert not stop.in_hurry()
