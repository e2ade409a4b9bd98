"""The papers' corpora from a hub, an archive or a folder that behave as the real ones do, and from ones that do not."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_hub import SHA, FakeHub

from icr_bench.benchmarks.beir import beir
from icr_bench.harness import build as module
from icr_bench.harness import download
from icr_bench.harness.cli import main
from icr_bench.harness.download import NotReachable, fetch

WORDS = ["otter", "river", "map", "kettle", "lamp", "sea", "tram", "yard", "moss", "pear", "drum", "flag"]
DOCUMENTS, QUERIES = 400, 30

Files = dict[str, bytes]


def made(golds: int = 1) -> Files:
    """A benchmark in BEIR layout, plain: documents with titles, some that equal a gold."""
    rng = random.Random(1)
    texts = [f"{' '.join(rng.choices(WORDS, k=12))} {i}" for i in range(DOCUMENTS)]
    rows = [{"_id": f"d{i}", "title": f"title{i}", "text": text} for i, text in enumerate(texts)]
    rows += [{"_id": f"same{i}", "title": f"title{i}", "text": texts[i]} for i in range(5)]
    queries = [{"_id": f"q{i}", "text": " ".join(texts[i].split()[:4])} for i in range(QUERIES)]
    judged = [f"q{i}\td{i + QUERIES * g}\t1" for i in range(QUERIES) for g in range(golds)]

    def lines(told: list[Any]) -> bytes:
        return "".join(json.dumps(one) + "\n" for one in told).encode()

    qrels = "query-id\tcorpus-id\tscore\n" + "\n".join(judged) + "\n"
    return {"corpus.jsonl": lines(rows), "queries.jsonl": lines(queries), "qrels": qrels.encode()}


def parquet(lines: bytes) -> bytes:
    pytest.importorskip("pyarrow")
    from pyarrow import Table
    from pyarrow.parquet import write_table

    out = io.BytesIO()
    write_table(Table.from_pylist([json.loads(line) for line in lines.splitlines()]), out)
    return out.getvalue()


def folder(path: Path, files: Files, split: str = "dev") -> Path:
    (path / "qrels").mkdir(parents=True)
    (path / "corpus.jsonl").write_bytes(files["corpus.jsonl"])
    (path / "queries.jsonl").write_bytes(files["queries.jsonl"])
    (path / "qrels" / f"{split}.tsv").write_bytes(files["qrels"])
    return path


def manifest(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return told


Build = Callable[..., int]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def call(name: str, *more: object) -> int:
        fixed = ["build", name, "-o", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
        return main([*fixed, *map(str, more)])

    return call


# What stays


def test_golds_their_negatives_and_a_random_rest_make_the_corpus(build: Build, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", made())
    assert build("msmarco", "--source", source, "--queries", 10, "--negatives", 3, "-n", 100) == 0
    told, made_of = manifest(tmp_path / "out"), beir(path=tmp_path / "out")
    ids = {document.id for document in made_of.documents}
    assert (len(ids), len(made_of.queries)) == (100, 10)
    golds = {document for own in made_of.judgments.values() for document in own}
    assert golds <= ids
    assert told["golds"] == len(golds) == 10
    assert told["union"] + told["drawn_at_random"] == 100
    assert told["union"] <= 10 + 30
    texts = {document.id: document.text for document in made_of.documents}
    assert not [d for d in ids if d.startswith("same") and texts[d] in {texts[g] for g in golds}]
    assert all(
        digest == hashlib.sha256((tmp_path / "out" / n).read_bytes()).hexdigest() for n, digest in told["files"].items()
    )
    run = ["run", "-b", f"beir:path={tmp_path / 'out'}", "-n", "20,all", "-r", "bm25", "-o", str(tmp_path / "run")]
    assert main(run) == 0


def test_negatives_are_what_the_miner_ranks_highest_without_golds(build: Build, tmp_path: Path) -> None:
    from icr_bench.retrievers.base import Document
    from icr_bench.retrievers.bm25 import BM25

    files = made()
    source = folder(tmp_path / "source", files)
    assert build("msmarco", "--source", source, "--queries", 5, "--negatives", 2, "-n", 15) == 0
    made_of = beir(path=tmp_path / "out")
    rows = [json.loads(line) for line in files["corpus.jsonl"].splitlines()]
    texts = [f"{row['title']} {row['text']}" for row in rows]
    bm25 = BM25()
    bm25.load()
    bm25.index([Document(number, text) for number, text in enumerate(texts)])
    golds = {document for own in made_of.judgments.values() for document in own}
    gold_texts = {text for row, text in zip(rows, texts, strict=True) if row["_id"] in golds}
    expected = set(golds)
    for query in made_of.queries:
        (found,) = bm25.search([query.text], 50)
        fit = [n for n in found.numbers if rows[n]["_id"] not in golds and texts[n] not in gold_texts]
        expected |= {rows[n]["_id"] for n in fit[:2]}
    assert expected <= {document.id for document in made_of.documents}
    assert manifest(tmp_path / "out")["union"] == len(expected)


def test_both_golds_are_kept_and_a_full_corpus_has_the_hardest_negatives(build: Build, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", made(golds=2), "test")
    assert build("hotpotqa", "--source", source, "--queries", 20, "--negatives", 10, "-n", 60) == 0
    told = manifest(tmp_path / "out")
    assert (told["golds"], told["documents"], told["drawn_at_random"]) == (40, 60, 0)
    assert told["negatives_kept"]["least"] < 10


def test_the_same_seed_makes_the_same_corpus_and_another_another(build: Build, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", made())
    digests = []
    for seed in (0, 0, 1):
        assert build("msmarco", "--source", source, "--queries", 5, "--negatives", 1, "-n", 50, "--seed", seed) == 0
        digests.append(manifest(tmp_path / "out")["files"])
        (tmp_path / "out").rename(tmp_path / f"out{len(digests)}")
    assert digests[0] == digests[1] != digests[2]


def test_given_negatives_and_a_dense_miner(build: Build, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", made())
    given = tmp_path / "given.jsonl"
    given.write_text(
        "".join(json.dumps({"query": f"q{i}", "documents": ["d300", f"d{200 + i}"]}) + "\n" for i in range(QUERIES))
    )
    assert build("msmarco", "--source", source, "--negatives", 2, "-n", 61, "--miner", given) == 0
    ids = {document.id for document in beir(path=tmp_path / "out").documents}
    assert ids == {f"d{i}" for i in range(QUERIES)} | {"d300"} | {f"d{200 + i}" for i in range(QUERIES)}
    (tmp_path / "out").rename(tmp_path / "first")
    assert (
        build("msmarco", "--source", source, "--queries", 5, "--negatives", 2, "-n", 20, "--miner", "dense-tiny") == 0
    )
    assert "sha256:" in manifest(tmp_path / "out")["miner"]


def test_a_mined_list_is_used_again(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "source", made())
    assert build("msmarco", "--source", source, "--queries", 5, "--negatives", 2, "-n", 20) == 0
    (tmp_path / "out").rename(tmp_path / "first")
    monkeypatch.setattr(module, "mine", None)
    assert build("msmarco", "--source", source, "--queries", 5, "--negatives", 2, "-n", 30) == 0


def test_a_querys_own_passage_is_not_returned(build: Build, tmp_path: Path) -> None:
    files = made()
    source = tmp_path / "source"
    (source / "corpus").mkdir(parents=True)
    (source / "corpus" / "corpus.jsonl").write_bytes(files["corpus.jsonl"])
    (source / "queries.jsonl").write_bytes(files["queries.jsonl"])
    (source / "qrels.tsv").write_bytes(files["qrels"])
    (source / "per_query_excluded_ids.json").write_text(json.dumps({f"q{i}": [f"d{100 + i}"] for i in range(QUERIES)}))
    assert build("obliq-math", "--source", source) == 0
    told, made_of = manifest(tmp_path / "out"), beir(path=tmp_path / "out")
    assert told["exclude_self"]
    assert len(made_of.documents) == DOCUMENTS + 5
    assert {query.id for query in made_of.queries} == {f"d{100 + i}" for i in range(QUERIES)}


# From the hub and from an archive


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def cli(tmp_path: Path, hub: FakeHub, *arguments: object, **environment: str) -> Ended:
    """The command in a process of its own, since the hub's client reads its address when it is imported."""
    command = [sys.executable, "-m", "icr_bench.harness.cli", *map(str, arguments), "--cache", str(tmp_path / "cache")]
    told = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"} | environment
    ended = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, timeout=120)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def repos(files: Files, split: str = "dev", name: str = "msmarco") -> dict[str, Files]:
    held = {
        "corpus.jsonl.gz": gzip.compress(files["corpus.jsonl"]),
        "queries.jsonl.gz": gzip.compress(files["queries.jsonl"]),
    }
    return {f"BeIR/{name}": held | {"README.md": b"x"}, f"BeIR/{name}-qrels": {f"{split}.tsv": files["qrels"]}}


