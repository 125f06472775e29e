"""Before a job starts, hosts agree on versions, clocks and one shared folder; a difference is named with its hosts and stops the job."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from headway.diagnose import host
from headway.diagnose import preflight as module
from headway.diagnose.check import Check, failures
from headway.diagnose.gpu_health import GpuHealth
from headway.diagnose.host import HostNeeds, host_facts, variable_checks
from headway.diagnose.preflight import StoreExchange, compare_hosts, preflight, require
from headway.errors import LaunchError


class Meeting:
    """A store for threads that stand for hosts: `get` waits for `set`, as torch's does."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout=5):
                raise RuntimeError("wait timeout after 5000ms")
            return self.values[key].encode()


def on_hosts(
    size: int, folder: Callable[[int], Path], needs: HostNeeds = HostNeeds()
) -> list[list[Check]]:
    store = Meeting()
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(
                lambda node: preflight(StoreExchange(store, node, size), folder(node), needs, {}),
                range(size),
            )
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEE_SECONDS", 0.2)
    monkeypatch.setattr(module, "RENAME_SECONDS", 0.1)
    monkeypatch.setattr(host, "read_gpu_health", lambda: ([], None))


def test_equal_hosts_that_share_a_folder_pass_and_leave_nothing(tmp_path: Path) -> None:
    answers = on_hosts(3, lambda node: tmp_path / "runs" / "new")
    assert answers[0] == answers[1] == answers[2]
    assert {"hosts", "versions", "clocks", "shared folder", "atomic rename"} <= {
        check.name for check in answers[0]
    }
    assert failures(answers[0]) == [] and list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_shared_is_named_on_every_host(tmp_path: Path) -> None:
    answers = on_hosts(2, lambda node: tmp_path / str(node))
    assert [check.state for check in answers[0]] == [check.state for check in answers[1]]
    found = next(check for check in answers[0] if check.name == "shared folder")
    assert found.state == "fail" and "does not see what" in found.detail
    assert list(tmp_path.rglob("*")) == []
    with pytest.raises(LaunchError, match=r"not started.*shared folder.*run\.dir"):
        require(answers[0])


def test_a_folder_that_one_host_cannot_write_fails_there(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("a file")
    answers = on_hosts(2, lambda node: tmp_path / str(node))
    text = " ".join(check.detail for check in failures(answers[0]))
    assert "(node 1)" in text or any("(node 1)" in check.name for check in failures(answers[0]))


def test_a_file_that_is_not_replaced_at_once_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_replace(source: Path, target: Path) -> None:
        Path(target).unlink(missing_ok=True)
        time.sleep(0.05)
        Path(source).rename(target)

    monkeypatch.setattr(module.os, "replace", slow_replace)
    monkeypatch.setattr(module, "RENAME_SECONDS", 0.4)
    found = next(
        check for check in on_hosts(2, lambda node: tmp_path)[0] if check.name == "atomic rename"
    )
    assert found.state == "fail" and "missing for a moment" in found.detail


def test_versions_code_gpus_and_the_recipe_are_compared() -> None:
    one = replace(host_facts(), host="a", gpus=("H100",) * 8, same={"recipe": "1"})
    assert failures(compare_hosts([one, replace(one, host="b")])) == []
    other = replace(
        one,
        host="b",
        packages={**one.packages, "torch": "2.0", "rich": "1"},
        code="x",
        gpus=("H100",) * 7,
        same={"recipe": "2"},
    )
    checks = {check.name: check for check in compare_hosts([one, other], [0.0, -40.0])}
    assert checks["package torch"].state == "fail" and "2.0 on b" in checks["package torch"].detail
    assert checks["package rich"].state == "warn" and checks["headway's code"].state == "fail"
    assert "7 x H100 on b" in checks["gpus"].detail and checks["recipe"].state == "fail"
    assert checks["clocks"].state == "warn" and "b -40.0 s" in checks["clocks"].detail
    assert all(check.remedy for check in checks.values() if check.state != "ok")


def alone() -> StoreExchange:
    """The exchange of a job on one host."""
    return StoreExchange(Meeting(), 0, 1)


def test_a_host_with_too_few_or_sick_gpus_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick = [GpuHealth(0, "H100"), GpuHealth(1, "H100", uncorrected_errors=3)]
    monkeypatch.setattr(host, "read_gpu_health", lambda: (sick, None))
    checks = preflight(alone(), tmp_path, HostNeeds(ranks=4, gpu_ranks=True), {})
    assert {check.name for check in failures(checks)} == {"gpu count", "gpu 1 health"}
    only_first = preflight(
        alone(), tmp_path, HostNeeds(ranks=1, gpu_ranks=True), {"CUDA_VISIBLE_DEVICES": "0"}
    )
    assert failures(only_first) == []


def test_a_missing_node_is_one_clear_line() -> None:
    store = Meeting()
    store.get = lambda key: (
        store.values[key].encode()
        if key in store.values
        else (_ for _ in ()).throw(RuntimeError("wait timeout"))
    )  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match="node 1 did not answer"):
        StoreExchange(store, 0, 2).swap("x")


def test_network_variables_that_cannot_work_are_named() -> None:
    given = {"NCCL_SOCKET_IFNAME": "eth77", "GLOO_SOCKET_IFNAME": "lo", "NCCL_TIMEOUT": "60"}
    found = {check.name: check.state for check in variable_checks(given)}
    assert found == {"NCCL_SOCKET_IFNAME": "fail", "NCCL_TIMEOUT": "warn"}
    assert list(variable_checks({"NCCL_SOCKET_IFNAME": "^docker0,lo"})) == []


def test_doubts_are_logged_and_do_not_stop_a_job(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="headway"):
        require([Check("clocks", "warn", "differ", "Use NTP.")])
    assert "Use NTP." in caplog.text
