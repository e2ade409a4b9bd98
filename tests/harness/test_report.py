"""The report: one page that needs no network, in which hostile text stays text, looked at by a real browser."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from icr_bench.harness import report as module
from icr_bench.harness.cli import main
from icr_bench.harness.folder import texts

Record = dict[str, Any]

HOSTILE = {
    "script": "<script>document.title = 'taken'; window.taken = 1</script> word0",
    "style": "</style></script></title><b>bold</b> <!-- word1",
    "null": "before\x00after \x01\x1b[31m word2",
    "bidi": "\u202egnirts\u202c \u200f\u2067 mixed \u05d0\u05d1 word3",
    "image": "<img src=x onerror='window.taken = 1'> {{script}} {{answers}} word4",
    "huge": "word5 " + "x" * 1_000_000,
}

PLUGIN = """
from icr_bench.retrievers.base import Ranking, Retriever


class First(Retriever):
    '''Ranks documents by their number.'''

    def index(self, documents):
        self.count = len(documents)

    def search(self, queries, k):
        return [Ranking(list(range(k)), [-float(i) for i in range(k)]) for _ in queries]

    def index_bytes(self):
        return 8


class Broken(First):
    def index(self, documents):
        print("<script>window.taken = 1</script>", flush=True)
        raise RuntimeError("</pre><script>window.taken = 1</script> \\udcff")


