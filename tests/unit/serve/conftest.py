"""One server with stand-in engines for all tests that only ask it things."""

from collections.abc import Iterator

import pytest
from support.serving import RunningServer, serving


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """Two models and an adapter, with small limits."""
    options = (
        "--max-body-mib",
        "0.25",
        "--max-n",
        "4",
        "--request-seconds",
        "2",
        "--max-tokens",
        "2000",
        "--max-waiting",
        "20",
        "--max-running",
        "8",
    )
    with serving(
        "--model", "m=stand-in", "--model", "plain=no-template", "--adapter", "m:ad=x", *options
    ) as running:
        yield running
