"""Tables from records: shape, failures, escapes, notes, and forms that other tools read."""

import csv
import json
import re
from typing import Any

import pytest

from icr_bench.harness.errors import UsageError
from icr_bench.harness.folder import Record
from icr_bench.harness.metrics import INTERVAL, names
from icr_bench.harness.tables import Format, Table, build

COMMAND = "icr-bench run -b limit:likes=20 -n 46,1k"


def record(
    retriever: str = "bm25",
    n: int = 46,
    *,
    benchmark: str = "limit",
    seed: int = 0,
    status: str = "ok",
    value: float = 0.5,
    k: tuple[int, ...] = (1, 10),
    ceiling: float = 1.0,
) -> Record:
    """A record as a run keeps it."""
    made: Record = {
        "benchmark": benchmark,
        "n": n,
        "retriever": retriever,
        "seed": seed,
        "status": status,
        "error": None if status == "ok" else "of mine",
        "config": {"k": list(k)},
        "queries": {"declared": 920, "scored": 0, "empty": 0, "failed": 920},
        "memory": {"index_bytes": None, "peak_rss_bytes": 98_765_432, "device_peak_bytes": None},
        **dict.fromkeys(("metrics", "ceiling", "tie_rate", "time")),
    }
    if status != "ok":
        return made
    return made | {
        "queries": {"declared": 920, "scored": 920, "empty": 7, "failed": 0},
        "metrics": {name: {"value": value, "low": value - 0.0625, "high": value + 0.0625} for name in names(k)},
        "ceiling": dict.fromkeys(names(k), ceiling),
        "tie_rate": 0.0,
        "time": {
            "load_s": 0.25,
            "index_s": 0.5,
            "warmup": 5,
            "query_p50_s": 0.001,
            "query_p95_s": 0.002,
            "query_p99_s": 0.003,
            "sampled": 50,
            "queries_per_s": 1234.5,
            "batch": 32,
        },
        "memory": {"index_bytes": 123_456, "peak_rss_bytes": 98_765_432, "device_peak_bytes": None},
    }


def one(*records: Record, metric: str = "hit@1", command: str = COMMAND) -> Table:
    """The first table of a metric."""
    return build(records, [metric], command)[0]


