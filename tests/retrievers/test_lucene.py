"""Lucene's BM25: its formula, its analyser, awkward texts, and a Java that is missing."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import ModuleType, SimpleNamespace

import pytest

from icr_bench.retrievers.base import Document, MissingExtra
from icr_bench.retrievers.bm25 import BM25
from icr_bench.retrievers.lucene import Lucene

needs_pyserini = pytest.mark.skipif(find_spec("pyserini") is None, reason="pyserini is not installed; tox -e lucene")


def indexed(texts: Sequence[str], **options: object) -> Lucene:
    retriever = Lucene(**options)  # type: ignore[arg-type]
    retriever.load()
    retriever.index([Document(i, text) for i, text in enumerate(texts)])
    return retriever


def scores(retriever: Lucene | BM25, query: str, k: int) -> dict[int, float]:
    ranking = retriever.search([query], k)[0]
    return dict(zip(ranking.numbers, ranking.scores, strict=True))


def held(length: int) -> int:
    """The length that Lucene keeps in one byte (its SmallFloat): above 24, four significant bits of the rest."""
    rest = length - 24
    drop = max(rest.bit_length() - 4, 0)
    return length if rest < 0 else 24 + (rest >> drop << drop)


def formula(texts: Sequence[str], query: str, k1: float, b: float) -> dict[int, float]:
    """BM25 as Lucene defines it, computed the slow way, of the documents that share a word with the query."""
    documents = [text.split() for text in texts]
    mean = sum(map(len, documents)) / sum(map(bool, documents))
    found = dict[int, float]()
    for number, words in enumerate(documents):
        for term in query.split():
            if frequency := words.count(term):
                holding = sum(term in other for other in documents)
                idf = math.log(1 + (sum(map(bool, documents)) - holding + 0.5) / (holding + 0.5))
                score = idf * frequency / (frequency + k1 * (1 - b + b * held(len(words)) / mean))
                found[number] = found.get(number, 0) + score
    return found


def made(seed: int, longest: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices("bcdefgh", k=rng.randint(0, longest))) for _ in range(40)]


@needs_pyserini
def test_scores_by_hand() -> None:
    """idf(red) = ln(1 + 1.5 / 2.5) = 0.470004; the mean length is 3."""
    found = scores(indexed(["red fox", "red red hen", "blue hen sat down"]), "red", 3)
    assert found == pytest.approx({1: 0.470004 * 2 / 2.9, 0: 0.470004 / 1.78}, rel=1e-5)
    assert list(found) == [1, 0]


@needs_pyserini
@pytest.mark.parametrize("longest", [12, 400])
@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (0.0, 0.4), (1.2, 0.75), (20.0, 1.0)])
def test_scores_follow_the_formula(k1: float, b: float, longest: int) -> None:
    """To the precision of a float, with lengths as Lucene holds them."""
    texts = made(3, longest)
    retriever = indexed(texts, k1=k1, b=b, stemmer="none", stopwords="none")
    for query in ("b", "c d", "h e h", "g unknown"):
        found = scores(retriever, query, len(texts))
        assert found == pytest.approx(formula(texts, query, k1, b), rel=2e-5)
        assert list(found.values()) == sorted(found.values(), reverse=True)


def test_held_lengths_are_exact_to_40_tokens_and_then_short_by_less_than_a_ninth() -> None:
    assert all(held(length) == length for length in range(41))
    assert all(0 <= length - held(length) < length / 9 for length in range(41, 100_000))
    assert held(41) == 40


@needs_pyserini
def test_agrees_with_bm25_on_documents_of_up_to_40_tokens() -> None:
    """With the same tokens and none of them empty, which bm25 counts."""
    texts = [text or "b" for text in made(5, 40)]
    lucene, bm25 = indexed(texts, stemmer="none", stopwords="none"), BM25()
    bm25.index([Document(i, text) for i, text in enumerate(texts)])
    for query in ("b", "c d", "h e h", "f g b c"):
        found, expected = scores(lucene, query, 40), scores(bm25, query, 40)
        assert found == pytest.approx(expected, rel=1e-4)
        best = [round(expected[number], 4) for number in found]
        assert best == sorted(best, reverse=True)


@needs_pyserini
def test_agrees_with_pyserinis_own_indexer_and_searcher(tmp_path: Path) -> None:
    """Which round scores to 4 digits and then set equal ones apart by a millionth each."""
    texts = ["Foxes' dens", "The fox ran from the hounds", "hounds and foxes running", "", "a hen's nest", *made(9, 90)]
    retriever = indexed(texts)
    from pyserini.pyclass import autoclass

    indexer = autoclass("io.anserini.index.SimpleIndexer")(str(tmp_path / "index"))
    document = autoclass("io.anserini.collection.JsonCollection$Document")
    for number, text in enumerate(texts):
        indexer.addJsonDocument(document.fromFields(str(number), text))
    indexer.close()
    searcher = autoclass("io.anserini.search.SimpleSearcher")(str(tmp_path / "index"))
    for query in ("fox hounds", "running", "hens", "b c", "the"):
        theirs = {int(hit.docid): hit.score for hit in searcher.search(query, len(texts))}
        assert scores(retriever, query, len(texts)) == pytest.approx(theirs, abs=1.5e-4)
    searcher.close()


@needs_pyserini
@pytest.mark.parametrize(
    ("options", "query", "found"),
    [
        ({}, "foxes", {0, 1}),
        ({}, "the", set()),
        ({"stemmer": "none"}, "foxes", {1}),
        ({"stemmer": "krovetz"}, "foxes", {0, 1}),
        ({"stemmer": "porter"}, "university", {2, 3}),
        ({"stemmer": "krovetz"}, "university", {2}),
        ({"stopwords": "none"}, "the", {0, 2}),
        ({"stopwords": "none", "stemmer": "none"}, "THE", {0, 2}),
    ],
)
def test_analyser(options: dict[str, object], query: str, found: set[int]) -> None:
    texts = ["the fox", "foxes", "the university's", "universal"]
    assert set(scores(indexed(texts, **options), query, 4)) == found


AWKWARD = [
    "a \"quoted\" {json: [\\n]} \\ 'text'",
    "lines\nand\r\ntabs\tand\u2028separators\x0b\x0c",
    "a null \0 character",
    "a lone \ud800 and \udfff surrogate",
    "emoji 🙂 and 日本語 and e\u0301",
    "",
    " \n ",
    "x" * 100_000,
    "\ufeffmark",
    "</doc> <tag> & %s {0}",
]


@needs_pyserini
def test_any_text_can_be_indexed_and_asked() -> None:
    texts = [f"{text} own{number}" if text.strip() else text for number, text in enumerate(AWKWARD)]
    retriever = indexed(texts)
    for number, text in enumerate(texts):
        assert list(scores(retriever, f"own{number}", len(texts))) == ([number] if text.strip() else [])
        assert list(scores(retriever, text, len(texts)))[:1] == ([number] if text.strip() else [])


@needs_pyserini
@pytest.mark.parametrize(
    "query",
    [
        *(
            "red AND (fox OR",
            '"red fox',
            "(red: fox)^2",
            "+red -fox",
            "red~ fox*",
            "[red TO fox}",
            "red\\ fox",
            "red/fox/",
        ),
        *("red\0fox", "red\ud800fox", " red\nfox?!", "red fox " + " ".join(f"w{i}" for i in range(3000))),
    ],
)
def test_a_query_is_a_bag_of_words(query: str) -> None:
    texts = ["red fox", "red", "fox", "red hen ran", "and", "to"]
    assert scores(indexed(texts), query, 6) == scores(indexed(texts), "red fox", 6)


@needs_pyserini
@pytest.mark.parametrize("query", ["", " ", "?!", "\0", "the", "unknown", "AND OR NOT", "*:*"])
def test_a_query_without_known_tokens_has_an_empty_ranking(query: str) -> None:
    assert scores(indexed(["red fox", "the blue hen"]), query, 2) == {}


@needs_pyserini
def test_a_corpus_without_tokens_answers_nothing() -> None:
    assert [r.numbers for r in indexed(["", " ?", "the"]).search(["red", "", "the"], 3)] == [[], [], []]


@needs_pyserini
def test_equal_scores_rank_by_number() -> None:
    retriever = indexed(["hen", *["red fox"] * 120])
    assert retriever.search(["fox"], 30)[0].numbers == list(range(1, 31))
    assert len(set(retriever.search(["fox"], 121)[0].scores)) == 1


@needs_pyserini
def test_queries_answered_at_once_are_answered_alike() -> None:
    texts, queries = made(11, 30), ["b c", "", "d", "e f g"] * 8
    one, more = (indexed(texts, threads=threads).search(queries, 10) for threads in (1, 3))
    assert one == more


@needs_pyserini
def test_the_index_leaves_nothing_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    small, large = indexed(["red fox", "red hen"]), indexed([f"red fox number{i}" for i in range(500)])
    assert list(tmp_path.iterdir()) == []
    assert 0 < small.index_bytes() < large.index_bytes()
    assert list(scores(large, "number7", 9)) == [7]


@needs_pyserini
def test_bytes_are_those_of_the_indexs_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = Lucene()
    retriever.load()
    monkeypatch.setattr("icr_bench.retrievers.lucene.TemporaryDirectory", lambda **options: nullcontext(str(tmp_path)))
    retriever.index([Document(0, "red fox"), Document(1, "red hen")])
    assert retriever.index_bytes() == sum(file.stat().st_size for file in tmp_path.iterdir()) > 0


@needs_pyserini
def test_settings_name_every_step_and_version() -> None:
    settings = indexed(["red"], stemmer="krovetz").settings()
    steps = "Lucene's StandardTokenizer | no possessive 's | lower case | 33 stop words | stemmer krovetz"
    assert settings["analyser"] == steps
    assert settings["pyserini_version"] == version("pyserini")
    assert settings["lucene_version"] == "9.9.1"
    assert int(settings["java_version"].split(".")[0]) >= 17
    assert " 0 stop words" in indexed(["red"], stopwords="none").settings()["analyser"]


@needs_pyserini
def test_a_java_without_a_compiler_is_found_and_leaves_interrupts_to_python(tmp_path: Path) -> None:
    (tmp_path / "java").symlink_to(Path(which("java") or Path(os.environ["JAVA_HOME"], "bin", "java")).resolve())
    code = """if True:
        import os, signal
        from icr_bench.retrievers.lucene import Lucene
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests may ignore it
        Lucene().load()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            print("went on")
        except KeyboardInterrupt:
            print("interrupted")"""
    kept = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "JDK_HOME", "JRE_HOME")}
    command, environment = [sys.executable, "-c", code], kept | {"PATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("interrupted\n", 0), ended.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k1": -0.1}, "k1 must be 0 or more, got -0.1"),
        ({"k1": math.inf}, "k1 must be"),
        ({"b": 1.5}, "b must be between 0 and 1, got 1.5"),
        ({"threads": 0}, "threads must be 1 or more, got 0"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lucene(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("module", "package"), [("pyserini", "pyserini"), ("jnius", "pyjnius")])
def test_a_missing_package_comes_with_its_pip_line(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icr_bench.retrievers.lucene.find_spec", lambda name: None if name == module else object())
    with pytest.raises(MissingExtra, match=rf"{package} is not installed; pip install 'icr-bench\[lucene\]'"):
        Lucene()


@needs_pyserini
def test_search_comes_after_index() -> None:
    retriever = Lucene()
    for prepare in (lambda: None, retriever.load):
        prepare()
        assert retriever.index_bytes() == 0
        with pytest.raises(RuntimeError, match="search before index"):
            retriever.search(["red"], 1)


ADVICE = "; install one, such as Debian's openjdk-17-jre-headless, and let JAVA_HOME name its folder"


def refused(monkeypatch: pytest.MonkeyPatch, home: str | None, path: Path) -> str:
    """What `load` says with this Java and nothing else on the PATH, whether pyserini is installed or not."""
    monkeypatch.setattr("icr_bench.retrievers.lucene.find_spec", lambda name: object())
    for name in ("JDK_HOME", "JRE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAVA_HOME", home or "")
    monkeypatch.setenv("PATH", str(path))
    with pytest.raises(RuntimeError) as caught:
        Lucene().load()
    message = str(caught.value)
    assert "\n" not in message
    return message


def pretend(monkeypatch: pytest.MonkeyPatch, java: object) -> list[str]:
    """Put a pyserini with this Java in the place of any other; returns the options that Java is started with."""
    given = list[str]()

    def started(name: str) -> object:
        if isinstance(java, Exception):
            raise java
        return java

    config, package = ModuleType("jnius_config"), ModuleType("pyserini")
    config.__dict__.update(vm_running=False, add_options=lambda *options: given.extend(options))
    package.__dict__["__getattr__"] = started
    monkeypatch.setitem(sys.modules, "jnius_config", config)
    monkeypatch.setitem(sys.modules, "pyserini", package)
    return given


def test_no_java_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = "lucene needs Java 17 or newer, but JAVA_HOME is not set and no java is on the PATH" + ADVICE
    assert refused(monkeypatch, None, tmp_path) == expected


def test_a_java_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, RuntimeError("\n   Unable to find libjvm.so\n   you can use JVM_PATH\n"))
    found = f"lucene needs Java 17 or newer, but the one in {tmp_path} does not start (Unable to find libjvm.so)"
    assert refused(monkeypatch, str(tmp_path), tmp_path) == found + ADVICE


@pytest.mark.parametrize(("told", "got"), [("1.8", "8"), ("11", "11"), ("16", "16")])
def test_a_java_that_is_too_old(told: str, got: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = {"java.specification.version": told, "java.home": "/old"}
    classes = {"java.lang.System": SimpleNamespace(getProperty=properties.get)}
    given = pretend(monkeypatch, SimpleNamespace(autoclass=classes.get))
    program = tmp_path / "jvm" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    expected = f"lucene needs Java 17 or newer, got Java {got} in /old" + ADVICE
    assert refused(monkeypatch, None, program.parent) == expected
    assert os.environ["JAVA_HOME"] == str(tmp_path / "jvm")
    assert "-Xrs" in given
