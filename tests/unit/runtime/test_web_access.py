"""Who may ask a web server, and whose connections it keeps."""

import pytest

from headway.runtime.web_access import Access, ConnectionTable

TOKEN = "a" * 20


@pytest.mark.parametrize("spell", [str.lower, str.upper, str.title])
def test_names_of_headers_are_compared_without_case(spell) -> None:
    access = Access("127.0.0.1", TOKEN)

    def status(**headers: str) -> int | None:
        pairs = [(spell(name.replace("_", "-")), value) for name, value in headers.items()]
        refusal = access.check(pairs)
        return None if refusal is None else refusal.status

    known = {"host": "localhost:8000", "authorization": f"Bearer {TOKEN}"}
    assert status(**known) is None
    assert status(**known, origin="http://evil.example") == 403
    assert status(**known, sec_fetch_site="cross-site") == 403
    assert status(**{**known, "host": "evil.example"}) == 403
    assert status(host="localhost:8000") == 401
    assert status(host="localhost:8000", cookie=f"headway-board={TOKEN}") is None


def test_a_deciding_header_that_is_given_twice_is_refused() -> None:
    access = Access("127.0.0.1", None)
    for name in ("Host", "Origin", "Authorization", "Sec-Fetch-Site"):
        refusal = access.check(
            [("Host", "localhost"), (name, "localhost"), (name.lower(), "evil.example")]
        )
        assert refusal is not None
        assert refusal.status == 400
        assert name.lower() in refusal.text
    cookies = [("Host", "localhost"), ("Cookie", "a=b"), ("cookie", f"headway-board={TOKEN}")]
    assert Access("127.0.0.1", TOKEN).check(cookies) is None


def test_a_connection_that_never_asked_gives_way_first() -> None:
    table = ConnectionTable(4)
    for number in range(3):
        assert table.add(number, "attacker", float(number)) == (True, None)
    assert table.add("honest", "friend", 9.0) == (True, None)
    # Full: the client with most connections loses the one that waits longest, never the honest one.
    assert table.add("other", "friend", 10.0) == (True, 0)
    assert table.add("more", "attacker", 11.0) == (True, 1)
    table.begin_answer(2)
    table.end_answer(2, 12.0)
    # Number 2 brought a request before; `more` did not and goes first although it came later.
    assert table.add("again", "attacker", 13.0) == (True, "more")


def test_connections_that_are_answered_are_never_closed() -> None:
    table = ConnectionTable(2)
    for number in range(2):
        assert table.add(number, "a", 0.0)[0]
        table.begin_answer(number)
    assert table.add("new", "b", 1.0) == (False, None)
    assert len(table) == 2
    table.end_answer(0, 2.0)
    assert table.add("new", "b", 3.0) == (True, 0)
    table.remove("new")
    assert table.add("newer", "b", 4.0) == (True, None)


def test_one_address_never_has_every_connection() -> None:
    table = ConnectionTable(8)
    for number in range(6):
        assert table.add(number, "a", float(number)) == (True, None)
        table.begin_answer(number)
    assert table.add("a7", "a", 7.0) == (False, None)
    assert table.add("b", "b", 8.0) == (True, None)


def test_a_client_that_trickles_bytes_stays_the_oldest() -> None:
    table = ConnectionTable(2)
    table.add("slow", "a", 0.0)
    table.add("young", "a", 1.0)
    table.end_answer("slow", 2.0)  # bytes arrive, but no request was ever answered
    assert table.add("new", "a", 3.0) == (True, "slow")
