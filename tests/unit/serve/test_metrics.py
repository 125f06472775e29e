"""The numbers of a server for Prometheus."""

from headway.serve.metrics import Histogram


def test_a_histogram_counts_what_is_below_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 9.0):
        histogram.add(value)
    assert [line.split()[-1] for line in histogram.lines("x", 'm="a"')] == [
        "2",
        "3",
        "4",
        "9.650000",
        "4",
    ]
