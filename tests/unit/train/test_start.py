"""What stands in a run folder where the run writes, and is of another kind, is found before the first step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.train.start import refuse_misplaced


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("logs", Path.touch, "is a file, and a run keeps a folder there"),
        ("final", Path.touch, "is a file, and a run keeps a folder there"),
        (
            "final",
            lambda path: path.symlink_to("nowhere"),
            "is a link, and a run writes a folder there",
        ),
        (
            "final",
            lambda path: path.symlink_to(path.parent),
            "is a link, and a run writes a folder there",
        ),
        ("train.log", Path.mkdir, "is a folder, and a run keeps a file there"),
        ("recipe.yaml", Path.mkdir, "is a folder, and a run keeps a file there"),
    ],
)
def test_a_misplaced_entry_is_refused(
    tmp_path: Path, name: str, make: Callable[[Path], None], words: str
) -> None:
    refuse_misplaced(tmp_path)
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=words):
        refuse_misplaced(tmp_path)


def test_links_to_folders_elsewhere_are_fine(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "final").mkdir()
    refuse_misplaced(tmp_path)
