"""The HTML page as text: well-formed, self-contained, and safe against hostile names."""

import json
import re
from html.parser import HTMLParser

import pytest

from lowtide.reporting.markup import Markup, data_script, tag

from .reports import HOSTILE, gpt_report, hostile_report

VOID = {"meta"}


class Reader(HTMLParser):
    """Collects elements, attributes and text, and end tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts, self.attributes, self.mismatched = [], [], {}, [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, name, attributes):
        self.elements.append(name)
        self.attributes += [(name, *pair) for pair in attributes]
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        if name in VOID:
            return
        if not self.open or self.open.pop() != name:
            self.mismatched.append(name)

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


@pytest.mark.parametrize("make", [gpt_report, hostile_report])
def test_the_page_is_well_formed_and_self_contained(make):
    page = make().to_html()
    reader = Reader(page)
    assert reader.open == []
    assert reader.mismatched == []
    assert reader.elements.count("script") == 3  # the data of two figures, and page.js
    assert reader.elements.count("style") == 2
    assert reader.elements.count("figure") == 3
    assert set(reader.elements) <= {
        "html", "head", "meta", "title", "style", "body", "div", "header", "section", "h1", "h2", "p", "span", "b", "i",
        "figure", "svg", "g", "path", "line", "polyline", "circle", "text", "ul", "li", "table", "thead", "tbody",
        "tr", "th", "td", "script",
    }  # fmt: skip
    for name, attribute, _ in reader.attributes:
        assert attribute not in ("src", "href", "srcset", "action"), name
        assert not attribute.startswith("on"), name
    assert not re.search(r"https?:|@import|url\(|//cdn", page)


def test_hostile_names_are_shown_verbatim():
    report = hostile_report()
    reader = Reader(report.to_html())
    cells = "".join(reader.texts["td"])
    for pin in report.plan.pinned:
        assert pin.name in cells
        assert pin.why in cells
    assert HOSTILE[3] in "".join(reader.texts["p"])
    legends = reader.texts["span"]
    assert set(HOSTILE[: len(report.frontier.baselines)]) <= set(legends)


def test_figure_data_cannot_end_their_script_element():
    scripts = re.findall(r'<script type="application/json">(.*?)</script>', hostile_report().to_html(), re.S)
    assert len(scripts) == 2
    for script in scripts:
        assert not set("<>&") & set(script)
        data = json.loads(script)
        assert len(data["edges"]) == len(data["label_of_column"]) + 1
        labels = "".join(data["labels"])
        assert all(name in labels for name in HOSTILE[:4])


def test_figure_data_add_up_to_the_peak():
    report = gpt_report()
    for script in re.findall(r'<script type="application/json">(.*?)</script>', report.to_html(), re.S):
        totals = [sum(sizes) for sizes in zip(*(band[2] for band in json.loads(script)["bands"]), strict=True)]
        assert max(totals) == report.predicted_peak_bytes


def test_notebooks_get_the_content_as_a_fragment():
    fragment = gpt_report()._repr_html_()
    assert fragment in gpt_report().to_html()
    assert Reader(fragment).elements[0] == "div"
    assert not {"html", "head", "body"} & set(Reader(fragment).elements)
    rules = re.sub(r"@media[^{]*\{|[^{}]*\{\s*\}", "", "".join(Reader(fragment).texts["style"]))
    for selector in re.findall(r"(?:^|\})\s*([^{}@]+)\{", rules):
        assert all(part.strip().startswith(".lowtide-report") for part in selector.split(",")), selector


def test_save_html(tmp_path):
    gpt_report().save_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == gpt_report().to_html()


def test_plain_strings_are_escaped_and_markup_is_not():
    assert tag("b", {"title": '"<'}, "a<b", Markup("<i></i>")) == '<b title="&quot;&lt;">a&lt;b<i></i></b>'
    assert json.loads(re.sub("<.*?>", "", data_script(["</script>&"]))) == ["</script>&"]
