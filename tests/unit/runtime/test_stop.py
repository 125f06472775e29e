"""The first signal is a request, a second Ctrl-C is not; the old handlers come back."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from headway.runtime.stop import SIGNALS, StopSignal


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C reaches the test even where the test run itself is a background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_only_asks_and_the_handlers_come_back(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
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
