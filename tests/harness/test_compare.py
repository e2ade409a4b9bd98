"""Two runs side by side: the statistics against slow or known ones, and the gate against planted regressions."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import permutation_test

from icr_bench.benchmarks.base import DataError
from icr_bench.harness import compare as module
from icr_bench.harness.answers import Entry, Graded, read
from icr_bench.harness.cli import main
from icr_bench.harness.compare import Tolerance, compare, holm, interval, parse_tolerance, randomisation, resamples
from icr_bench.harness.errors import UsageError

QUERIES = 60

PLUGIN = """
from icr_bench.retrievers.base import Ranking, Retriever


class Known(Retriever):
    '''Puts the document of a query's number first, for as many queries as told.'''

    def __init__(self, *, right: int = 60, broken: bool = False) -> None:
        self.right, self.broken = right, broken

    def index(self, documents):
        if self.broken:
            raise RuntimeError("broken | on purpose")
        self.place = {document.text.split()[0]: document.number for document in documents}
        self.count = len(documents)

    def search(self, queries, k):
        return [self.rank(query, k) for query in queries]

    def rank(self, query, k):
        first = self.place[query.split()[1]]
        others = [number for number in range(self.count) if number != first]
        if int(query.split()[1]) >= self.right:
            others.insert(1, first)
            first = others.pop(0)
        return Ranking([first, *others][:k], [-float(i) for i in range(min(k, self.count))])

    def index_bytes(self):
        return self.count * 8


