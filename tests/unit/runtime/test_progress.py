"""Quantities and times as people read them."""

from headway.runtime.progress import _state, duration, quantity  # pyright: ignore[reportPrivateUsage]


def test_quantities_have_three_digits_at_most_and_their_unit() -> None:
    values = [
        0,
        7,
        999,
        999.4,
        1000,
        1234,
        12_345,
        123_456,
        999_499,
        999_500,
        1.5e6,
        2.5e9,
        7e12,
        7e15,
    ]
    shown = [
        "0",
        "7",
        "999",
        "999",
        "1.0k",
        "1.2k",
        "12.3k",
        "123k",
        "999k",
        "1.0M",
        "1.5M",
        "2.5B",
        "7.0T",
        "7000T",
    ]
    assert [quantity(value) for value in values] == shown
    assert [quantity(value, "bytes") for value in (512, 1500, 2.5e9, 7e15)] == [
        "512 B",
        "1.5 kB",
        "2.5 GB",
        "7.0 PB",
    ]
    assert quantity(1500, "tokens") == "1.5k tokens"


def test_times_have_two_units_at_most() -> None:
    seconds = [-3, 0, 8.4, 59.4, 59.6, 65, 245, 3599, 3600, 11_220, 86_399, 86_400, 187_200]
    shown = [
        "0s",
        "0s",
        "8s",
        "59s",
        "1m 00s",
        "1m 05s",
        "4m 05s",
        "59m 59s",
        "1h 00m",
        "3h 07m",
        "23h 59m",
        "1d 00h",
        "2d 04h",
    ]
    assert [duration(duration_seconds) for duration_seconds in seconds] == shown


def test_progress_is_shown_as_done_of_total_with_one_unit() -> None:
    assert _state(1, 1, "prompts", 0.5) == "1/1 prompts (100%), 2 prompts/s"
    assert _state(1.5e6, 3e9, "bytes", 0) == "1.5 MB/3.0 GB (0%)"
    assert _state(1500, None, "tokens", 1) == "1.5k tokens, 1.5k tokens/s"
