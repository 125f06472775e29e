"""A limit on the requests of one client."""

import pytest

from headway.serve.api_errors import ApiError
from headway.serve.limits import RateLimit


def test_a_client_above_its_rate_waits() -> None:
    rate = RateLimit(60)
    for _ in range(60):
        rate.take("a", 100.0)
    with pytest.raises(ApiError) as caught:
        rate.take("a", 100.5)
    assert caught.value.status == 429
    assert caught.value.headers() == {"Retry-After": "2"}
    rate.take("b", 100.5)
    rate.take("a", 101.1)
    RateLimit(0).take("a")
