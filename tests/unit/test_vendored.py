"""The JavaScript libraries of the web pages are the files that npm published, with their licences. `make vendor` fetches them."""

import hashlib
import json
from pathlib import Path

import headway

VENDOR = Path(headway.__file__).parent / "vendor"
NOTICE = Path(__file__).parents[2] / "NOTICE"
LIBRARIES = json.loads((VENDOR / "libraries.json").read_text(encoding="utf-8"))


def test_every_vendored_file_has_the_checksum_of_the_list() -> None:
    expected = {
        name: file["sha256"] for library in LIBRARIES for name, file in library["files"].items()
    }
    present = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.name != "libraries.json"
    }
    assert present == expected


def test_every_library_has_its_licence_and_is_named_in_the_notice() -> None:
    notice = NOTICE.read_text(encoding="utf-8")
    for library in LIBRARIES:
        assert f"{library['package']}.LICENSE.txt" in library["files"]
        assert f"\n{library['package']} {library['version']} ({library['licence']}" in notice
