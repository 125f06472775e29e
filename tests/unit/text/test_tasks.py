"""`--on` gives the bytes of one process: for every kind of executor, size of task and memory, after lost workers and killed drivers."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.corpora import texts, write_corpus
from support.fake_slurm import install
from support.one_process_executor import OneProcessExecutor, run_inside

from headway.cli import main
from headway.errors import ConfigError, DataError, LaunchError
from headway.runtime.executor import slurm as slurm_kind
from headway.runtime.executor.work import Placement, work_folder
from headway.text.clean import clean_files
from headway.text.clean_rules import ONLY_DUPLICATES, CleanRules
from headway.text.sample import SourceShare, sample
from headway.text.tasks.clean import clean_files_on
from headway.text.tasks.parts import Reading, cut_files
from headway.text.tasks.sample import sample_on

LINES = Reading(split="line")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for SLURM whose elements are processes."""
    monkeypatch.setenv("PATH", f"{install(tmp_path)}{os.pathsep}{os.environ['PATH']}")
    for name, seconds in (("POLL_SECONDS", 0.05), ("QUEUE_SECONDS", 0.3), ("SETTLE_SECONDS", 0.5)):
        monkeypatch.setattr(slurm_kind, name, seconds)
    return tmp_path


def one_process(corpus: list[str], out: Path, rules: CleanRules) -> str:
    return json.dumps(clean_files(corpus, out, rules, split="line").to_dict())


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> OneProcessExecutor:
    """Tasks run in this process."""
    return run_inside(monkeypatch)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.parquet"])
def test_tasks_write_the_bytes_and_the_report_of_one_process(
    corpus: list[str], tmp_path: Path, name: str, inside: OneProcessExecutor
) -> None:
    alone = tmp_path / f"one-{name}"
    many = tmp_path / name
    report = one_process(corpus, alone, CleanRules())
    report_of_tasks = clean_files_on(corpus, many, CleanRules(), Placement(task_bytes=9000), LINES)
    assert json.dumps(report_of_tasks.to_dict()) == report
    assert many.read_bytes() == alone.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"one-{name}", name])
    assert sum(task.startswith("clean") for task in inside.ran) > 6


@pytest.mark.parametrize(
    ("rules", "memory"),
    [
        (CleanRules(similarity=0.6), 1),
        (CleanRules(similarity=0.6), None),
        (replace(ONLY_DUPLICATES, seed=3), 1),
        (replace(ONLY_DUPLICATES, seed=3), 300_000),
        (CleanRules(duplicates="exact"), 1),
    ],
)
def test_duplicates_do_not_depend_on_memory(
    tmp_path: Path,
    rules: CleanRules,
    memory: int | None,
    inside: OneProcessExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("RUN_DOCUMENTS", 50),
        ("LEAST_RECORDS", 200),
        ("PAIRS_AT_ONCE", 30),
        ("WINDOW_ROWS", 70),
    ):
        monkeypatch.setattr(
            f"headway.text.tasks.{'signatures' if name == 'RUN_DOCUMENTS' else 'dedup'}.{name}",
            value,
        )
    # one text in very many versions: more than the first 16 of a key
    many = [
        f"{'the same long beginning of a page that was copied ' * 4}{text[:40]}"
        for text in texts(80, seed=9)
        if text
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*texts(250), *many]),
        encoding="utf-8",
    )
    report = clean_files([tmp_path / "a.jsonl"], tmp_path / "one.jsonl", rules)
    report_of_tasks = clean_files_on(
        [tmp_path / "a.jsonl"],
        tmp_path / "many.jsonl",
        replace(rules, max_memory_bytes=memory),
        Placement(task_bytes=20000),
        Reading(),
    )
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert report_of_tasks.to_dict() == report.to_dict()
    assert report.removed_documents["duplicate"] > 20
    if rules.duplicates == "near":
        assert report.removed_documents["near duplicate"] > 30
        assert (sum(task.startswith("near") for task in inside.ran) > 20) == (memory == 1)