RETRIEVERS = {"first": First, "broken": Broken}
"""


def write(file: Path, *lines: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over hostile texts, in which one retriever breaks."""
    folder = tmp_path_factory.mktemp("report")
    names = list(HOSTILE)
    write(folder / "data" / "corpus.jsonl", *({"_id": f"<{name}>", "text": text} for name, text in HOSTILE.items()))
    write(folder / "data" / "queries.jsonl", *({"_id": f"q{i}", "text": f"word{i} </script>"} for i in range(6)))
    judged = [f"q{i}\t<{name}>\t1" for i, name in enumerate(names)]
    write(folder / "data" / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", *judged)
    (folder / "plugin.py").write_text(PLUGIN)
    rows = ["-r", "bm25", "-r", "first:label=<i>first</i>", "-r", "broken"]
    command = ["run", "-b", f"beir:path={folder / 'data'},label=<b>hostile</b>", "-k", "1,5", *rows]
    assert main([*command, "--plugin", str(folder / "plugin.py"), "-o", str(folder / "run")]) == 1
    return folder / "run"


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    assert main(["report", str(run), "-o", str(run.parent / "deep" / "report.html")]) == 0
    return run.parent / "deep" / "report.html"


def answers(page: Path) -> dict[str, Any]:
    packed = re.search(r'id="answers">([^<]*)<', page.read_text())
    assert packed
    told: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return told


def test_a_run_keeps_the_texts_of_what_it_returned(run: Path) -> None:
    record = json.loads((run / "cells.jsonl").read_text().split("\n")[0])
    assert texts(run, record["documents"]) == {f"<{name}>": text for name, text in HOSTILE.items()}


def test_the_page_needs_no_network_and_names_no_other_file(page: Path) -> None:
    markup = re.sub(r"(?s)<script>.*?</script>", "", page.read_text())
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(""", markup)
    assert "default-src 'none'" in markup
    assert "script-src 'sha256-" in markup  # only the two scripts of the page run


def test_hostile_text_is_escaped_or_packed(page: Path) -> None:
    text = page.read_text()
    assert text.count("<script") == 4  # data, answers, plotly, the page's own
    assert "<b>hostile" not in text
    assert "<i>first" not in text
    assert "\x00" not in text
    assert "&lt;/pre&gt;&lt;script&gt;" in text
    told = answers(page)
    kept = {identity: shown for identity, shown, _ in told["tasks"][0]["documents"]}
    assert kept["<script>"] == HOSTILE["script"]
    assert len(kept["<huge>"]) == module.TEXT
    assert len(text) < 7_000_000


def test_answers_are_those_of_the_run(page: Path, run: Path) -> None:
    told = answers(page)
    task = told["tasks"][0]
    by_name = {one["retriever"]: one for one in told["rankings"]}
    assert set(by_name) == {"bm25", "<i>first</i>"}
    lines = [json.loads(line) for line in (run / "cells.jsonl").read_text().splitlines()]
    for record in lines[:2]:
        ranked = [json.loads(line) for line in (run / record["rankings"]).read_text().splitlines()]
        shown = by_name[record["retriever"]]["shown"]
        assert [[task["documents"][n][0] for n in own] for own in shown] == [line["documents"] for line in ranked]
        first = by_name[record["retriever"]]["first"]
        assert sum(rank == 1 for rank in first) / 6 == pytest.approx(record["metrics"]["hit@1"]["value"])
    assert by_name["bm25"]["first"] == [1] * 6


def test_the_page_names_what_identifies_the_weights_of_every_row(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "weighed")
    cells = [json.loads(line) for line in (run / "cells.jsonl").read_text().splitlines()]
    for number, cell in enumerate(cells):
        cell["fingerprint"]["weights"] = {"model": f"sha256:of <{number}>"}
    write(tmp_path / "weighed" / "cells.jsonl", *cells)
    assert main(["report", str(tmp_path / "weighed"), "-o", str(tmp_path / "page.html")]) == 0
    shown = (tmp_path / "page.html").read_text()
    assert all(f"model=sha256:of &lt;{number}&gt;" in shown for number in range(len(cells)))


def test_folders_without_texts_are_shown_without(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / "documents")
    assert main(["report", str(tmp_path / "old"), "-o", str(tmp_path / "old.html")]) == 0
    assert {text for _, text, _ in answers(tmp_path / "old.html")["tasks"][0]["documents"]} == {None}


def test_queries_that_were_added_later_are_marked_as_not_asked(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "more")
    cells = [json.loads(line) for line in (tmp_path / "more" / "cells.jsonl").read_text().splitlines()]
    judgments = tmp_path / "more" / cells[0]["judgments"]
    cells[0]["judgments"] = "judgments/fewer.jsonl"
    write(tmp_path / "more" / "judgments" / "fewer.jsonl", *judgments.read_text().splitlines()[:4])
    write(tmp_path / "more" / "cells.jsonl", *cells)
    assert main(["report", str(tmp_path / "more"), "-o", str(tmp_path / "more.html")]) == 0
    by_name = {one["retriever"]: one["first"] for one in answers(tmp_path / "more.html")["rankings"]}
    assert by_name["bm25"] == [1, 1, 1, 1, -1, -1]
    assert len(by_name["<i>first</i>"]) == 6


def test_a_failed_cell_is_no_point_of_a_curve(page: Path) -> None:
    packed = re.search(r'id="cells">([^<]*)<', page.read_text())
    assert packed
    peaks = {cell["retriever"]: cell["peak"] for cell in json.loads(packed[1])["cells"]}
    assert peaks["broken"] is None
    assert peaks["bm25"] > 0


def test_bad_input(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert "no run was found there" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["report", str(run), "-o", str(tmp_path / "file" / "r.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# In a browser

Browser = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium without a window, at 1,300 points wide, light."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromium-driver are not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    driver.set_window_size(1300, 1000)
    yield driver
    driver.quit()


def until(found: Callable[[], Any]) -> Any:
    """What is found at last."""
    end = time.monotonic() + 30
    while not (value := found()):
        assert time.monotonic() < end, "it did not appear"
        time.sleep(0.05)
    return value


def opened(browser: Any, page: Path) -> Any:
    """The page with its queries unpacked."""
    browser.get(page.as_uri())
    browser.execute_script("document.getElementById('queries').scrollIntoView()")
    until(lambda: browser.find_elements("css selector", "#list details"))
    return browser


def choose(browser: Any, key: str, text: str) -> None:
    from selenium.webdriver.support.select import Select

    Select(browser.find_element("css selector", f"select[data-key='{key}']")).select_by_visible_text(text)


def shown(browser: Any) -> list[str]:
    return [one.text for one in browser.find_elements("css selector", "#list .query")]


def test_it_draws_without_an_error(browser: Any, page: Path) -> None:
    opened(browser, page)
    for plot in ("curve", "front", "cost"):
        assert browser.find_elements("css selector", f"#{plot} svg .trace")
    assert browser.get_log("browser") == []


def test_hostile_text_is_text(browser: Any, page: Path) -> None:
    opened(browser, page)
    assert browser.title == "icr-bench: <b>hostile</b>"
    assert "broken" in browser.find_element("css selector", "main").text
    for box in browser.find_elements("css selector", "#list summary"):
        box.click()
    until(lambda: len(browser.find_elements("css selector", "#list .answers")) == 6)
    found = {one.get_attribute("textContent") for one in browser.find_elements("css selector", ".document .text")}
    for name, text in HOSTILE.items():
        assert text[: module.TEXT] in found, name
    assert browser.execute_script("return window.taken") is None
    legend = {one.get_attribute("textContent") for one in browser.find_elements("css selector", "#curve .legendtext")}
    assert legend == {"bm25", "<i>first</i>"}
    ours = browser.find_elements("css selector", "main summary > b")  # the status of a failed cell
    assert browser.find_elements("css selector", "main b, #list img") == ours
    assert any(
        "of 1,000,006 characters" in one.text for one in browser.find_elements("css selector", ".answers .quiet")
    )


def test_filters_and_search_show_what_they_say(browser: Any, page: Path) -> None:
    opened(browser, page)
    told = answers(page)
    first = {one["retriever"]: one["first"] for one in told["rankings"]}
    asked = [text for _, text in told["tasks"][0]["queries"]]
    choose(browser, "a", "bm25")
    choose(browser, "b", "<i>first</i>")
    for name, wanted in {
        "all": [True] * 6,
        "A right, B wrong": [a == 1 != b for a, b in zip(first["bm25"], first["<i>first</i>"], strict=True)],
        "A wrong, B right": [a != 1 == b for a, b in zip(first["bm25"], first["<i>first</i>"], strict=True)],
        "both right": [a == b == 1 for a, b in zip(first["bm25"], first["<i>first</i>"], strict=True)],
    }.items():
        choose(browser, "filter", name)
        assert shown(browser) == [text for text, right in zip(asked, wanted, strict=True) if right]
    choose(browser, "filter", "all")
    box = browser.find_element("css selector", "input[type=search]")
    box.send_keys("WORD3")
    assert [text.split()[0] for text in shown(browser)] == ["word3"]
    box.clear()


@pytest.mark.parametrize("width", [1300, 500])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(browser: Any, page: Path, width: int, scheme: str) -> None:
    told = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", told)
    browser.set_window_size(width, 1000)
    opened(browser, page)
    wide, inner = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= inner
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) < 128) is (scheme == "dark")
    assert browser.get_log("browser") == []
    browser.set_window_size(1300, 1000)


# A large run

QUERIES, SIZES, ROWS, DOCUMENTS = 1_000, (46, 500, 1_000, 5_000, 10_000), 8, 10_000


@pytest.fixture(scope="module")
def large(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a run of 1,000 queries, eight retrievers and five sizes leaves it, with texts of 400 letters."""
    import random

    folder = tmp_path_factory.mktemp("large")
    record = json.loads((run / "cells.jsonl").read_text().split("\n")[0])
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5_000)]
    (folder / "run.json").write_bytes((run / "run.json").read_bytes())
    corpus = [{"_id": f"d{i}", "text": " ".join(rng.choices(words, k=60))} for i in range(DOCUMENTS)]
    write(folder / "documents" / "all.jsonl", *corpus)
    judged = [{"query": f"q{i}", "text": f"query {i}", "judgments": {f"d{i}": 1}} for i in range(QUERIES)]
    write(folder / "judgments" / "all.jsonl", *judged)
    cells = []
    for n in SIZES:
        for number in range(ROWS):
            name = f"rankings/{n}-{number}.jsonl"
            lines = [
                {"query": f"q{i}", "documents": [f"d{rng.randrange(n)}" for _ in range(10)], "scores": [0] * 10}
                for i in range(QUERIES)
            ]
            write(folder / name, *lines)
            own = {"retriever": f"row{number}", "n": n, "rankings": name, "judgments": "judgments/all.jsonl"}
            data = record["fingerprint"] | {"data": f"{n:064d}"}
            cells.append(record | own | {"documents": "documents/all.jsonl", "fingerprint": data})
    write(folder / "cells.jsonl", *cells)
    return folder


def test_a_large_run_makes_a_page_below_20_megabytes(large: Path, tmp_path: Path) -> None:
    assert main(["report", str(large), "-o", str(tmp_path / "large.html")]) == 0
    assert 6_000_000 < (tmp_path / "large.html").stat().st_size < 20_000_000


def test_a_large_page_opens_quickly(browser: Any, page: Path, large: Path, tmp_path: Path) -> None:
    """As a ratio, since machines differ: it opens within a few times of what six queries take."""
    assert main(["report", str(large), "-o", str(tmp_path / "large.html")]) == 0
    spent: dict[Path, list[float]] = {page: [], tmp_path / "large.html": []}
    for file in [page, *list(spent) * 3]:  # the first one starts the browser
        browser.get("about:blank")
        begin = time.monotonic()
        browser.get(file.as_uri())
        until(lambda: browser.find_elements("css selector", "#cost svg .trace"))
        spent[file].append(time.monotonic() - begin)
    assert min(spent[tmp_path / "large.html"]) < 5 * min(spent[page])
    opened(browser, tmp_path / "large.html")
    assert len(shown(browser)) == 50
    browser.find_element("css selector", "#pages button:nth-of-type(2)").click()
    assert shown(browser)[0] == "query 50"