RETRIEVERS = {"known": Known}
"""


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Answer]
Run = Callable[..., Path]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        return Answer(main([*map(str, arguments)]), *capsys.readouterr())

    return call


def write(file: Path, *lines: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a plug-in, and the runs that tests made with them."""
    folder = tmp_path_factory.mktemp("compare")
    corpus = [{"_id": f"d{i}", "text": f"{i} text"} for i in range(2 * QUERIES)]
    queries = [{"_id": f"q{i}", "text": f"about {i}"} for i in range(QUERIES)]
    judged = [f"q{i}\td{i}\t1" for i in range(QUERIES)]
    write(folder / "data" / "corpus.jsonl", *corpus)
    write(folder / "data" / "queries.jsonl", *queries)
    write(folder / "data" / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", *judged)
    write(folder / "more" / "corpus.jsonl", *corpus, {"_id": "d_new", "text": "new text"})
    write(folder / "more" / "queries.jsonl", *queries[:40])
    write(folder / "more" / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", *judged[:40])
    (folder / "plugin.py").write_text(PLUGIN)
    return folder


@pytest.fixture(scope="module")
def run(shared: Path) -> Run:
    """Make a run, or take the one that is there: ``run("known:right=50", n="80,all", data="data")``."""

    def make(*retrievers: str, n: str = "80", data: str = "data", k: str = "1,10") -> Path:
        out = shared / "-".join([*retrievers, n, data, k]).replace(":", "_").replace(",", "_")
        if not out.exists():
            chosen = [part for retriever in retrievers for part in ("-r", retriever)]
            spec = f"beir:path={shared / data},label=mine"
            main(["run", "-b", spec, "-n", n, "-k", k, *chosen, "-o", str(out), "--plugin", str(shared / "plugin.py")])
        return out

    return make


# Statistics


@pytest.mark.parametrize("seed", range(6))
def test_randomisation_over_all_signs_equals_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    differences = rng.normal(0.3, 1, 9) if seed % 2 else rng.choice([-1.0, 0.0, 0.0, 1.0], 20)

    def statistic(x: Any, axis: int) -> Any:
        return np.mean(x, axis=axis)

    expected = permutation_test(
        (differences[differences != 0],), statistic, permutation_type="samples", n_resamples=1e6
    )
    assert randomisation(differences, 100) == pytest.approx(expected.pvalue)


@pytest.mark.parametrize("seed", range(4))
def test_randomisation_by_draws_is_near_the_one_over_all_signs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    differences = np.random.default_rng(seed).normal(0.4, 1, 12)
    exact = randomisation(differences, 100)
    monkeypatch.setattr(module, "EXACT", 0)
    drawn = randomisation(differences, 40_000)
    assert drawn == pytest.approx(exact, abs=4 * (exact / 40_000) ** 0.5 + 1e-4)


def test_no_difference_is_no_evidence() -> None:
    assert randomisation(np.zeros(50), 10_000) == 1
    assert randomisation(np.tile([1.0, -1.0], 100), 10_000) == 1


def test_a_draw_never_gives_no_chance_at_all() -> None:
    assert randomisation(np.ones(200), 10_000) == pytest.approx(1 / 10_001)


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_smallest_p_passes_holm_in_a_large_family() -> None:
    for tests in (1, 10, 500, 3_000):
        assert tests / (resamples(tests) + 1) < module.LEVEL / 10
    assert resamples(1) == 10_000


def test_interval_equals_a_slow_bootstrap() -> None:
    rng = np.random.default_rng(3)
    differences = rng.choice([-1.0, 0.0, 0.5, 1.0], 150, p=[0.1, 0.6, 0.1, 0.2])
    means = [rng.choice(differences, 150).mean() for _ in range(20_000)]
    assert interval(differences) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.01)


def test_false_alarms_stay_below_the_level() -> None:
    """Families of eight tests of differences that are noise: at most one family in twenty has a finding."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(150):
        family = [randomisation(rng.choice([-1.0, 0.0, 1.0], 80, p=[0.1, 0.8, 0.1]), 2_000) for _ in range(8)]
        found += min(holm(family)) < module.LEVEL
    assert found <= 150 * module.LEVEL + 2 * (150 * 0.05 * 0.95) ** 0.5


# The gate


def test_a_run_equals_itself_and_its_baseline(run: Run, cli: Cli, tmp_path: Path) -> None:
    base = run("known:right=45,label=known", "bm25", n="80,all")
    assert cli("baseline", base, "-o", tmp_path / "deep" / "base.json").out == f"{tmp_path}/deep/base.json: 4 cells\n"
    answer = cli("compare", tmp_path / "deep" / "base.json", base)
    assert answer.code == 0
    assert answer.out.startswith("**No cell is worse** (4 cells).\n")
    for old, new in zip(read(base), read(tmp_path / "deep" / "base.json"), strict=True):
        assert old.graded
        assert new.graded
        assert (old.graded.queries, old.graded.depth) == (new.graded.queries, new.graded.depth)
        for metric in ("hit@1", "ndcg@10", "mrr@5"):
            assert np.array_equal(old.graded.values(metric), new.graded.values(metric))


def test_values_of_queries_have_the_mean_of_the_record(run: Run) -> None:
    for entry in read(run("known:right=45,label=known", "bm25", n="80,all")):
        assert entry.graded
        for metric, told in entry.record["metrics"].items():
            assert entry.graded.values(metric).mean() == pytest.approx(told["value"])


def test_a_worse_retriever_fails_the_gate_and_is_named(run: Run, cli: Cli, tmp_path: Path) -> None:
    base, new = run("known:right=55,label=known", "bm25"), run("known:right=40,label=known", "bm25")
    files = {form: tmp_path / form for form in ("markdown", "json", "junit")}
    answer = cli("compare", base, new, *(part for form, file in files.items() for part in (f"--{form}", file)))
    assert answer.code == 1
    told = answer.out.splitlines()
    assert told[0] == "**1 of 2 cells are worse.**"
    assert told[1].startswith("- mine, N=80, known: hit@1 0.917 -> 0.667 (-0.250 [")
    assert "known: right=55 -> 40" in answer.out
    assert files["markdown"].read_text() == answer.out
    found = json.loads(files["json"].read_text())
    assert found["exit_code"] == 1
    (hit, ndcg) = found["cells"][0]["differences"]
    assert (hit["metric"], ndcg["metric"]) == ("hit@1", "ndcg@10")
    assert hit["difference"] == pytest.approx(-15 / 60)
    assert hit["worse"]
    assert hit["p"] < hit["holm"] < 0.01
    assert hit["low"] < -0.25 < hit["high"] < 0
    assert found["cells"][1]["regressions"] == []
    junit = ElementTree.fromstring(files["junit"].read_text())
    assert (junit.get("tests"), junit.get("failures")) == ("2", "1")
    (failure,) = junit.iter("failure")
    assert "hit@1 0.917 -> 0.667" in failure.get("message", "")


def test_better_is_no_regression(run: Run, cli: Cli) -> None:
    answer = cli("compare", run("known:right=40,label=known", "bm25"), run("known:right=55,label=known", "bm25"))
    assert answer.code == 0
    assert "better" in answer.out


def test_a_small_difference_is_no_evidence(run: Run, cli: Cli) -> None:
    assert cli("compare", run("known:right=55,label=known"), run("known:right=53,label=known")).code == 0


@pytest.mark.parametrize(("tolerance", "code"), [("0.05", 1), ("0.2", 0), ("0.3", 0), ("5%", 1), ("30%", 0)])
def test_tolerance_is_an_amount_or_a_share(run: Run, cli: Cli, tolerance: str, code: int) -> None:
    base, new = run("known:right=55,label=known", "bm25"), run("known:right=40,label=known", "bm25")
    assert cli("compare", base, new, "--metric", "hit@1", "--tolerance", f"hit@1={tolerance}").code == code


def test_within_the_tolerance_nothing_is_better_or_worse(run: Run) -> None:
    lower, higher = read(run("known:right=53,label=known")), read(run("known:right=55,label=known"))
    for base, new in ((lower, higher), (higher, lower)):
        (found,) = compare(base, new, ["hit@1"], {"hit@1": Tolerance(0.2, False)}).pairs[0].differences
        assert (found.p, found.better, found.worse) == (1.0, False, False)


def test_the_evidence_is_of_what_the_difference_is_beyond_the_tolerance(run: Run) -> None:
    base, new = read(run("known:right=55,label=known", "bm25")), read(run("known:right=40,label=known", "bm25"))
    (found,) = compare(base, new, ["hit@1"], {"hit@1": Tolerance(0.2, True)}).pairs[0].differences
    assert found.tolerance == pytest.approx(0.2 * 55 / 60)
    beyond = np.array([0.0] * 40 + [-1.0] * 15 + [0.0] * 5) + found.tolerance
    assert found.p == pytest.approx(randomisation(beyond, 10_000), abs=0.02)
    assert found.p > 0.1


def test_changed_weights_are_told(run: Run) -> None:
    base = read(run("bm25"))
    record = json.loads(json.dumps(base[0].record))
    record["fingerprint"]["weights"] = {"model": "sha256:other"}
    assert compare(base, [Entry(record, base[0].graded)]).pairs[0].changed == ["weights"]


def test_cells_that_are_missing_or_failed_are_regressions(run: Run, cli: Cli) -> None:
    base = run("known:right=45,label=known", "bm25", n="80,all")
    answer = cli("compare", base, run("known:right=45,label=known", n="80,all"))
    assert answer.code == 1
    assert "- mine, N=80, bm25: the cell is missing\n" in answer.out
    broken = run("known:broken=true,label=known", "bm25", n="80,all")
    answer = cli("compare", base, broken)
    assert answer.code == 1
    assert "known: the cell failed: error: RuntimeError: broken | on purpose\n" in answer.out
    assert cli("compare", broken, broken).code == 0  # failed in both
    answer = cli("compare", broken, base)
    assert answer.code == 0
    assert "repaired" in answer.out


def test_more_cells_than_the_base_has_are_no_regression(run: Run) -> None:
    base, new = run("known:right=45,label=known"), run("known:right=45,label=known", "bm25", n="80,all")
    compared = compare(read(base), read(new))
    assert compared.exit_code == 0
    assert [pair.status for pair in compared.pairs] == ["compared", "new", "new", "new"]


def test_equal_names_of_other_data_are_not_compared_silently(run: Run, cli: Cli) -> None:
    base, other = run("bm25"), run("bm25", data="more")
    answer = cli("compare", base, other)
    assert answer.code == 3
    assert "mine, N=80, bm25, seed 0: the two sides were asked of different data (" in answer.err
    answer = cli("compare", base, other, "--other-data")
    assert answer.code == 0
    assert "data changed" in answer.out


def test_other_data_is_compared_over_shared_queries(run: Run) -> None:
    base, other = read(run("known:right=30,label=known")), read(run("known:right=20,label=known", data="more"))
    (pair,) = compare(base, other, ["hit@1"], other_data=True).pairs
    assert (pair.differences[0].base, pair.differences[0].new) == (30 / 40, 20 / 40)


def test_the_same_data_under_another_name_is_compared(run: Run, shared: Path, cli: Cli) -> None:
    out, spec = shared / "renamed", f"beir:path={shared / 'data'},label=yours"
    assert cli("run", "-b", spec, "-n", "80", "-k", "1,10", "-r", "bm25", "-o", out).code == 0
    answer = cli("compare", run("bm25"), out)
    assert answer.code == 0
    assert "missing" not in answer.out


def test_a_run_whose_benchmarks_share_their_data_pairs_every_cell_with_itself(shared: Path, cli: Cli) -> None:
    out, data = shared / "twice", shared / "data"
    asked = [f"beir:path={data},label={label}" for label in ("whole", "cut,max_tokens=1", "other,exclude_self=true")]
    chosen = [part for spec in asked for part in ("-b", spec)]
    assert cli("run", *chosen, "-n", "80,all", "-k", "1,10", "-r", "bm25", "-o", out).code == 0
    assert cli("baseline", out, "-o", shared / "twice.json").code == 0
    for side in (out, shared / "twice.json"):
        answer = cli("compare", side, out, "--json", shared / "told.json")
        assert answer.code == 0
        cells = json.loads((shared / "told.json").read_text())["cells"]
        assert [(c["benchmark"], c["n"]) for c in cells] == [
            (name, n) for name in ("whole", "cut", "other") for n in (80, 120)
        ]
        assert all(c["status"] == "compared" and not c["options"] and not c["changed"] for c in cells)
        assert all(d["difference"] == 0 for c in cells for d in c["differences"])


def relabelled(entry: Entry, benchmark: str, **options: object) -> Entry:
    """The same cell of a benchmark of another name, with other options."""
    told = json.loads(json.dumps(entry.record))
    told["benchmark"] = benchmark
    told["config"]["benchmark"]["resolved"] |= options
    return Entry(told, entry.graded)


def test_equal_data_under_other_names_pair_only_where_no_other_cell_has_them(run: Run) -> None:
    (own,) = read(run("bm25"))
    cut = relabelled(own, "cut", max_tokens=1)
    (pair,) = compare([own], [cut]).pairs
    assert (pair.status, pair.options) == ("compared", {"benchmark max_tokens": [None, 1]})
    assert "benchmark max_tokens=None -> 1" in module.text(compare([own], [cut]))
    one, other = relabelled(own, "one"), relabelled(own, "other")
    for base, new in (([own], [one, other]), ([one, other], [own])):
        told = [pair.status for pair in compare(base, new).pairs]
        assert "compared" not in told
    assert [pair.status for pair in compare([own, one], [own, other]).pairs] == ["compared", "compared"]


def test_cells_of_other_seeds_are_not_paired(run: Run) -> None:
    (own,) = read(run("bm25"))
    other = Entry(own.record | {"seed": 1}, own.graded)
    assert [pair.status for pair in compare([own], [other]).pairs] == ["missing", "new"]
    assert [pair.status for pair in compare([own, other], [other, own]).pairs] == ["compared"] * 2
    assert [pair.seed for pair in compare([own, other], [other, own]).pairs] == [0, 1]


def doctored(entries: list[Entry], machine: str | None = None, **changes: float) -> list[Entry]:
    """The same cells with costs changed by a factor, or from another machine."""
    found = []
    for entry in entries:
        record = json.loads(json.dumps(entry.record))
        for name, factor in changes.items():
            part, key = module.COSTS[name]
            record[part][key] *= factor
        if machine:
            record["environment"]["machine"]["id"] = machine
        found.append(Entry(record, entry.graded))
    return found


@pytest.mark.parametrize("name", module.COSTS)
def test_costs_are_judged_only_if_named(run: Run, name: str) -> None:
    base = read(run("bm25"))
    slower = doctored(base, **{name: 2.0})
    assert compare(base, slower).exit_code == 0
    assert compare(base, slower, tolerances={name: Tolerance(1.5, True)}).exit_code == 0
    compared = compare(base, slower, tolerances={name: Tolerance(0.5, True)})
    assert compared.exit_code == 1
    assert compared.pairs[0].regressions == [f"{name} x2.00 (at most x1.50)"]
    assert compare(slower, base, tolerances={name: Tolerance(0.5, True)}).exit_code == 0


def test_costs_of_another_machine_are_left_out(run: Run) -> None:
    base = read(run("bm25"))
    compared = compare(base, doctored(base, machine="another", latency=9), tolerances={"latency": Tolerance(0.5, True)})
    assert compared.exit_code == 0
    assert compared.pairs[0].ratios == []
    assert any("different machines" in note for note in compared.notes)
    assert any(note.startswith("latency is not judged in 1 cells") for note in compared.notes)


def test_usual_metrics_are_as_deep_as_all_cells_are(run: Run) -> None:
    assert compare(read(run("bm25")), read(run("bm25"))).metrics == ["hit@1", "ndcg@10"]
    assert compare(read(run("bm25", k="1,5")), read(run("bm25"))).metrics == ["hit@1", "ndcg@5"]


def test_a_corpus_returned_whole_is_known_to_any_depth() -> None:
    graded = Graded(["q"], [[0, 1]], [[1]], 10**9, 1)
    assert graded.values("mrr@10") == [0.5]
    with pytest.raises(UsageError, match=r"hit@3: only the first 2 documents were kept; run with -k 3"):
        Graded(["q"], [[0, 1]], [[1]], 2, 1).values("hit@3")


# Bad input


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("hit@1", "expected NAME=NUMBER"),
        ("hit@1=-1", "expected NAME=NUMBER"),
        ("hit@1=x%", "expected NAME=NUMBER"),
        ("hot@1=1", "did you mean hit@1"),
        ("latency=0.1", "give a share"),
    ],
)
def test_bad_tolerances(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        parse_tolerance(text)


def test_tolerance_of_a_metric_that_is_not_compared(run: Run, cli: Cli) -> None:
    answer = cli("compare", run("bm25"), run("bm25"), "--tolerance", "mrr@5=0.1")
    assert answer.code == 2
    assert "give --metric mrr@5 too" in answer.err


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no baseline"),
        ("[]", "no baseline"),
        ('{"icr-bench baseline": 9}', "format 9, expected 1"),
        ('{"icr-bench baseline": 1}', "no 'cells'"),
        ('{"icr-bench baseline": 1, "cells": {}}', "cells: expected a list, got {}"),
        ('{"icr-bench baseline": 1, "cells": [7]}', "cell 1 of 1: the whole: expected an object, got 7"),
        ('{"icr-bench baseline": 1, "cells": [{"n": 1}]}', "cell 1 of 1: benchmark is missing"),
    ],
)
def test_bad_baselines_are_data_errors(tmp_path: Path, cli: Cli, run: Run, text: str, part: str) -> None:
    (tmp_path / "base.json").write_text(text)
    answer = cli("compare", tmp_path / "base.json", run("bm25"))
    assert answer.code == 3
    assert part in answer.err


Damage = tuple[str, ...]
GONE = object()


def put(record: Any, path: Damage, value: object) -> Any:
    """A copy in which a key has another value, or is gone."""
    copy = json.loads(json.dumps(record))
    *above, last = path
    inner = copy
    for key in above:
        inner = inner[key]
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    return copy


IN_BOTH: list[tuple[Damage, object, str]] = [
    (("n",), "80", "n: expected a whole number, got '80'"),
    (("n",), 0, "n: expected 1 or more, got 0"),
    (("seed",), True, "seed: expected a whole number, got True"),
    (("fingerprint",), GONE, "fingerprint is missing"),
    (("fingerprint", "data"), None, "fingerprint.data: expected text, got None"),
    (("config", "benchmark", "resolved", "relevant"), GONE, "config.benchmark.resolved.relevant is missing"),
    (("config", "k"), 10, "config.k: expected a list, got 10"),
    (("config", "k"), [], "config.k: expected one cut-off or more, got none"),
    (("environment", "machine", "id"), GONE, "environment.machine.id is missing"),
    (("metrics",), None, "metrics: expected an object, got None"),
    (("metrics", "hit@1", "low"), "x", "metrics['hit@1'].low: expected a number, got 'x'"),
    (("time",), None, "time: expected an object, got None"),
    (("time", "query_p50_s"), "fast", "time.query_p50_s: expected a number or null, got 'fast'"),
    (("memory", "index_bytes"), None, "memory.index_bytes: expected a whole number, got None"),
]


def commands(damaged: Path, whole: Path, out: Path) -> list[list[object]]:
    """All that read cells."""
    found: list[list[object]] = [["compare", damaged, whole], ["compare", whole, damaged], ["claims", out / "c.yaml"]]
    (out / "c.yaml").write_text(f"records: [{damaged}]\nfamilies: {{f: {{base: bm25, trained: 8}}}}\n")
    if damaged.is_dir():
        found += [["table", damaged], ["curve", damaged], ["recommend", damaged, "-n", "80"], ["export", damaged]]
        found += [["baseline", damaged, "-o", out / "b.json"], ["report", damaged, "-o", out / "r.html"]]
        found += [["plot", damaged, "-o", out / "p.svg"]]
    return found


@pytest.mark.parametrize(("path", "value", "part"), IN_BOTH)
def test_a_damaged_cell_is_a_data_error(
    run: Run, cli: Cli, tmp_path: Path, path: Damage, value: object, part: str
) -> None:
    whole = run("bm25")
    (record,) = (json.loads(line) for line in (whole / "cells.jsonl").read_text().splitlines())
    shutil.copytree(whole, tmp_path / "run")
    write(tmp_path / "run" / "cells.jsonl", put(record, path, value))
    assert cli("baseline", whole, "-o", tmp_path / "base.json").code == 0
    told = json.loads((tmp_path / "base.json").read_text())
    write(tmp_path / "base.json", told | {"cells": [put(told["cells"][0], path, value)]})
    for damaged, where in (("run", "cells.jsonl:1: not a record of a cell ("), ("base.json", "(cell 1 of 1: ")):
        for command in commands(tmp_path / damaged, whole, tmp_path):
            answer = cli(*command)
            assert answer.code == 3, command
            assert f"{tmp_path / damaged}" in answer.err
            assert f"{where}{part})" in answer.err


@pytest.mark.parametrize(
    ("answers", "part"),
    [
        (GONE, "answers: expected an object, got None"),
        ({"queries": [], "ranked": [], "judged": []}, "1 or more, got 0, 0 and 0"),
        ({"queries": ["q"], "ranked": [], "judged": [[1]]}, "got 1, 0 and 1"),
        ({"queries": ["q"], "ranked": [["d"]], "judged": [[1]]}, "answers.ranked[0][0]: expected a whole number"),
        ({"queries": ["q"], "ranked": [[1]]}, "answers.judged is missing"),
    ],
)
def test_a_finished_cell_of_a_baseline_has_its_answers(
    run: Run, cli: Cli, tmp_path: Path, answers: object, part: str
) -> None:
    assert cli("baseline", run("bm25"), "-o", tmp_path / "base.json").code == 0
    told = json.loads((tmp_path / "base.json").read_text())
    write(tmp_path / "base.json", told | {"cells": [put(told["cells"][0], ("answers",), answers)]})
    answer = cli("compare", tmp_path / "base.json", run("bm25"))
    assert answer.code == 3
    assert part in answer.err


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("rankings", None, "cannot be read"),
        ("rankings", "", "holds nothing; run with --fresh"),
        ("rankings", '{"query": "q0", "documents": [], "scores": []}\n', "holds no ranking of the query 'q1'"),
        ("rankings", '{"query": "q0", "documents": ["d0"], "scores": []}\n', "has 1 documents but 0 scores"),
        ("rankings", '{"query": "q0"}\n', ":1: documents is missing"),
        ("rankings", "{\n", ":1: Expecting property name"),
        ("judgments", "", "holds nothing"),
        ("judgments", '\n{"query": "q0", "judgments": {"d0": "1"}}\n', ":2: judgments['d0']: expected a whole number"),
        ("judgments", "\udcff", "is not UTF-8"),
    ],
)
def test_a_finished_cell_of_a_run_has_its_answers(
    run: Run, cli: Cli, tmp_path: Path, kind: str, text: str | None, part: str
) -> None:
    shutil.copytree(run("bm25"), tmp_path / "run")
    (file,) = (tmp_path / "run" / kind).iterdir()
    if text is None:
        file.unlink()
    else:
        file.write_text(text, errors="surrogateescape")
    for command in (["compare", tmp_path / "run", run("bm25")], ["export", tmp_path / "run"]):
        answer = cli(*command)
        assert answer.code == 3
        assert f"{file}" in answer.err
        assert part in answer.err


def test_neither_run_nor_baseline(tmp_path: Path, cli: Cli, run: Run) -> None:
    for one, other in itertools.permutations([tmp_path / "nothing", run("bm25")]):
        answer = cli("compare", one, other)
        assert answer.code == 2
        assert "expected the folder of a run, or a file of icr-bench baseline" in answer.err
    (tmp_path / "empty").mkdir()
    assert cli("compare", tmp_path / "empty", run("bm25")).code == 2


def test_sides_without_a_shared_query(run: Run) -> None:
    base = read(run("bm25"))
    assert base[0].graded
    strange = Graded([f"other{i}" for i in range(QUERIES)], base[0].graded.ranked, base[0].graded.judged, 10, 1)
    with pytest.raises(DataError, match="share no query"):
        compare(base, [Entry(base[0].record, strange)])
