"""Wikitext becomes prose, and a dump becomes articles."""

import bz2
from datetime import date
from pathlib import Path

import pytest

from headway.text.formats.mediawiki import clean_wikitext
from headway.text.formats.wiki_templates import PageFacts
from headway.text.read import read_documents


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("'''Bold''' and ''italic''.", "Bold and italic."),
        ("A{{cite|x={{nested|{y}}}}} B", "A B"),
        ("{{lang|zh|中文}} {{nowrap|10 km}}", "中文 10 km"),
        (
            "[[Link]], [[target|shown]], [[Page#part|part]], [[:Category:X]]",
            "Link, shown, part, Category:X",
        ),
        ("[[File:a.jpg|thumb|A [[link]] in a caption]]Text", "Text"),
        ("[[文件:a.jpg|缩略图|说明]]正文[[Category:甲]][[fr:Autre]]", "正文"),
        ("See [https://a.b/c the page] or [https://a.b].", "See the page or ."),
        ("x<ref name=a>source</ref>y<ref name=a />z<!-- no -->", "xyz"),
        ("a<ref>b<REF name=c/>d</Ref >e<!--f--><!--g-->h<ref>i", "aehi"),
        ("a\n{| class=t\n|-\n| cell\n{|\n| inner\n|}\n|}\nb", "a\nb"),
        (
            "== Head ==\nText\n== Empty ==\n== References ==\n* one\n=== Deeper ===\ntwo\n== Next ==\nmore",
            "Head\nText\nNext\nmore",
        ),
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


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        (
            "'''数学'''（{{lang-en|Mathematics}}）是研究数量的学科。",
            "数学（Mathematics）是研究数量的学科。",
        ),
        (
            "'''数学'''（{{Lang-en|'''mathematics'''}}，源自[[古希臘語|希腊语]]的{{lang|grc|[[wikt:μάθημα|μάθημα]]}}）是",
            "数学（mathematics，源自希腊语的μάθημα）是",
        ),
        ("'''A''' ({{langx|fr|Bonjour}}; {{IPA-fr|bɔ̃ʒuʁ}}) is", "A (Bonjour; bɔ̃ʒuʁ) is"),
        (
            "{{le|偏微分|Partial derivative}}和{{link-en|图灵机|Turing machine|圖靈機}}",
            "偏微分和圖靈機",
        ),
        (
            "{{tsl|en|Alan Turing||图灵}}、{{tsl|en|Hash table|散列表}}、{{ill|Ada|de|lt=Lady Ada}}",
            "图灵、散列表、Lady Ada",
        ),
        ("{{nowrap|{{lang|en|two words}}}} {{small|1=a=b}} {{nowrap| x }}", "two words a=b x"),
        (
            "{{convert|10|km|mi}}, {{formatnum:12345}}, {{frac|1|2}}, {{val|1.5|u=kg}}",
            "10 km, 12345, 1/2, 1.5 kg",
        ),
        (
            "'''居里'''{{bd|1867年|11月7日|1934年|7月4日|catIdx=J}}是",
            "居里（1867年11月7日—1934年7月4日）是",
        ),
        ("{{nihongo|東京|とうきょう|Tōkyō}} {{abbr|NASA|the agency}}", "東京 NASA"),
        ("{{lang|zh|-{zh-hans:软件; zh-hant:軟體}-}}", "软件"),
        # what is not kept leaves no empty brackets or separators behind; brackets that people wrote stay
        ("'''A'''（{{audio|x.ogg}}）是（{{audio|x.ogg}}，即乙{{audio|y.ogg}}）", "A是（即乙）"),
        ("call f() ({{audio|x}}; 1900) ({{cite|y}}) end", "call f() (1900) end"),
        ("{{Infobox person|name=A|birth={{bd|1|2|3|4}}}}A is", "A is"),
    ],
)
def test_inline_templates_keep_their_text(wikitext: str, text: str) -> None:
    assert clean_wikitext(wikitext) == text


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("It opened on {{start date|2003|5|12}}.", "It opened on May 12, 2003."),
        (
            "It opened on {{Start date|2003|05|12|df=y}}, closed {{end date|2004|6}}.",
            "It opened on 12 May 2003, closed June 2004.",
        ),
        ("Ada (born {{birth date and age|1990|5|1}}) is", "Ada (born May 1, 1990) is"),
        ("died {{death date and age|2020|1|2|1950|3|4}}.", "died January 2, 2020 (aged 69)."),
        ("She is {{age|1990|5|1}} years old.", "She is 33 years old."),
        ("She was {{age|1990|5|1|2010|4|30}} then.", "She was 19 then."),
        ('He called it {{"|a {{lang|fr|succès}}}}.', 'He called it "a succès".'),
        (
            "In {{CURRENTYEAR}}, {{CURRENTMONTHNAME}} {{CURRENTDAY}}: {{PAGENAME}}.",
            "In 2024, April 16: Example.",
        ),
        ("{{As of|2019|5}}, and {{as of|2019|lc=y}},", "As of May 2019, and as of 2019,"),
        (
            "a {{circa|1900|1910}} {{USS|Enterprise|CV-6}} for {{US$|5 million}}",
            "a c. 1900 – c. 1910 USS Enterprise for US$5 million",
        ),
        (
            "the {{ordinal|3}}, {{ordinal|12}} and {{ordinal|21}} {{chem|H|2|O}}",
            "the 3rd, 12th and 21st H2O",
        ),
        ("{{start date|unknown|x}} and {{start date|2003|13|1}}", "unknown x and 2003 13 1"),
        ("never {{age|x}} nor {{start date}} words", "never nor words"),
        # formulas keep their TeX, untouched by what is markup elsewhere
        (
            r"Let <math>f''(x) = \frac{{a}}{b} &lt; [[1]]</math> hold.",
            r"Let $f''(x) = \frac{{a}}{b} < [[1]]$ hold.",
        ),
        ('so <math display="block">\n x^2 \n</math> and <chem>H2O</chem>', "so $$x^2$$ and H2O"),
        ("no <math></math> formula, <math>y", "no formula, y"),
        ("in {{nowrap|<math>a|b</math> km}}<ref><math>x</math></ref>", "in $a|b$ km"),
    ],
)
def test_sentences_have_no_holes(wikitext: str, text: str) -> None:
    facts = PageFacts("Example", "en", date(2024, 4, 16))
    assert clean_wikitext(wikitext, facts) == text


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("zh", "它于2003年5月12日开放。"),
        ("de", "它于2003-05-12开放。"),
        ("en", "它于May 12, 2003开放。"),
    ],
)
def test_dates_are_written_as_the_language_of_the_dump_writes_them(
    language: str, text: str
) -> None:
    assert (
        clean_wikitext("它于{{start date|2003|5|12}}开放。", PageFacts(language=language)) == text
    )