SMALL = ("--queries", 5, "--negatives", 2, "-n", 20)


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_a_benchmark_is_built_from_the_hub(tmp_path: Path, kind: str) -> None:
    held = repos(made())
    if kind == "parquet":
        files = made()
        held["BeIR/msmarco"] = {
            "corpus/part-0.parquet": parquet(files["corpus.jsonl"]),
            "queries/part-0.parquet": parquet(files["queries.jsonl"]),
        }
    with FakeHub(held) as hub:
        ended = cli(tmp_path, hub, "build", "msmarco", *SMALL, "-o", tmp_path / "out")
        assert ended.code == 0, ended.err
        assert "icr-bench run -b beir:path=" in ended.out
        told = manifest(tmp_path / "out")
        assert told["revision"] == f"{SHA}, judgments {SHA}"
        assert len(beir(path=tmp_path / "out").documents) == 20
        asked = len(hub.asked)
        again = cli(tmp_path, hub, "build", "msmarco", *SMALL, "-o", tmp_path / "again")
        assert again.code == 0
        assert not [one for one in hub.asked[asked:] if one[0] == "GET" and "/resolve/" in one[1]]  # from the cache
    assert manifest(tmp_path / "again")["files"] == told["files"]


@pytest.mark.parametrize("fault", ["429 after 0.1", "500", "503", "truncated"])
def test_what_may_pass_at_the_hub_is_tried_again(tmp_path: Path, fault: str) -> None:
    with FakeHub(repos(made()), faults={"corpus": [fault], "/api/": ["500"] if fault == "500" else []}) as hub:
        ended = cli(tmp_path, hub, "build", "msmarco", *SMALL, "-o", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert len(beir(path=tmp_path / "out").documents) == 20


def test_a_stalled_connection_to_the_hub_is_given_up_and_tried_again(tmp_path: Path) -> None:
    with FakeHub(repos(made()), faults={"corpus": ["stall 30"]}) as hub:
        ended = cli(tmp_path, hub, "build", "msmarco", *SMALL, "-o", tmp_path / "out", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert ended.code == 0, ended.err


def test_wrong_bytes_from_the_hub_are_noticed(tmp_path: Path) -> None:
    with FakeHub(repos(made()), faults={"corpus": ["wrong"]}) as hub:
        ended = cli(tmp_path, hub, "build", "msmarco", *SMALL, "-o", tmp_path / "out")
        assert ended.code == 2
        assert "corpus.jsonl.gz has the SHA-256" in ended.err
        assert not (tmp_path / "out").exists()
        assert cli(tmp_path, hub, "build", "msmarco", *SMALL, "-o", tmp_path / "out").code == 0


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"), ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "BeIR/msmarco: ")],
)
def test_without_a_network_one_sentence_names_what_else_to_do(
    tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    program = "import icr_bench.harness.download as d, sys; d.time.sleep = lambda s: None; "
    program += "from icr_bench.harness.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "build", "msmarco", "-o", str(tmp_path / "out")]
    told = os.environ | {"HF_HOME": str(tmp_path / "hf")} | environment
    ended = subprocess.run(command, env=told, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert "give --source FOLDER" in ended.stderr
    assert "Traceback" not in ended.stderr


def archive(files: Files, name: str = "nq", split: str = "test") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made_of:
        made_of.writestr(f"{name}/corpus.jsonl", files["corpus.jsonl"])
        made_of.writestr(f"{name}/queries.jsonl", files["queries.jsonl"])
        made_of.writestr(f"{name}/qrels/{split}.tsv", files["qrels"])
    return out.getvalue()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(download, "STALL_S", 0.5)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", ["", "429 after 0.1", "500", "truncated", "stall 3"])
def test_a_benchmark_is_built_from_an_archive(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    data = archive(made())
    monkeypatch.setitem(
        module.RECIPES, "nq", module.Recipe("BeIR/nq", "test", "", hashlib.md5(data).hexdigest(), "", 20, 5, 2)
    )
    with FakeHub(plain={"/nq.zip": data}, faults={"nq": [fault] if fault else []}) as hub:
        monkeypatch.setattr(module, "ZIPS", hub.url)
        assert build("nq", "--source", "zip") == 0
        if fault == "truncated":
            assert [told for _, _, told in hub.asked] == ["", f"bytes={len(data) // 2}-"]  # it went on
    assert len(beir(path=tmp_path / "out").documents) == 20


@pytest.mark.usefixtures("quick")
def test_an_archive_with_other_bytes_is_deleted(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive(made())
    monkeypatch.setitem(
        module.RECIPES, "nq", module.Recipe("BeIR/nq", "test", "", hashlib.md5(data).hexdigest(), "", 20, 5, 2)
    )
    with FakeHub(plain={"/nq.zip": data}, faults={"nq": ["wrong"]}) as hub:
        monkeypatch.setattr(module, "ZIPS", hub.url)
        assert build("nq", "--source", "zip") == 2
        assert not (tmp_path / "out").exists()
        assert build("nq", "--source", "zip") == 0


@pytest.mark.usefixtures("quick")
def test_a_download_that_goes_on_ends_with_the_same_bytes(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(300_000)
    with FakeHub(plain={"/file": data}, faults={"file": ["truncated", "500", "truncated", "truncated"]}) as hub:
        found = fetch(f"{hub.url}/file", tmp_path / "file", md5=hashlib.md5(data).hexdigest())
        assert found.path.read_bytes() == data
        assert not (tmp_path / "file.part").exists()
        count = len(hub.asked)
        fetch(f"{hub.url}/file", tmp_path / "file", md5=hashlib.md5(data).hexdigest())
        assert len(hub.asked) == count


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", ["404", "403", "500"])
def test_a_server_that_does_not_give_it_is_told(tmp_path: Path, fault: str) -> None:
    with FakeHub(plain={"/file": b"x"}, faults={"file": [fault] * 20}) as hub:
        with pytest.raises(NotReachable, match=f"HTTP {fault}"):
            fetch(f"{hub.url}/file", tmp_path / "file")
        assert len(hub.asked) == (download.TRIES if fault == "500" else 1)


# Bad input


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"corpus.jsonl": b'{"_id": "d1"}\n'}, "corpus.jsonl:1: expected '_id' and 'text'"),
        ({"corpus.jsonl": b'{"_id": "d1", "text": "a"}\nnot JSON\n'}, "corpus.jsonl:2: cannot be read"),
        ({"corpus.jsonl": b'{"_id": "other", "text": "a"}\n'}, "documents that are judged are not in the corpus"),
        ({"qrels": b"query-id\tcorpus-id\tscore\nq1\td1\tmany\n"}, "dev.tsv:2: expected query-id"),
        ({"qrels": b"query-id\tcorpus-id\tscore\nq1\td1\t0\n"}, "no query has a gold"),
        ({"qrels": b"query-id\tcorpus-id\tscore\n"}, "holds no judgments"),
        ({"queries.jsonl": b"[1]\n"}, "queries.jsonl:1: cannot be read"),
    ],
)
def test_files_that_are_not_what_they_should_be(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Files, problem: str
) -> None:
    source = folder(tmp_path / "source", made() | change)
    assert build("msmarco", "--source", source, *SMALL) == 3
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["msmarko"], "did you mean msmarco"),
        (["msmarco", "--source", "nowhere"], "expected hub, zip or a folder"),
        (["limit", "--source", "zip"], "has no archive of BEIR"),
        (["msmarco", "-n", "1k,2k"], "expected one number of documents"),
        (["msmarco", "--queries", "0"], "--queries"),
        (["msmarco", "--source", "SOURCE", "--miner", "blocksearch"], "expected bm25, a dense model"),
        (["msmarco", "--source", "SOURCE", "--miner", "bm25:k9=1"], "k9"),
    ],
)
def test_bad_arguments(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    source = folder(tmp_path / "source", made())
    assert build(*(str(source) if part == "SOURCE" else part for part in arguments)) == 2
    assert problem in capsys.readouterr().err


def test_a_folder_that_is_not_empty_is_left_alone(build: Build, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert build("msmarco", "--source", folder(tmp_path / "source", made())) == 2
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
