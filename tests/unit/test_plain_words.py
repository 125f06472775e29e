"""Sources and English pages use the words of the field, e.g. *reported, continues, asynchronous*, instead of these phrases."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
NOT_PLAIN = re.compile(
    r"\b((is|are|was|were|be)\s+told|hears?\s+of|go(es)?\s+on|beside\s+training|most\s+rows|(is|be)\s+had|under\s+way|whoever)\b|\w+Wish\b"
)


def test_sources_and_pages_use_plain_words() -> None:
    offences: list[str] = []
    for path in sorted(PAGES):
        if path.name.endswith("zh-CN.md"):
            continue
        text = path.read_text(encoding="utf-8")
        offences += [
            f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]}"
            for hit in NOT_PLAIN.finditer(text)
        ]
    assert not offences, "write what happens in plain words:\n" + "\n".join(offences)
