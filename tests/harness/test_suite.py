"""Suites: keys as the flags are called, variables, flags over keys, and errors with file and line."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from icr_bench.harness import suite as suites
from icr_bench.harness.errors import UsageError
from icr_bench.harness.prepare import prepare_benchmark
from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import Spec
from icr_bench.harness.suite import Suite, assemble

Write = Callable[[str], str]

BASE = "benchmark: limit\nretriever: bm25\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a suite file and return its path."""

    def to_file(text: str) -> str:
        file = tmp_path / "mine.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return to_file


def refusal(suite: str | None, flags: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        assemble(suite, flags or {})
    return str(caught.value)


def test_every_key_of_a_suite(write: Write, tmp_path: Path) -> None:
    found = assemble(
        write(
            """
            benchmark:
              - limit:likes=20
              - {name: beir, path: /data, label: mine}
            retriever: [bm25, {name: bm25, k1: 2, label: saturated}]
            n: [46, 1k, all]
            k: [1, 5]
            seed: [0, 3]
            queries: 40
            device: cuda:1
            dtype: bfloat16
            timeout: 60
            memory_limit: 2GB
            latency_queries: 10
            plugin: [mine.py]
            """
        ),
        {},
    )
    assert found == Suite(
        name="mine",
        benchmarks=(Spec("limit", {"likes": "20"}), Spec("beir", {"path": "/data"}, "mine")),
        sizes=((46, 1000, "all"), (46, 1000, "all")),
        retrievers=(Spec("bm25"), Spec("bm25", {"k1": 2}, "saturated")),
        cutoffs=(1, 5),
        seeds=(0, 3),
        queries=40,
        device="cuda:1",
        dtype="bfloat16",
        timeout=60.0,
        memory_limit=2_000_000_000,
        latency_queries=10,
        plugins=(tmp_path / "mine.py",),
    )


def test_what_a_suite_leaves_out_has_defaults(write: Write) -> None:
    found = assemble(write(BASE), {})
    assert (found.sizes, found.cutoffs, found.seeds, found.queries) == ((("all",),), (1, 2, 5, 10), (0,), None)
    assert (found.device, found.dtype, found.timeout, found.memory_limit) == ("auto", "auto", None, None)
    assert (found.latency_queries, found.plugins) == (50, ())


@pytest.mark.parametrize("dash", ["-", "_"])
def test_dashes_and_underscores_are_alike(write: Write, dash: str) -> None:
    found = assemble(write(f"{BASE}memory{dash}limit: 5B\nlatency{dash}queries: 7\n"), {})
    assert (found.memory_limit, found.latency_queries) == (5, 7)


def test_plurals_are_understood(write: Write, tmp_path: Path) -> None:
    found = assemble(write("benchmarks: [limit]\nretrievers: [bm25]\nseeds: 0+1\nplugins: [a.py]\n"), {})
    assert found.seeds == (0, 1)
    assert found.plugins == (tmp_path / "a.py",)


@pytest.mark.parametrize("again", ["benchmarks: beir\n", "retrievers: [bm25]\n"])
def test_key_and_its_plural_are_one_key(write: Write, again: str) -> None:
    assert "given twice" in refusal(write(BASE + again))


def test_key_given_twice_is_refused(write: Write) -> None:
    refusal(write(f"{BASE}n: 46\nn: 500\n"))


def test_byte_order_mark_is_no_part_of_a_suite(tmp_path: Path) -> None:
    (tmp_path / "mark.yaml").write_text(BASE, encoding="utf-8-sig")
    assert assemble(str(tmp_path / "mark.yaml"), {}).name == "mark"


def test_plugin_stands_beside_the_suite_file(write: Write, tmp_path: Path) -> None:
    found = assemble(write(f"{BASE}plugin: [sub/one.py, /elsewhere/two.py]\n"), {})
    assert found.plugins == (tmp_path / "sub" / "one.py", Path("/elsewhere/two.py"))


def test_variables_are_expanded_wherever_text_stands(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICR_TEST_DATA", "/data set")
    monkeypatch.setenv("ICR_TEST_N", "46")
    text = """
    benchmark: [{name: beir, path: "${ICR_TEST_DATA}/nq", prompts: {query: "${ICR_TEST_N} ${ICR_TEST_N}"}}]
    retriever: bm25
    n: ["${ICR_TEST_N}", all]
    """
    found = assemble(write(text), {})
    assert found.benchmarks[0].options == {"path": "/data set/nq", "prompts": {"query": "46 46"}}
    assert found.sizes == ((46, "all"),)


def test_only_braces_make_a_variable(write: Write) -> None:
    found = assemble(write("benchmark: {name: beir, path: $HOME/$x}\nretriever: bm25\n"), {})
    assert found.benchmarks[0].options == {"path": "$HOME/$x"}


def test_unset_variable_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ICR_TEST_DATA", raising=False)
    file = write('benchmark: {name: beir, path: "${ICR_TEST_DATA}/nq"}\nretriever: bm25\n')
    message = refusal(file)
    assert message.startswith(file)
    assert "environment variable ICR_TEST_DATA is not set" in message


@pytest.mark.parametrize(
    ("key", "closest"),
    [("retrievr", "retriever"), ("memory-limt", "memory_limit"), ("sed", "seed"), ("'quieries'", "queries")],
)
def test_unknown_key_names_file_line_and_the_closest(write: Write, key: str, closest: str) -> None:
    file = write(f"# a comment\n{BASE}{key}: 5\n")
    message = refusal(file)
    assert message.startswith(f"{file}:4: unknown key ")
    assert f"did you mean {closest}" in message


def test_unknown_key_like_none_lists_them_all(write: Write) -> None:
    message = refusal(write(BASE + "xyzzy: 5\n"))
    assert all(key in message for key in suites.KEYS)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("benchmark: [limit\nretriever: bm25\n", 2),
        ("benchmark: limit\n\tretriever: bm25\n", 2),
        ("benchmark: 'limit\n", 2),
        ("benchmark: limit\nretriever: *nothing\n", 2),
        ("benchmark: limit\n---\nretriever: bm25\n", 2),
        ("benchmark: limit\nretriever: bm25: x\n", 2),
        ("benchmark: limit\n? [a]\n: b\n", 2),
    ],
)
def test_malformed_yaml_names_file_and_line(write: Write, text: str, line: int) -> None:
    file = write(text)
    assert refusal(file).startswith(f"{file}:{line}: not YAML: ")