def test_every_line_is_in_one_part(tmp_path: Path) -> None:
    """Whatever the size of a part: long lines, blank lines, no line end at the end."""
    content = "".join(f"{'x' * (7 * n % 23)}{n}\n" for n in range(60)) + "last"
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    for size in (1, 2, 3, 10, 64, 700, 10**6):
        parts = [part for task in cut_files([tmp_path / "a.txt"], "line", size) for part in task]
        lines = []
        for part in parts:
            with part.counted().open().open() as stream:
                lines.append(stream.read().decode())
        assert "".join(lines) == content
        assert all(not text or text.endswith(("\n", "last")) for text in lines)


@pytest.mark.parametrize("bad", ["{broken", json.dumps({"no": "text"}), "\udcff"])
def test_a_bad_record_is_the_same_error_with_its_line(
    tmp_path: Path, bad: str, inside: OneProcessExecutor
) -> None:
    lines = [json.dumps({"text": text}) for text in texts(60)]
    lines[37] = lines[50] = bad
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DataError) as error_alone:
        clean_files([tmp_path / "a.jsonl"], tmp_path / "one.jsonl", CleanRules())
    with pytest.raises(DataError) as many:
        clean_files_on(
            [tmp_path / "a.jsonl"],
            tmp_path / "many.jsonl",
            CleanRules(),
            Placement(task_bytes=900),
            Reading(),
        )
    assert str(many.value) == str(error_alone.value)
    assert "a.jsonl:38" in str(error_alone.value)
    assert not (tmp_path / "many.jsonl").exists()


def test_empty_files_and_blank_ranges_are_refused_as_by_one_process(
    tmp_path: Path, inside: OneProcessExecutor
) -> None:
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "blank.jsonl").write_text("\n" * 5000, encoding="utf-8")
    for name in ("empty.jsonl", "blank.jsonl"):
        with pytest.raises(DataError) as error_alone:
            clean_files([tmp_path / name], tmp_path / "one.jsonl", CleanRules())
        with pytest.raises(DataError, match="no documents; the file is empty") as many:
            clean_files_on(
                [tmp_path / name],
                tmp_path / "many.jsonl",
                CleanRules(),
                Placement(task_bytes=900),
                Reading(),
            )
        assert str(many.value) == str(error_alone.value)
    (tmp_path / "short.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="no document passed the rules"):
        clean_files_on(
            [tmp_path / "short.jsonl"],
            tmp_path / "many.jsonl",
            CleanRules(),
            Placement(),
            Reading(),
        )


def test_lost_tasks_are_done_again_and_not_for_ever(
    corpus: list[str], tmp_path: Path, inside: OneProcessExecutor
) -> None:
    report = one_process(corpus, tmp_path / "one.jsonl", CleanRules())
    inside.lose = {0: 1, 2: 3}
    placement = Placement(task_bytes=9000)
    assert (
        json.dumps(
            clean_files_on(
                corpus, tmp_path / "many.jsonl", CleanRules(), placement, LINES
            ).to_dict()
        )
        == report
    )
    inside.lose = {1: 99}
    with pytest.raises(LaunchError, match="task 1 was lost 4 times"):
        clean_files_on(corpus, tmp_path / "again.jsonl", CleanRules(), placement, LINES)
    assert not (tmp_path / "again.jsonl").exists()


def test_a_stopped_driver_continues_and_repeats_nothing(
    corpus: list[str], tmp_path: Path, inside: OneProcessExecutor
) -> None:
    report = one_process(corpus, tmp_path / "one.jsonl", CleanRules())
    placement = Placement(task_bytes=9000, work_dir=tmp_path / "elsewhere")
    inside.stop_after = 4
    with pytest.raises(
        KeyboardInterrupt,
        match=r"finished tasks are kept in .*many.jsonl.work. Run the same command again",
    ):
        clean_files_on(corpus, tmp_path / "many.jsonl", CleanRules(), placement, LINES)
    done = list(inside.ran)
    inside.stop_after = None
    assert len(done) == 4
    assert not (tmp_path / "many.jsonl").exists()
    report_of_tasks = clean_files_on(
        corpus, tmp_path / "many.jsonl", CleanRules(), placement, LINES
    )
    assert json.dumps(report_of_tasks.to_dict()) == report
    assert len(inside.ran) == len(set(inside.ran))
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_changed_input_or_rule_is_work_of_its_own(
    tmp_path: Path, inside: OneProcessExecutor
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts(60)), encoding="utf-8"
    )
    placement = Placement(task_bytes=2000)
    inside.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        clean_files_on([source], tmp_path / "many.jsonl", CleanRules(), placement, Reading())
    source.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts(70, seed=4)), encoding="utf-8"
    )
    inside.stop_after = None
    clean_files([source], tmp_path / "one.jsonl", CleanRules())
    clean_files_on([source], tmp_path / "many.jsonl", CleanRules(), placement, Reading())
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