def test_without_a_date_the_current_year_is_the_readers() -> None:
    assert clean_wikitext("{{CURRENTYEAR}}") in {str(date.today().year), str(date.today().year - 1)}


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("-{zh-cn:鼠标;zh-tw:滑鼠;zh-hk:滑鼠}-", "鼠标"),
        ("-{zh-tw:滑鼠;zh-sg:滑鼠器}-", "滑鼠器"),
        ("甲-{A|zh-hans:计算机;zh-hant:電腦}-乙", "甲计算机乙"),
        ("甲-{H|zh-hans:计算机;zh-hant:電腦}-乙-{T|zh-hans:丙}-丁-{-|zh-hans:戊}-", "甲乙丁"),
        ("-{R|原文}-和-{zh-hans;zh-cn|只此}-", "原文和只此"),
        ("[[-{zh-hans:计算机; zh-hant:電腦;}-|-{电脑}-]]", "电脑"),
    ],
)
def test_conversion_marks_give_the_simplified_writing(wikitext: str, text: str) -> None:
    assert clean_wikitext(wikitext) == text


def test_templates_nested_without_end_are_no_recursion_error() -> None:
    assert clean_wikitext("{{nowrap|" * 5000 + "x" + "}}" * 5000 + " y").endswith("y")


def test_hostile_markup_takes_no_long_time() -> None:
    assert clean_wikitext("<ref>" * 20_000) == clean_wikitext("<math>" * 20_000) == ""
    assert clean_wikitext("<!-- a" * 20_000).startswith("<!-- a")
    assert clean_wikitext("{{" * 50_000)
    assert clean_wikitext("[[a|" * 20_000)
    assert clean_wikitext("{|\n" * 20_000) == ""


def page(title: str, text: str, ns: int = 0, more: str = "") -> str:
    return f"<page><title>{title}</title><ns>{ns}</ns><id>7</id>{more}<revision><id>1</id><text>{text}</text></revision></page>"


def test_a_dump_gives_articles_without_redirects_and_other_namespaces(tmp_path: Path) -> None:
    pages = [
        page("甲", "'''甲'''是第一。"),
        page("Talk:甲", "x", ns=1),
        page("乙", "#REDIRECT [[甲]]", more='<redirect title="甲" />'),
    ]
    pages += [page("empty", "{{gone}}"), page("B", "second &amp;lt;")]
    xml = (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo/>'
        + "".join(pages)
        + "</mediawiki>"
    )
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(xml.encode()))
    documents = list(read_documents(tmp_path / "dump.xml.bz2"))
    assert [(d.text, d.record and d.record["title"], d.line) for d in documents] == [
        ("甲是第一。", "甲", 1),
        ("second <", "B", 5),
    ]
    assert [d.text for d in read_documents(tmp_path, template="{title}\\n{text}")] == [
        "甲\n甲是第一。",
        "B\nsecond <",
    ]


def test_ages_and_years_of_a_dump_are_those_of_its_revisions(tmp_path: Path) -> None:
    revision = "<revision><timestamp>2011-03-04T05:06:07Z</timestamp><text>{{CURRENTYEAR}}年，{{age|1990|3|5}}岁，{{PAGENAME}}</text></revision>"
    article = f"<page><title>甲</title><ns>0</ns><id>7</id>{revision}</page>"
    xml = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="zh">{article}</mediawiki>'
    (tmp_path / "dump.xml").write_text(xml, encoding="utf-8")
    assert [document.text for document in read_documents(tmp_path / "dump.xml")] == [
        "2011年，20岁，甲"
    ]