def lines_of(table: Table, form: Format) -> list[list[str]]:
    """The cells of a rendered table, its head first."""
    text = table.render(form)
    if form == "csv":
        return list(csv.reader(line for line in text.splitlines() if not line.startswith("#")))
    if form == "md":
        rows = [line for line in text.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
        return [cells[0], *cells[2:]]
    rows = [line.removesuffix("\\\\") for line in text.splitlines() if line.endswith("\\\\")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)&", row)] for row in rows]


TWO_BY_TWO = (
    record("bm25", 1000, value=0.25),
    record("bm25", 46),
    record("dense", 46, value=0.75),
    record("dense", 1000, status="oom"),
)


@pytest.mark.parametrize("form", ["md", "latex"])
def test_rows_are_retrievers_and_columns_sizes(form: Format) -> None:
    assert lines_of(one(*TWO_BY_TWO), form) == [
        ["retriever", "N=46", "N=1,000"],
        ["bm25", "0.500 [0.438, 0.562]", "0.250 [0.188, 0.312]"],
        ["dense", "0.750 [0.688, 0.812]", "oom"],
    ]


def test_csv_holds_numbers_and_bounds() -> None:
    assert lines_of(one(*TWO_BY_TWO), "csv") == [
        ["retriever", "46", "46 low", "46 high", "1000", "1000 low", "1000 high"],
        ["bm25", "0.5", "0.4375", "0.5625", "0.25", "0.1875", "0.3125"],
        ["dense", "0.75", "0.6875", "0.8125", "oom", "", ""],
    ]


def test_csv_is_exact() -> None:
    value = 0.1 + 0.2
    assert float(lines_of(one(record(value=value)), "csv")[1][1]) == value


def test_json_has_one_entry_a_cell() -> None:
    found = json.loads(json.dumps(one(*TWO_BY_TWO).as_dict()))
    assert (found["benchmark"], found["table"]) == ("limit", "hit@1")
    assert {(cell["retriever"], cell["n"]): cell.get("value") for cell in found["cells"]} == {
        ("bm25", 46): 0.5,
        ("bm25", 1000): 0.25,
        ("dense", 46): 0.75,
        ("dense", 1000): None,
    }
    assert found["cells"][0] | {"low": 0.4375, "high": 0.5625, "text": "0.500 [0.438, 0.562]"} == found["cells"][0]


@pytest.mark.parametrize("form", ["md", "csv", "latex"])
@pytest.mark.parametrize("status", ["oom", "timeout", "killed", "error"])
def test_failed_cell_shows_its_status(form: Format, status: str) -> None:
    for table in build([record(), record("dense", status=status)], ["hit@1"], COMMAND):
        assert status in table.render(form)


@pytest.mark.parametrize("status", ["oom", "timeout"])
def test_benchmark_whose_cells_all_failed_has_tables(status: str) -> None:
    tables = build([record(status=status), record(n=1000, status=status)], None, COMMAND)
    assert [table.name for table in tables] == ["hit@1", "latency", "memory"]
    for table in tables:
        assert lines_of(table, "md")[1] == ["bm25", status, status]


def test_ceiling_is_not_claimed_where_nothing_was_scored() -> None:
    assert "best attainable: 0" not in one(record(status="oom")).render("md")


def test_cell_that_was_not_asked_for_is_empty() -> None:
    table = one(record("bm25", 46), record("dense", 1000))
    assert lines_of(table, "md")[1:] == [
        ["bm25", "0.500 [0.438, 0.562]", ""],
        ["dense", "", "0.500 [0.438, 0.562]"],
    ]
    assert lines_of(table, "csv")[1] == ["bm25", "0.5", "0.4375", "0.5625", "", "", ""]
    assert len(table.as_dict()["cells"]) == 2


def test_seeds_are_rows_of_their_own() -> None:
    rows = lines_of(one(record(), record(seed=1, value=0.25), record("dense", seed=1)), "csv")
    assert [row[:2] for row in rows[1:]] == [
        ["bm25 (seed 0)", "0.5"],
        ["bm25 (seed 1)", "0.25"],
        ["dense (seed 1)", "0.5"],
    ]


def test_one_seed_is_not_shown() -> None:
    assert lines_of(one(record(seed=3)), "md")[1][0] == "bm25"


def test_every_benchmark_has_its_tables() -> None:
    tables = build([record(), record(benchmark="nq", n=500), record(n=1000)], ["hit@1", "mrr@10"], COMMAND)
    assert [(table.benchmark, table.name, table.sizes) for table in tables] == [
        (benchmark, name, sizes)
        for benchmark, sizes in (("limit", [46, 1000]), ("nq", [500]))
        for name in ("hit@1", "mrr@10", "latency", "memory")
    ]


def test_tables_without_a_chosen_metric() -> None:
    assert [table.name for table in build([record(k=(1, 2, 5))], None, COMMAND)] == [
        "hit@1",
        "recall@5",
        "ndcg@5",
        "latency",
        "memory",
    ]


def test_tables_of_cells_with_several_cutoffs() -> None:
    tables = build([record(k=(1, 10)), record(n=1000, k=(1, 5)), record("dense", k=(1, 5, 10))], None, COMMAND)
    assert {"latency", "memory"} < {table.name for table in tables}


def test_equal_rows_of_two_runs_are_not_lost() -> None:
    try:
        shown = one(record(value=0.25), record(value=0.75)).render("md")
    except UsageError:
        return
    assert "0.250" in shown
    assert "0.750" in shown


def test_no_records_make_no_tables() -> None:
    assert build([], None, COMMAND) == []


def text_of(tables: list[Table], name: str) -> str:
    return next(" ".join(lines_of(table, "md")[1][1:]) for table in tables if table.name == name)


def test_latency_shows_percentiles_throughput_and_indexing() -> None:
    text = text_of(build([record()], None, COMMAND), "latency")
    assert re.findall(r"[\d.e+]+", text) == ["1", "2", "1.23e+03", "0.5"]


def test_memory_shows_index_and_process() -> None:
    assert text_of(build([record()], None, COMMAND), "memory") == "123 kB, 98.8 MB"


def test_memory_shows_the_gpu_where_one_was_used() -> None:
    used = record()
    used["memory"]["device_peak_bytes"] = 2_500_000_000
    assert text_of(build([used], None, COMMAND), "memory") == "123 kB, 98.8 MB, 2.5 GB"


def test_csv_of_latency_and_memory_holds_every_number() -> None:
    tables = {table.name: lines_of(table, "csv") for table in build([record()], None, COMMAND)}
    times, memory = tables["latency"], tables["memory"]
    kinds = ("query_p50_s", "query_p95_s", "query_p99_s", "queries_per_s", "index_s", "load_s")
    assert times[0] == ["retriever", *(f"46 {kind}" for kind in kinds)]
    assert times[1][:2] == ["bm25", "0.001"]
    assert memory[0][:2] == ["retriever", "46 index_bytes"]
    assert memory[1][:2] == ["bm25", "123456"]


@pytest.mark.parametrize("form", ["md", "csv", "latex"])
def test_every_table_says_n_and_its_command(form: Format) -> None:
    for table in build([record()], None, COMMAND):
        text = table.render(form)
        assert "queries: 920" in text
        assert f"made by: {COMMAND}" in text


@pytest.mark.parametrize("form", ["md", "csv", "latex"])
def test_table_of_a_metric_says_what_it_is(form: Format) -> None:
    text = one(record(ceiling=0.5), metric="recall@1").render(form)
    assert "recall@1: share of a query's relevant documents among the first 1" in text
    assert "best attainable: 0.5" in text
    assert INTERVAL in text
    assert "equal scores rank by document number" in text
    assert "without an answer: 7" in text


def test_tables_without_an_interval_say_so() -> None:
    for table in build([record()], None, COMMAND)[-2:]:
        assert "no interval" in table.render("md")


def test_notes_span_what_differs_between_cells() -> None:
    other = record(n=1000, ceiling=0.5)
    other["queries"] |= {"declared": 1000, "empty": 0}
    text = one(record(), other).render("md")
    assert "queries: 920 to 1,000; without an answer: 0 to 7" in text
    assert "best attainable: 0.5 to 1.0" in text


def test_pipes_are_escaped_in_markdown() -> None:
    table = one(record("a|b"))
    assert r"a\|b" in table.render("md")
    assert [len(row) for row in lines_of(table, "md")] == [2, 2]


def test_latex_specials_are_escaped() -> None:
    assert lines_of(one(record("k_1 & 50% #2 {x} $y")), "latex")[1][0] == r"k\_1 \& 50\% \#2 \{x\} \$y"


def test_latex_notes_are_comments() -> None:
    text = one(record()).render("latex")
    assert all(line.startswith("%") for line in text[: text.index("\\begin{tabular}")].splitlines())
    assert text.rstrip().endswith("\\end{tabular}")


@pytest.mark.parametrize("label", ['say "hi"', "a,b", "a;b", " padded ", "日本", "a|b_c"])
def test_csv_gives_labels_back(label: str) -> None:
    assert lines_of(one(record(label)), "csv")[1][0] == label


def test_csv_label_is_no_comment() -> None:
    assert lines_of(one(record("#1")), "csv")[1][0] == "#1"


@pytest.mark.parametrize("form", ["md", "latex"])
def test_label_of_two_lines_is_one_row(form: Format) -> None:
    lines = one(record("one\ntwo")).render(form).splitlines()
    assert any("one" in line and "two" in line for line in lines)


@pytest.mark.parametrize("form", ["md", "csv", "latex"])
def test_command_of_two_lines_stays_in_its_note(form: Format) -> None:
    lines = one(record(), command="icr-bench run -r 'bm25:label=one\ntwo'").render(form).splitlines()
    assert not any(line.startswith("two") for line in lines)


@pytest.mark.parametrize("form", ["md", "csv", "latex"])
def test_text_ends_with_one_line_feed(form: Format) -> None:
    text = one(record()).render(form)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_metric_may_be_written_in_capitals() -> None:
    assert one(record(), metric="HIT@1").name == "hit@1"


@pytest.mark.parametrize("metric", ["hot@1", "recall", "hit@0"])
def test_unknown_metric_names_the_closest(metric: str) -> None:
    with pytest.raises(UsageError, match=f"unknown metric '{metric}'; did you mean "):
        build([record()], [metric], COMMAND)


def test_metric_that_was_not_computed_lists_those_that_were() -> None:
    with pytest.raises(UsageError) as caught:
        build([record()], ["hit@3"], COMMAND)
    assert str(caught.value).startswith("limit: hit@3 was not computed; there are: hit@1, hit@10")


def test_tables_are_the_same_whatever_the_order_of_sizes() -> None:
    rows: list[Any] = [record(n=n) for n in (46, 250, 1000)]
    assert one(*rows).render("md") == one(*reversed(rows)).render("md")