def test_control_character_is_no_yaml(write: Write) -> None:
    file = write(BASE + "n: \x01\n")
    assert refusal(file).startswith(f"{file}: not YAML: ")


@pytest.mark.parametrize("value", ["2024-99-99", "!!int x", "!!float x"])
def test_value_that_its_type_cannot_hold_is_refused(write: Write, value: str) -> None:
    assert "not YAML" in refusal(write(f"{BASE}n: {value}\n"))


def test_alias_within_itself_is_refused(write: Write) -> None:
    refusal(write("benchmark: &a [*a]\nretriever: bm25\n"))


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['exit 1']",
        "!!python/object/new:pathlib.Path [x]",
        "!!python/name:os.system",
        "!!python/tuple [1, 2]",
        "!mine x",
    ],
)
def test_tags_that_make_objects_are_refused(write: Write, value: str) -> None:
    file = write(f"{BASE}n: {value}\n")
    message = refusal(file)
    assert message.startswith(f"{file}:3: not YAML: ")
    assert "tag" in message


@pytest.mark.parametrize(("text", "got"), [("", "NoneType"), ("- limit\n", "list"), ("limit\n", "str"), ("5", "int")])
def test_suite_that_is_no_mapping_is_refused(write: Write, text: str, got: str) -> None:
    file = write(text)
    message = refusal(file)
    assert message.startswith(f"{file}: a suite is a mapping of benchmark, retriever")
    assert message.endswith(f"got {got}")


@pytest.mark.parametrize("name", ["none.yaml", "none.yml", "sub/none"])
def test_suite_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    assert refusal(str(tmp_path / name)).startswith(f"{tmp_path / name}: the suite file cannot be read: ")


def test_suite_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"# caf\xe9\n" + BASE.encode())
    assert refusal(str(file)).startswith(f"{file}: the suite file cannot be read: ")


def test_unknown_suite_names_the_closest() -> None:
    assert refusal("quik") == "unknown suite 'quik'; did you mean quick?"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("retriever: bm25\n", "benchmark"),
        ("benchmark: limit\n", "retriever"),
        ("benchmark: []\nretriever: bm25\n", "benchmark"),
        ("benchmark: limit\nretriever:\n", "retriever"),
    ],
)
def test_suite_without_benchmark_or_retriever_is_refused(write: Write, text: str, kind: str) -> None:
    file = write(text)
    assert refusal(file) == f"{file}: no {kind} is named"


