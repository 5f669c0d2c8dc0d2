"""The site: charts come from the benchmark's figures, links lead somewhere, no page scrolls sideways in a browser."""

from __future__ import annotations

import html
import html.parser
import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
from paths import ROOT

ASSETS = ROOT / "docs" / "assets"
WIDTHS = (1280, 390)
BUILT = os.environ.get("TENSORIZER_SITE")
# Shows every page in a frame of every width, as headless windows have a least width of their own, and notes how wide
# the page became and how many blocks of console text are cut; the notes are the title of the printed document.
MEASURE = """<script>
const found = [];
const measure = (address, width) => new Promise(done => {
  const frame = document.createElement('iframe');
  frame.style = `border:0;width:${width}px;height:1200px`;
  frame.onload = () => setTimeout(() => {
    const page = frame.contentDocument;
    const cut = [...page.querySelectorAll('.language-console code')].filter(e => e.scrollWidth > e.clientWidth);
    found.push([address, width, page.documentElement.scrollWidth, cut.length]);
    frame.remove();
    done();
  }, 200);
  frame.src = address;
  document.body.append(frame);
});
onload = async () => {
  for (const address of PAGES) for (const width of WIDTHS) await measure(address, width);
  document.title = JSON.stringify(found);
};
</script>"""


@pytest.fixture
def chart(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    return pytest.importorskip("chart")


def test_pictures_of_the_repository_are_what_the_figures_give(chart):
    for file in sorted(ASSETS.glob("*.json")):
        (case,) = json.loads(file.read_text())["cases"]
        for theme in chart.THEMES:
            assert (ASSETS / f"{case['name']}-{theme}.svg").read_text() == chart.draw(case, theme), file.name


def test_a_chart_names_every_figure_and_draws_lengths_in_proportion(chart):
    for theme, limit in itertools.product(chart.THEMES, ("limit of the machine", "limit: raw sockets")):
        results = [
            ("ours", "this <one>", 4.0),
            ("other", "that", 1.0),
            ("limit", limit, 8.0),
            ("other", "failed", None),
        ]
        case = {"title": "load", "unit": "GB/s", "results": [dict(zip(("role", "label", "shown"), r)) for r in results]}
        tree = ElementTree.fromstring(chart.draw(case, theme))
        texts = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
        assert texts == ["load, GB/s", "this <one>", "4", "that", "1", f"{limit.replace(':', ' of')}: 8"]
        ours, other = (float(bar.get("width")) for bar in tree.iter("{http://www.w3.org/2000/svg}rect"))
        assert ours == pytest.approx(4 * other, abs=0.5)


def test_a_figure_whose_place_the_line_of_the_limit_takes_is_inside_its_bar(chart):
    for value, anchor in ((10.0, None), (9.8, "end"), (5.0, None)):  # the limit is 10, and 375 pixels
        results = [
            {"role": "ours", "label": "this", "shown": value},
            {"role": "limit", "label": "limit", "shown": 10.0},
        ]
        case = {"title": "load", "unit": "GB/s", "results": results}
        tree = ElementTree.fromstring(chart.draw(case, "light"))
        (figure,) = (n for n in tree.iter("{http://www.w3.org/2000/svg}text") if n.text == f"{value:.3g}")
        (bar,) = tree.iter("{http://www.w3.org/2000/svg}rect")
        assert figure.get("text-anchor") == anchor
        end = float(bar.get("x")) + float(bar.get("width"))
        assert float(figure.get("x")) == pytest.approx(end - 6 if anchor else end + 6)


def test_the_page_of_what_ran_is_what_its_records_give(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    ran = pytest.importorskip("ran")
    records = json.loads(ran.RECORDS.read_text())
    page = ran.page(records)
    assert (ROOT / "docs" / "what-ran-where.md").read_text() == page
    assert all(record["result"] in page for record in records)


def test_the_matrix_of_tested_versions_has_a_row_for_each_combination_and_names_its_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    ran = pytest.importorskip("ran")
    one = {"column": "wheel, smoke run", "what": "one", "system": "Debian", "command": "make", "result": "passed: 3"}
    records = [
        {**one, "python": "3.9, 3.10", "torch": "2.1, 2.8"},
        {**one, "python": "3.10", "torch": "2.8, 2.10", "result": "2 passed, 1 failed", "column": "builds"},
        {**one, "python": "", "torch": "", "column": ""},
    ]
    rows = [line for line in ran.page(records).splitlines() if line.startswith("| 3.")]
    assert rows == [
        "| 3.9 | Debian | 2.1 | passed (1) |  |  |  |",
        "| 3.10 | Debian | 2.8 | passed (1) |  |  | *partly* (2) |",
        "| 3.10 | Debian | 2.10 |  |  |  | *partly* (2) |",
    ]
    with pytest.raises(ValueError, match="one: expected one or 3 of each of python, system, torch"):
        ran.page([{**one, "python": "3.9, 3.10", "torch": "2.1, 2.8, 2.9"}])


class Page(html.parser.HTMLParser):
    """Addresses that a page refers to, and the places in it that others can refer to."""

    def __init__(self, path):
        super().__init__()
        self.targets, self.places = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "link" and found.get("rel") == "canonical":
            return  # where the page will be, not where it is
        self.targets += [found[name] for name in ("href", "src", "srcset") if found.get(name)]
        self.places |= {found[name] for name in ("id", "name") if found.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """``TENSORIZER_SITE``, which ``make site-check`` has built, else built here."""
    if BUILT is not None:
        return ROOT / BUILT
    python = ROOT / ".cache" / "docs" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs the environment of make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [ROOT / "scripts" / "site" / "build.sh", python.with_name("zensical"), folder]
    subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        missing = "needs chromium (make site-check installs it)"
        pytest.fail(missing) if BUILT is not None else pytest.skip(missing)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars"]
    return [program, *options]


def pages_of(site):
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


@pytest.mark.slow
def test_every_link_within_the_site_leads_to_a_page_and_a_place(site):
    pages = {path: Page(path) for path in pages_of(site)}
    assert len(pages) > 10
    wrong = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            goal = goal / "index.html" if goal.is_dir() else goal
            place = unquote(parts.fragment)
            if not goal.exists() or (place and goal in pages and place not in pages[goal].places | {"__top"}):
                wrong.append(f"{path.relative_to(site)}: {target}")
    assert wrong == []


@pytest.mark.slow
def test_the_reference_shows_no_markup_of_docstrings_and_what_users_look_for(site):
    pages = {path.parent.name: path.read_text(encoding="utf-8") for path in (site / "api").rglob("index.html")}
    raw = re.compile(r":(?:class|func|meth|attr|mod|exc|data):|``|\]\[")
    for name, text in pages.items():
        article = html.unescape(re.sub(r"<[^>]+>", "", re.search(r"<article.*?</article>", text, re.DOTALL)[0]))
        assert raw.findall(article) == [], name
    wanted = {
        "stream_io": ["HTTPOptions", "stall_timeout", "open_stream"],
        "deserializer": ["LoadReport", "metadata", "ties", "format", "report"],
        "cuda": ["set_pinned_memory"],
        "integrations": ["TensorizerCheckpointIO", "TensorsCallback", "from_pretrained"],
    }
    for page, names in wanted.items():
        for name in names:
            assert name in pages[page], (page, name)


@pytest.mark.slow
def test_no_page_shows_marks_of_a_list_or_a_table_that_was_indented_wrongly(site):
    raw = re.compile(r"^(?:\d+\.|-) +<(?:strong|em)>|\|[ :]*-{3}|<code>[^<]*\\\|", re.MULTILINE)
    for path in pages_of(site):
        text = re.sub(r"<pre.*?</pre>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert raw.findall(text) == [], path.relative_to(site)


@pytest.mark.slow
def test_no_page_scrolls_sideways_in_a_browser(site, browser, tmp_path):
    pages = [path.as_uri() for path in pages_of(site)]
    harness = tmp_path / "measure.html"
    script = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    harness.write_text(f"<title></title><body>{script}")
    command = [*browser, "--window-size=1400,1300", "--virtual-time-budget=600000", "--dump-dom", harness.as_uri()]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stdout
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", text)[1]) or "[]")
    assert [(address, width) for address, width, _, _ in found] == [(p, w) for p in pages for w in WIDTHS]
    assert [note for note in found if note[2] > note[1] or note[3]] == []


COPY = """<script>
onload = () => {
  const frame = document.createElement('iframe');
  frame.onload = () => {
    const code = frame.contentDocument.querySelector('.language-console code');
    code.setAttribute('data-md-copying', '');  // as the button does
    document.title = JSON.stringify(code.innerText);
  };
  frame.src = PAGE;
  document.body.append(frame);
};
</script>"""


@pytest.mark.slow
def test_the_copy_button_takes_commands_without_their_prompts(site, browser, tmp_path):
    harness = tmp_path / "copy.html"
    page = site / "serve-from-s3" / "index.html"
    harness.write_text(f"<title></title><body>{COPY.replace('PAGE', json.dumps(page.as_uri()))}")
    command = [*browser, "--virtual-time-budget=20000", "--dump-dom", harness.as_uri()]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    copied = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", text)[1]))
    assert copied.startswith("hf download")
    assert "$ " not in copied


def test_every_page_is_in_one_of_six_tabs_of_at_most_ten_entries():
    nav = (
        (ROOT / "scripts" / "site" / "mkdocs.yml")
        .read_text()
        .partition("\nnav:\n")[2]
        .partition("\n\n")[0]
        .splitlines()
    )
    tabs = [line for line in nav if line.startswith("  - ")]
    assert tabs == [f"  - {name}:" for name in ("Start", "Serve", "Train", "Store", "Secure", "Reference")]
    begins = [nav.index(tab) for tab in tabs] + [len(nav)]
    for begin, end in zip(begins, begins[1:]):
        entries = [line for line in nav[begin + 1 : end] if line.startswith("      - ")]
        assert 1 <= len(entries) <= 10, nav[begin]
    named = {line.rpartition(" ")[2] for line in nav}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - named == set()


@pytest.mark.slow
def test_pages_that_people_meet_first_can_be_pictured_at_both_widths(site, browser, tmp_path):
    for page in ("index.html", "install/index.html", "performance/index.html", "quickstart/index.html"):
        for width in WIDTHS:
            picture = tmp_path / f"{Path(page).parent.name or 'home'}-{width}.png"
            frame = tmp_path / "frame.html"
            address = (site / page).as_uri()
            frame.write_text(f'<iframe src="{address}" style="border:0;width:{width}px;height:2000px"></iframe>')
            shot = [*browser, f"--window-size={max(width, 600)},2000", f"--screenshot={picture}", frame.as_uri()]
            subprocess.run(shot, check=True, capture_output=True, timeout=120)
            assert picture.stat().st_size > 10_000, page