@pytest.mark.parametrize(("size", "seed"), [(3000, 0), (60_000, 1), (150_000, 2)])
def test_a_sample_is_the_one_of_one_process(
    tmp_path: Path,
    inside: OneProcessExecutor,
    size: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.text.tasks.sample.OPEN_FILES", 3)
    for name, start in (("a", 0), ("b", 7)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": t}) + "\n" for t in texts(400, start)), encoding="utf-8"
        )
    shares = [
        SourceShare(str(tmp_path / "a.jsonl"), 0.7),
        SourceShare(str(tmp_path / "b.jsonl"), 0.3),
    ]
    sample_alone = sample(shares, size, tmp_path / "one.jsonl", seed=seed)
    many = sample_on(
        shares, size, tmp_path / "many.jsonl", Placement(task_bytes=20_000), Reading(), seed=seed
    )
    assert many == sample_alone
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    with pytest.raises(DataError) as alone:
        sample(shares, 10**9, tmp_path / "one.jsonl")
    with pytest.raises(DataError) as together:
        sample_on(shares, 10**9, tmp_path / "many.jsonl", Placement(task_bytes=20_000), Reading())
    assert str(together.value) == str(alone.value)


def test_a_folder_without_permission_is_one_line(
    tmp_path: Path, inside: OneProcessExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a text that is long enough"}\n', encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    words = ["data", "clean", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--on", "local"]
    assert main([*words, "--work-dir", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([*words[:-2], "--task-size", "1MB"]) == 2
    assert "--task-size has no meaning with a run without --on" in capsys.readouterr().err


def test_two_drivers_do_not_share_a_work_folder(
    corpus: list[str], tmp_path: Path, inside: OneProcessExecutor
) -> None:
    with (
        work_folder(tmp_path / "many.jsonl", Placement()),
        pytest.raises(
            ConfigError,
            match=r"many.jsonl.work is in use by process \d+ .* which makes the same output",
        ),
    ):
        clean_files_on(corpus, tmp_path / "many.jsonl", CleanRules(), Placement(), LINES)


def test_array_jobs_write_the_bytes_of_one_process(
    corpus: list[str], tmp_path: Path, slurm: Path
) -> None:
    rules = CleanRules(duplicates="keep")
    report = one_process(corpus, tmp_path / "one.jsonl", rules)
    placement = Placement("slurm:partition=cpu,mem=8G,exclude=n1,n2", 2, task_bytes=30000)
    assert (
        json.dumps(
            clean_files_on(corpus, tmp_path / "many.jsonl", rules, placement, LINES).to_dict()
        )
        == report
    )
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    words = (slurm / "jobs" / "1" / "command").read_text(encoding="utf-8").splitlines()
    assert {"--array=0-1", "--partition=cpu", "--mem=8G", "--exclude=n1,n2"} <= set(words)
    with pytest.raises(LaunchError, match="sbatch refused: sbatch: error: invalid partition"):
        clean_files_on(
            corpus, tmp_path / "no.jsonl", CleanRules(), Placement("slurm:partition=refused"), LINES
        )


@pytest.mark.parametrize(
    ("on", "says"),
    [
        ("dask", "must be local, ray"),
        ("local:4", "Give the number of processes as --workers"),
        ("slurm:partition", "no option KEY=VALUE of sbatch"),
        ("slurm:array=0-3", "no option KEY=VALUE of sbatch"),
        ("slurm:--mem=3", "no option KEY=VALUE of sbatch"),
    ],
)
def test_an_executor_that_is_not_known_is_refused_in_one_line(
    tmp_path: Path, on: str, says: str, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a text that is long enough"}\n', encoding="utf-8")
    assert (
        main(["data", "clean", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--on", on])
        == 2
    )
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "b.jsonl.work").exists()
