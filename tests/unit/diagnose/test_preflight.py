"""Before a job starts, hosts agree on versions, clocks and one shared folder; a difference is named with its hosts and stops the job."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.diagnose import host
from headway.diagnose import preflight as module
from headway.diagnose.check import Check, failures
from headway.diagnose.gpu_health import GpuHealth
from headway.diagnose.host import HostFacts, HostNeeds, host_facts, variable_checks
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
    assert failures(answers[0]) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_shared_is_named_on_every_host(tmp_path: Path) -> None:
    answers = on_hosts(2, lambda node: tmp_path / str(node))
    assert [check.state for check in answers[0]] == [check.state for check in answers[1]]
    shared = next(check for check in answers[0] if check.name == "shared folder")
    assert shared.state == "fail"
    assert "does not see what" in shared.detail
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
    shared = next(
        check for check in on_hosts(2, lambda node: tmp_path)[0] if check.name == "atomic rename"
    )
    assert shared.state == "fail"
    assert "missing for a moment" in shared.detail


def facts_of(host: str, **differences: Any) -> HostFacts:
    facts = replace(host_facts(), host=host, gpus=("H100",) * 8, same={"recipe": "1"})
    return replace(facts, **differences)


def comparison_with(clocks: list[float] | None = None, **differences: Any) -> dict[str, Check]:
    """What is said of two hosts of which the second differs."""
    checks = compare_hosts([facts_of("a"), facts_of("b", **differences)], clocks)
    assert all(check.remedy for check in checks if check.state != "ok")
    return {check.name: check for check in checks}


def test_hosts_that_are_alike_pass() -> None:
    assert failures(compare_hosts([facts_of("a"), facts_of("b")])) == []


def test_another_torch_fails_and_another_small_package_warns() -> None:
    packages = {**host_facts().packages, "torch": "2.0", "rich": "1"}
    checks = comparison_with(packages=packages)
    assert checks["package torch"].state == "fail"
    assert "2.0 on b" in checks["package torch"].detail
    assert checks["package rich"].state == "warn"


def test_other_code_or_another_recipe_fails() -> None:
    checks = comparison_with(code="x", same={"recipe": "2"})
    assert checks["headway's code"].state == "fail"
    assert checks["recipe"].state == "fail"


def test_a_host_with_fewer_gpus_is_named() -> None:
    checks = comparison_with(gpus=("H100",) * 7)
    assert "7 x H100 on b" in checks["gpus"].detail


def test_clocks_that_differ_warn() -> None:
    checks = comparison_with(clocks=[0.0, -40.0])
    assert checks["clocks"].state == "warn"
    assert "b -40.0 s" in checks["clocks"].detail


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
    variables = {"NCCL_SOCKET_IFNAME": "eth77", "GLOO_SOCKET_IFNAME": "lo", "NCCL_TIMEOUT": "60"}
    states = {check.name: check.state for check in variable_checks(variables)}
    assert states == {"NCCL_SOCKET_IFNAME": "fail", "NCCL_TIMEOUT": "warn"}
    assert list(variable_checks({"NCCL_SOCKET_IFNAME": "^docker0,lo"})) == []


def test_doubts_are_logged_and_do_not_stop_a_job(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="headway"):
        require([Check("clocks", "warn", "differ", "Use NTP.")])
    assert "Use NTP." in caplog.text
