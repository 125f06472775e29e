"""Wikitext becomes prose, and a dump becomes articles."""

import bz2
from pathlib import Path

import pytest

from headway.text.read import read_documents
from headway.text.wiki import clean_wikitext


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("'''Bold''' and ''italic''.", "Bold and italic."),
        ("A{{cite|x={{nested|{y}}}}} B", "A B"),
        ("{{lang|zh|中文}} {{nowrap|10 km}}", "中文 10 km"),
        ("[[Link]], [[target|shown]], [[Page#part|part]], [[:Category:X]]", "Link, shown, part, Category:X"),
        ("[[File:a.jpg|thumb|A [[link]] in a caption]]Text", "Text"),
        ("[[文件:a.jpg|缩略图|说明]]正文[[Category:甲]][[fr:Autre]]", "正文"),
        ("See [https://a.b/c the page] or [https://a.b].", "See the page or ."),
        ("x<ref name=a>source</ref>y<ref name=a />z<!-- no -->", "xyz"),
        ("a\n{| class=t\n|-\n| cell\n{|\n| inner\n|}\n|}\nb", "a\nb"),
        ("== Head ==\nText\n== Empty ==\n== References ==\n* one\n=== Deeper ===\ntwo\n== Next ==\nmore", "Head\nText\nNext\nmore"),
        ("== 历史 ==\n内容\n== 参考文献 ==\n* 甲", "历史\n内容"),
        ("* one\n** two\n# three\n: four", "one\ntwo\nthree\nfour"),
        ("-{zh-hans:计算机; zh-hant:電腦}-和-{不转}-", "计算机和不转"),
        ("a&nbsp;b &lt;tag&gt; <b>c</b><br/>d", "a b <tag> c\nd"),
        ("__NOTOC__open {{never closed and [[neither", "open {{never closed and [[neither"),
        ("{{a}} mid {{b|{{c}} end", "mid {{b| end"),
    ],
)
def test_markup_goes_and_prose_stays(wikitext: str, text: str) -> None:
    assert clean_wikitext(wikitext) == text


def test_hostile_markup_takes_no_long_time() -> None:
    assert clean_wikitext("{{" * 50_000) and clean_wikitext("[[a|" * 20_000) and clean_wikitext("{|\n" * 20_000) == ""


def page(title: str, text: str, ns: int = 0, more: str = "") -> str:
    return f"<page><title>{title}</title><ns>{ns}</ns><id>7</id>{more}<revision><id>1</id><text>{text}</text></revision></page>"


def test_a_dump_gives_articles_without_redirects_and_other_namespaces(tmp_path: Path) -> None:
    pages = [page("甲", "'''甲'''是第一。"), page("Talk:甲", "x", ns=1), page("乙", "#REDIRECT [[甲]]", more='<redirect title="甲" />')]
    pages += [page("empty", "{{gone}}"), page("B", "second &amp;lt;")]
    xml = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo/>' + "".join(pages) + "</mediawiki>"
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(xml.encode()))
    documents = list(read_documents(tmp_path / "dump.xml.bz2"))
    assert [(d.text, d.record and d.record["title"], d.line) for d in documents] == [("甲是第一。", "甲", 1), ("second <", "B", 5)]
    assert [d.text for d in read_documents(tmp_path, template="{title}\\n{text}")] == ["甲\n甲是第一。", "B\nsecond <"]