def test_entry_that_is_no_spec_names_file_and_kind(write: Write) -> None:
    file = write("benchmark: [limit, 5]\nretriever: bm25\n")
    assert refusal(file).startswith(f"{file}: benchmark: ")


def test_flags_win(write: Write) -> None:
    file = write(f"{BASE}n: 46\nk: 1\nseed: 5\nqueries: 10\ndevice: cuda\ntimeout: 1\n")
    flags = {"n": "500,1k", "k": "2,3", "seed": "0", "queries": "20", "device": "cpu", "timeout": "9", "dtype": None}
    found = assemble(file, flags)
    assert (found.sizes, found.cutoffs, found.seeds, found.queries) == (((500, 1000),), (2, 3), (0,), 20)
    assert (found.device, found.timeout, found.dtype) == ("cpu", 9.0, "auto")


def test_flags_replace_benchmarks_and_retrievers(write: Write) -> None:
    found = assemble(write(BASE), {"benchmark": ["beir:path=x"], "retriever": ["dense:model=m"]})
    assert found.name == "mine"
    assert found.benchmarks == (Spec("beir", {"path": "x"}),)
    assert found.retrievers == (Spec("dense", {"model": "m"}),)


def test_benchmark_may_have_sizes_of_its_own(write: Write) -> None:
    file = write("benchmark: [{name: limit, n: [46, 1k]}, 'beir:n=5+all,path=x']\nretriever: bm25\nn: 7\n")
    found = assemble(file, {})
    assert found.sizes == ((46, 1000), (5, "all"))
    assert [spec.options for spec in found.benchmarks] == [{}, {"path": "x"}]
    assert assemble(file, {"n": "9"}).sizes == ((9,), (9,))


def test_benchmark_may_have_queries_of_its_own(write: Write) -> None:
    file = write("benchmark: [{name: limit, queries: 30}, beir]\nretriever: bm25\nqueries: 10\n")
    assert [spec.options for spec in assemble(file, {}).benchmarks] == [{"queries": 30}, {}]
    by_flag = assemble(file, {"queries": "5"})
    assert ([spec.options for spec in by_flag.benchmarks], by_flag.queries) == ([{}, {}], 5)


@pytest.mark.parametrize(("kind", "other"), [("benchmark", "retriever: bm25"), ("retriever", "benchmark: limit")])
def test_rows_of_one_name_need_a_label(write: Write, kind: str, other: str) -> None:
    name = "limit" if kind == "benchmark" else "bm25"
    file = write(f"{kind}: [{name}, {{name: {name}, seed: 1}}]\n{other}\n")
    assert refusal(file) == f"{file}: two {kind}s are called {name!r}; tell them apart with label="
    assemble(write(f"{kind}: [{name}, {{name: {name}, label: other}}]\n{other}\n"), {})


def test_label_of_one_may_not_be_the_name_of_another(write: Write) -> None:
    assert "two retrievers are called 'bm25'" in refusal(
        write("benchmark: limit\nretriever: [bm25, 'dense:model=x,label=bm25']\n")
    )


def test_benchmarks_by_flag_make_a_custom_run() -> None:
    found = assemble(None, {"benchmark": ["beir:path=x"]})
    assert (found.name, found.sizes, found.retrievers) == ("custom", (("all",),), (Spec("bm25"),))
    assert (found.queries, found.latency_queries) == (None, Suite.latency_queries)  # not the default suite's


def test_other_flags_change_the_default_suite() -> None:
    found = assemble(None, {"retriever": ["dense:model=m"], "n": "46"})
    assert (found.name, found.sizes) == ("default", ((46,),))
    assert found.benchmarks == assemble(None, {}).benchmarks


