"""Hosts as people write them; what is no host is refused by name, or by its line, and never reaches a shell or ssh's options."""

import shlex
import subprocess
from pathlib import Path

import pytest

from headway.errors import ConfigError, LaunchError
from headway.launch.ssh.connection import (
    AGENT,
    OPTIONS,
    SshOptions,
    parse_message,
    remote_line,
    ssh_words,
)
from headway.launch.ssh.hosts import Host, parse_hosts, read_hostfile

HOSTILE = [
    "a b",
    "$(touch x)",
    "`id`",
    "'",
    '"',
    ";rm -rf /",
    "-oProxyCommand=id",
    "é",
    "*",
    "\\",
    "a\tb",
    "~root",
    "#x",
    "!!",
    "&&",
    "%h",
]


def test_hosts_are_parsed_with_user_port_and_address_family() -> None:
    assert parse_hosts("a, b.example,me@c:2222,[fe80::1]:22,u@::1,10.0.0.1") == [
        Host("a", label="a"), Host("b.example", label="b.example"), Host("c", "me", 2222, label="c"),
        Host("fe80::1", None, 22, label="fe80::1"),
        Host("::1", "u", label="::1"), Host("10.0.0.1", label="10.0.0.1"),
    ]  # fmt: skip


def test_hosts_of_one_name_are_told_apart_by_user_and_port() -> None:
    assert [host.label for host in parse_hosts("a:2201,a:2202,me@a,b")] == [
        "a:2201",
        "a:2202",
        "me@a",
        "b",
    ]


@pytest.mark.parametrize("text", ["", "a,,b", "a,", "a,a", "me@a:2222,me@a:2222", "a:0",
                                  "a:65536", "a:x", "a:", ":22", "@a", "u@", "a:8,b:8",
                                  *[name for name in HOSTILE if "," not in name], *[f"{name}@a" for name in HOSTILE]])  # fmt: skip
def test_what_is_no_host_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hosts(text)
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).startswith("--hosts")


def test_ranks_after_a_colon_are_explained() -> None:
    with pytest.raises(ConfigError, match="--nproc"):
        parse_hosts("a:8,b:8")


def test_host_files_of_mpi_torchrun_and_plain_lists_are_read(tmp_path: Path) -> None:
    (tmp_path / "h").write_text(
        "# cluster\n\ngpu01 slots=8  # first\nme@gpu02 slots=4 max-slots=4 port=2222\ngpu03:2\ngpu04\n10.0.0.9 max_slots=3\n"
    )
    assert [(host.name, host.user, host.port, host.slots) for host in read_hostfile(tmp_path / "h")] == [
        ("gpu01", None, None, 8), ("gpu02", "me", 2222, 4), ("gpu03", None, None, 2),
        ("gpu04", None, None, None), ("10.0.0.9", None, None, 3),
    ]  # fmt: skip


def test_a_name_on_several_lines_gets_a_rank_for_each(tmp_path: Path) -> None:
    (tmp_path / "h").write_text("a\na\nb\na\nb\n")
    assert [(host.name, host.slots) for host in read_hostfile(tmp_path / "h")] == [
        ("a", 3),
        ("b", 2),
    ]


def test_every_bad_line_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "h").write_text(
        "ok\nbad host\nalso slots=x\n-oProxyCommand=id\nc slots=0\nd slots=2 slots=2\ne slots=4 max_slots=2\nf:9:9:z\n"
    )
    with pytest.raises(ConfigError) as error:
        read_hostfile(tmp_path / "h")
    lines = str(error.value).splitlines()
    assert [line.split("line ")[1].split(":")[0] for line in lines] == [
        "2",
        "3",
        "4",
        "5",
        "6",
        "7",
        "8",
    ]


@pytest.mark.parametrize(
    "content", [b"", b"# nothing\n", b"\xff\xfe\x00", b"a slots=2\na slots=2\n", b"a\na:2\n"]
)
def test_a_file_without_usable_hosts_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "h").write_bytes(content)
    with pytest.raises(ConfigError, match="--hostfile"):
        read_hostfile(tmp_path / "h")


def test_a_missing_host_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize("word", HOSTILE)
def test_words_reach_the_other_side_unchanged(word: str) -> None:
    line = remote_line(["printf", "%s", word])
    assert (
        subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout.decode() == word
    )


@pytest.mark.parametrize("word", ["a\nb", "a\0b"])
def test_words_that_no_shell_line_can_hold_are_refused(word: str) -> None:
    with pytest.raises(LaunchError, match="line break or a zero byte"):
        remote_line(["printf", word])


def test_ssh_asks_no_questions_and_reads_no_host_as_an_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.launch.ssh.connection._ssh_program", lambda: "ssh")
    words = ssh_words(
        Host("c", "me", 2222),
        SshOptions("/opt/my python", "/etc/mine"),
        ["/opt/my python", "-P", "-m", AGENT],
    )
    assert words[-3:-1] == ["--", "c"]
    assert shlex.split(words[-1]) == [
        "exec",
        "/opt/my python",
        "-P",
        "-m",
        AGENT,
    ]
    assert "BatchMode=yes" in words
    assert words[-7:-3] == ["-p", "2222", "-l", "me"]
    assert words[2:4] == ["-F", "/etc/mine"]
    assert not any("StrictHostKeyChecking" in word for word in words), (
        "what the user's configuration says about host keys holds"
    )
    assert OPTIONS["ControlPath"] == "none", "the connection must end with this process"


@pytest.mark.parametrize(
    "line", [b"hello", b"@headway {", b"@headway []", b"@headway " + b"[" * 10_000, b"\xff"]
)
def test_a_line_that_is_no_message_is_a_log_line(line: bytes) -> None:
    assert parse_message(line) == {"log": line.decode(errors="replace")}


def test_a_marked_line_of_an_agent_is_parsed_as_a_message() -> None:
    assert parse_message(b'@headway {"ended": 0}\r') == {"ended": 0}