BAD = [
    *(("k", value, "-k") for value in ("1000000000", "0", "-1", "x", "1.5", "", "1,,2", "1k")),
    *(("seed", value, "--seed") for value in ("-1", "x", "0.5", "")),
    *(("queries", value, "--queries") for value in ("0", "-5", "x", "1.5", "", "5,6", "all")),
    *(("latency_queries", value, "--latency-queries") for value in ("0", "x", "1,2")),
    *(("device", value, "--device") for value in ("gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "", "cpu:0")),
    *(("dtype", value, "--dtype") for value in ("float64", "bf16", "", "Auto")),
    *(("timeout", value, "--timeout") for value in ("0", "-1", "x", "", "nan", "inf", "5s")),
    *(("memory_limit", value, "memory-limit") for value in ("0", "-1", "x", "", "8XB", "GB")),
]


@pytest.mark.parametrize(("key", "value", "flag"), BAD)
def test_bad_value_is_named_with_its_flag(key: str, value: str, flag: str) -> None:
    message = refusal(None, {key: value})
    assert flag in message
    assert repr("" if ",," in value else value) in message


@pytest.mark.parametrize(("key", "value", "flag"), BAD)
def test_bad_value_in_a_file_is_refused_too(write: Write, key: str, value: str, flag: str) -> None:
    assert flag in refusal(write(f'{BASE}{key}: "{value}"\n'))


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", ""])
def test_bad_size_is_named(value: str) -> None:
    assert repr(value) in refusal(None, {"n": value})


@pytest.mark.parametrize("key", ["k", "seed", "queries", "device", "dtype", "memory_limit", "latency_queries", "n"])
def test_true_is_no_value(write: Write, key: str) -> None:
    assert "true" in refusal(write(f"{BASE}{key}: true\n")).lower()


def test_true_is_no_timeout(write: Write) -> None:
    assert "--timeout" in refusal(write(f"{BASE}timeout: true\n"))


@pytest.mark.parametrize("key", ["n", "seed"])
def test_empty_list_is_refused(write: Write, key: str) -> None:
    refusal(write(f"{BASE}{key}: []\n"))


def test_plugin_without_a_value_is_none(write: Write) -> None:
    assert assemble(write(f"{BASE}plugin:\n"), {}).plugins == ()


def test_suites_that_are_shipped() -> None:
    assert suites.names() == ["default", "paper", "quick"]


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ICR_BENCH_DATA", "/data")
    return "/data"


@pytest.mark.parametrize("name", ["default", "paper", "quick"])
@pytest.mark.usefixtures("data")
def test_shipped_suite_names_only_what_there_is(name: str) -> None:
    found = assemble(name, {})
    known = Registry()
    assert found.name == name
    for spec in found.benchmarks:
        prepare_benchmark(known, spec, found.queries)
    for spec in found.retrievers:
        known.resolve("retriever", spec)


def test_quick_is_short_limit_with_bm25_alone() -> None:
    found = assemble("quick", {})
    assert [(spec.name, spec.options) for spec in found.benchmarks] == [("limit", {"likes": 20})]
    assert found.sizes == ((46, 250, 1000),)
    assert found.retrievers == (Spec("bm25"),)


def test_default_shows_in_context_retrieval_by_bare_names() -> None:
    found = assemble("default", {})
    assert [(spec.name, spec.options) for spec in found.benchmarks] == [("limit", {"likes": 20})]
    assert (found.sizes, found.queries, found.latency_queries) == (((46, 250, 1000, 5000),), 200, 20)
    names = ["bm25", "dense-tiny", "blocksearch", "blocksearch-position", "blocksearch-ssmax-routing"]
    assert [(spec.name, spec.row) for spec in found.retrievers] == list(zip(names, names, strict=True))
    assert not any("model" in spec.options for spec in found.retrievers)


GRID = {500, 1000, 2500, 5000, 10_000}


def test_paper_has_the_grid_of_the_papers(data: str) -> None:
    found = assemble("paper", {})
    rows = dict(zip((spec.row for spec in found.benchmarks), found.sizes, strict=True))
    assert set(rows["msmarco"]) == GRID
    assert set(rows["hotpotqa"]) | set(rows["hotpotqa-200"]) == GRID
    assert set(rows["nq"]) == (GRID - {10_000}) | {"all"}  # the paper's corpus ends before 10,000
    assert set(rows["limit"]) == GRID | {46}
    assert all(spec.options["path"] == f"{data}/{spec.name}" for spec in found.benchmarks if spec.name != "limit")


@pytest.mark.usefixtures("data")
def test_paper_has_the_queries_of_the_papers() -> None:
    queries = {spec.row: spec.options["queries"] for spec in assemble("paper", {}).benchmarks}
    assert queries == {"msmarco": 400, "hotpotqa": 400, "hotpotqa-200": 200, "nq": 400, "limit": 1000}


def test_paper_needs_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ICR_BENCH_DATA", raising=False)
    assert "ICR_BENCH_DATA is not set" in refusal("paper")
