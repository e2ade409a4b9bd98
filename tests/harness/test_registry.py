"""Names and options: the tables, entry points, plug-in files, and option values as the annotations name them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from icr_bench.benchmarks import BENCHMARKS
from icr_bench.harness import registry as module
from icr_bench.harness.errors import UsageError
from icr_bench.harness.prepare import prepare_retriever
from icr_bench.harness.registry import Kind, Registry, convert
from icr_bench.harness.spec import Spec, parse_spec
from icr_bench.harness.suite import assemble
from icr_bench.retrievers import RETRIEVERS
from icr_bench.retrievers.bm25 import BM25

Write = Callable[[str], Path]


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.fixture
def plugin(tmp_path: Path) -> Write:
    def write(source: str) -> Path:
        file = tmp_path / "plugin.py"
        file.write_text(source, encoding="utf-8")
        return file

    return write


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("5", int, 5),
        ("-5", int, -5),
        (5, int, 5),
        ("0.5", float, 0.5),
        ("1e-3", float, 0.001),
        (2, float, 2.0),
        ("true", bool, True),
        ("YES", bool, True),
        ("1", bool, True),
        (1, bool, True),
        ("false", bool, False),
        ("no", bool, False),
        ("0", bool, False),
        (False, bool, False),
        ("x", str, "x"),
        ("", str, ""),
        ("3+4", str, "3+4"),
        (5, str, "5"),
        (0.5, str, "0.5"),
        ("a/b", Path, Path("a/b")),
        (Path("a"), Path, Path("a")),
        ("a", Literal["a", "b"], "a"),
        ("2", Literal[1, 2], 2),
        (2, Literal["1", "2"], "2"),
        ("5", int | None, 5),
        ("none", int | None, None),
        ("None", Optional[int], None),  # noqa: UP045 - plug-ins may write it so
        (None, int | None, None),
        ("a", Literal["a"] | None, "a"),
        ("none", str | None, None),
        ("5", int | str, 5),
        ("x", int | str, "x"),
        ("3+4", list[int], [3, 4]),
        ("3", list[int], [3]),
        (3, list[int], [3]),
        ([3, "4"], list[int], [3, 4]),
        ("a+b", list, ["a", "b"]),
        ("0.5+1", tuple[float, ...], (0.5, 1.0)),
        ("1+2+1", set[int], {1, 2}),
        ("3+4", list[int] | None, [3, 4]),
        ("none", list[int] | None, None),
        ({"a": 1}, dict, {"a": 1}),
        ("x", Any, "x"),
        ([1], Any, [1]),
    ],
)
def test_value_becomes_the_annotated_type(value: Any, annotation: Any, expected: Any) -> None:
    found = convert(value, annotation)
    assert found == expected
    assert type(found) is type(expected)


def test_path_below_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert convert("~/models", Path) == tmp_path / "models"


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("x", int, "a whole number"),
        ("", int, "a whole number"),
        ("1.0", int, "a whole number"),
        (1.5, int, "a whole number"),
        ([1], int, "a whole number"),
        (None, int, "a whole number"),
        ("x", float, "a number"),
        (None, float, "a number"),
        ("maybe", bool, "true or false"),
        (2, bool, "true or false"),
        (True, str, "text"),
        (None, str, "str"),
        (["a"], str, "str"),
        ("", Path, "Path"),
        (5, Path, "Path"),
        ("c", Literal["a", "b"], "one of a, b"),
        ("x", int | None, "a whole number"),
        ("x", int | float, "a number"),
        ("3+x", list[int], "a whole number"),
        ("x", dict, "dict"),
    ],
)
def test_wrong_value_says_what_was_got_and_expected(value: Any, annotation: Any, expected: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        convert(value, annotation)
    assert expected in str(caught.value)
    assert repr(value if value != "3+x" else "x") in str(caught.value)


def test_true_is_no_whole_number() -> None:
    with pytest.raises(ValueError, match="a whole number"):
        convert(True, int)


def test_home_of_an_unknown_user_is_a_wrong_value() -> None:
    with pytest.raises(ValueError, match="no-such-user"):
        convert("~no-such-user/models", Path)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ({"a": 1}, dict[str, int], {"a": 1}),
        ({"a": 1}, Mapping[str, int], {"a": 1}),
        ("3+4", Sequence[int], [3, 4]),
    ],
)
def test_richer_annotations_take_their_values(value: Any, annotation: Any, expected: Any) -> None:
    found = convert(value, annotation)
    assert (dict(found) if isinstance(found, Mapping) else list(found)) == expected


def test_built_in_names() -> None:
    known = Registry()
    assert known.names("retriever") == sorted(RETRIEVERS)
    assert known.names("benchmark") == sorted(BENCHMARKS)
    assert known.get("retriever", "bm25") is BM25


@pytest.mark.parametrize(
    ("kind", "name", "closest"),
    [
        ("retriever", "bm52", "bm25"),
        ("retriever", "BM25", "bm25"),
        ("retriever", "dens", "dense"),
        ("benchmark", "limits", "limit"),
        ("benchmark", "hotpot", "hotpotqa"),
    ],
)
def test_unknown_name_names_the_closest(kind: Kind, name: str, closest: str) -> None:
    message = refusal(Registry().get, kind, name)
    assert f"unknown {kind} {name!r}" in message
    assert f"did you mean {closest}" in message


def test_name_like_none_lists_them_all() -> None:
    message = refusal(Registry().get, "retriever", "zzzzzz")
    assert message.endswith(f"there are: {', '.join(Registry().names('retriever'))}")


@pytest.mark.parametrize(
    ("kind", "spec", "closest"),
    [
        ("retriever", "bm25:k2=1", "k1"),
        ("retriever", "bm25:stopword=none", "stopwords"),
        ("benchmark", "limit:like=20", "likes"),
        ("benchmark", "beir:paths=x", "path"),
    ],
)
def test_unknown_option_names_the_closest(kind: Kind, spec: str, closest: str) -> None:
    message = refusal(Registry().resolve, kind, parse_spec(spec))
    assert f"unknown option of {kind} {spec.partition(':')[0]}" in message
    assert f"did you mean {closest}" in message


def test_options_are_resolved_with_defaults() -> None:
    options = Registry().resolve("retriever", parse_spec("bm25:k1=2,lowercase=no,backend=rank-bm25"))
    assert (options["k1"], options["lowercase"], options["backend"]) == (2.0, False, "rank-bm25")
    assert (options["b"], options["stemmer"]) == (0.4, "none")


def test_missing_required_option_is_named() -> None:
    assert "benchmark beir needs path=" in refusal(Registry().resolve, "benchmark", Spec("beir"))


def test_wrong_option_names_retriever_option_and_value() -> None:
    message = refusal(Registry().resolve, "retriever", parse_spec("bm25:k1=much"))
    assert message == "retriever bm25: k1: expected a number, got 'much'"


def test_what_the_run_fills_is_no_option() -> None:
    known = Registry()
    assert "seed" not in known.options("benchmark", "limit")
    assert known.filled("benchmark", "limit") == {"seed"}
    assert "unknown option" in refusal(known.resolve, "benchmark", parse_spec("limit:seed=1"))


def test_build_fills_only_what_is_taken() -> None:
    built = Registry().build("retriever", parse_spec("bm25:b=1"), {"device": "cpu", "dtype": "auto", "seed": 0})
    assert isinstance(built, BM25)


GOOD = """
from __future__ import annotations

from dataclasses import dataclass

from icr_bench.retrievers.base import Ranking, Retriever


@dataclass
class State:
    count: int = 0


class First(Retriever):
    def __init__(self, *, step: int = 1, names: list[str] | None = None) -> None:
        self.state, self.step, self.names = State(), step, names

    def index(self, documents):
        self.state.count = len(documents)

    def search(self, queries, k):
        return [Ranking([0], [1.0]) for _ in queries]

    def index_bytes(self):
        return 1


RETRIEVERS = {"first": First}
"""


def test_plugin_adds_a_retriever(plugin: Write) -> None:
    known = Registry([plugin(GOOD)])
    assert "first" in known.names("retriever")
    made = known.build("retriever", parse_spec("first:step=3,names=a+b"), {})
    assert (made.step, made.names) == (3, ["a", "b"])
    assert known.sources("retriever", "first") == [plugin(GOOD)]


def test_plugin_adds_a_benchmark(plugin: Write) -> None:
    known = Registry([plugin("def mine(*, size: int = 5):\n    return size\nBENCHMARKS = {'mine': mine}")])
    assert known.build("benchmark", parse_spec("mine:size=7"), {}) == 7


def test_plugin_path_may_hold_spaces(tmp_path: Path) -> None:
    (tmp_path / "my plug-ins").mkdir()
    file = tmp_path / "my plug-ins" / "the first.py"
    file.write_text(GOOD)
    assert "first" in Registry([str(file)]).names("retriever")


def test_plugin_path_may_be_relative(plugin: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plugin(GOOD).parent)
    assert Registry(["plugin.py"]).plugins == (plugin(GOOD),)


def test_two_plugins_of_one_file_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plugin.py").write_text(f"RETRIEVERS = {{{name!r}: lambda: {name!r}}}")
    known = Registry([tmp_path / "one" / "plugin.py", tmp_path / "two" / "plugin.py"])
    assert [known.get("retriever", name)() for name in ("one", "two")] == ["one", "two"]


def test_missing_plugin_is_named(tmp_path: Path) -> None:
    assert refusal(Registry, [tmp_path / "none.py"]) == f"--plugin {tmp_path / 'none.py'}: no such file"


def test_plugin_that_is_not_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plugin.txt").write_text("RETRIEVERS = {}")
    assert "not a Python file" in refusal(Registry, [tmp_path / "plugin.txt"])


@pytest.mark.parametrize(
    ("source", "line", "error"),
    [
        ("x = 1\ny = (\n", 2, "SyntaxError"),
        ("x = 1\n\nraise KeyError('of mine')\n", 3, "KeyError: 'of mine'"),
        ("x = 1\nimport no_such_module_anywhere\n", 2, "ModuleNotFoundError"),
        ("def f():\n    return 1 / 0\n\nx = f()\n", 2, "ZeroDivisionError"),
        ("import json\njson.loads('{')\n", 2, "JSONDecodeError"),
        ("assert False, 'not today'", 1, "AssertionError: not today"),
    ],
)
def test_plugin_that_fails_to_import_names_the_line(plugin: Write, source: str, line: int, error: str) -> None:
    message = refusal(Registry, [plugin(source)])
    assert message.startswith(f"--plugin {plugin(source)}:{line}: fails to import: ")
    assert error in message


def test_syntax_error_elsewhere_names_the_line_that_led_there(plugin: Write) -> None:
    file = plugin("x = 1\nexec(compile('\\n\\n\\n\\ny = (', 'other.py', 'exec'))\n")
    assert refusal(Registry, [file]).startswith(f"--plugin {file}:2: ")


def test_plugin_that_exits_at_import_is_refused(plugin: Write) -> None:
    assert "fails to import" in refusal(Registry, [plugin("import sys\nsys.exit(0)\n")])


@pytest.mark.parametrize("source", ["", "x = 1", "RETRIEVERS = None", "retrievers = {}"])
def test_plugin_without_tables_is_refused(plugin: Write, source: str) -> None:
    assert "neither RETRIEVERS nor BENCHMARKS" in refusal(Registry, [plugin(source)])


@pytest.mark.parametrize(
    ("source", "got"),
    [
        ("RETRIEVERS = ['a']", "RETRIEVERS must be a dict, got list"),
        ("BENCHMARKS = 'a'", "BENCHMARKS must be a dict, got str"),
        ("RETRIEVERS = {}\nBENCHMARKS = {1}", "BENCHMARKS must be a dict, got set"),
    ],
)
def test_table_that_is_no_dict_is_refused(plugin: Write, source: str, got: str) -> None:
    assert got in refusal(Registry, [plugin(source)])


@pytest.mark.parametrize("table", ["[]", "0", "''"])
def test_empty_table_that_is_no_dict_is_refused(plugin: Write, table: str) -> None:
    assert "must be a dict" in refusal(Registry, [plugin(f"RETRIEVERS = {table}")])


def test_name_that_is_no_text_is_refused(plugin: Write) -> None:
    assert "5" in refusal(Registry, [plugin("RETRIEVERS = {5: int}")])


@pytest.mark.parametrize(
    ("source", "kind", "name"),
    [("RETRIEVERS = {'bm25': int}", "retriever", "bm25"), ("BENCHMARKS = {'limit': int}", "benchmark", "limit")],
)
def test_name_that_exists_already_is_refused(plugin: Write, source: str, kind: str, name: str) -> None:
    message = refusal(Registry, [plugin(source)])
    assert f"a {kind} called {name!r} exists already" in message
    assert str(plugin(source)) in message


def test_two_plugins_with_one_name_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for file in files:
        file.write_text("RETRIEVERS = {'same': int}")
    message = refusal(Registry, files)
    assert "exists already" in message
    assert str(files[1]) in message


def test_target_that_is_no_class_or_function_is_refused(plugin: Write) -> None:
    assert "retriever 'x' is 5" in refusal(Registry([plugin("RETRIEVERS = {'x': 5}")]).get, "retriever", "x")


def test_class_without_its_own_init_has_no_options(plugin: Write) -> None:
    known = Registry([plugin("class Bare: pass\nRETRIEVERS = {'bare': Bare}")])
    assert known.options("retriever", "bare") == {}


@pytest.mark.parametrize("arguments", ["**options", "*options", "a, /"])
def test_options_without_names_are_refused(plugin: Write, arguments: str) -> None:
    known = Registry([plugin(f"def make({arguments}): pass\nRETRIEVERS = {{'x': make}}")])
    assert "options must be named arguments" in refusal(known.options, "retriever", "x")


@pytest.mark.parametrize("target", ["no_such_module:Class", "json:NoSuchClass"])
def test_target_that_cannot_be_imported_is_refused(plugin: Write, target: str) -> None:
    known = Registry([plugin(f"RETRIEVERS = {{'x': {target!r}}}")])
    assert "'x'" in refusal(known.get, "retriever", "x")


@pytest.mark.parametrize(
    "target",
    [
        "def x(*, a: 'NoSuchType' = 1): pass",
        "from functools import partial\nx = partial(int)",
        "class X:\n    def __call__(self): pass\n\nx = X()",
        "x = dict",
    ],
)
def test_options_are_read_or_refused(plugin: Write, target: str) -> None:
    known = Registry([plugin(f"{target}\nRETRIEVERS = {{'x': x}}")])
    with suppress(UsageError):
        known.options("retriever", "x")


ABSTRACT = GOOD.replace("def search", "def look_up")


def test_retriever_that_lacks_a_method_is_refused(plugin: Write) -> None:
    known = Registry([plugin(ABSTRACT)])
    message = refusal(prepare_retriever, known, Spec("first"), assemble(None, {}))
    assert message.startswith("retriever first: ")
    assert "search" in message


def test_retriever_that_refuses_an_option_is_a_usage_error(plugin: Write) -> None:
    message = refusal(prepare_retriever, Registry(), parse_spec("bm25:k1=-1"), assemble(None, {}))
    assert message == "retriever bm25: k1 must be 0 or more, got -1.0"


@pytest.mark.parametrize(
    "error",
    [
        "ValueError('of mine')",
        "RuntimeError('of mine')",
        "KeyError('of mine')",
        "AssertionError('of mine')",
        "ImportError('of mine')",
        "NameError('of mine')",
    ],
)
def test_retriever_that_fails_when_made_ends_no_run(plugin: Write, error: str) -> None:
    known = Registry([plugin(GOOD.replace("self.state,", f"raise {error}\n        self.state,"))])
    with suppress(UsageError):  # or its cell tells
        prepare_retriever(known, Spec("first"), assemble(None, {}))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str, str], None]:
    """Make another distribution's entry point known."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(module, "entry_points", lambda group: [point for point in points if point.group == group])
    monkeypatch.syspath_prepend(tmp_path)

    def install(kind: str, name: str, source: str) -> None:
        (tmp_path / f"other_{name}.py").write_text(source)
        points.append(EntryPoint(name, f"other_{name}:Target", f"icr_bench.{kind}s"))

    return install


Install = Callable[[str, str, str], None]


def test_entry_point_adds_a_name(installed: Install) -> None:
    installed("retriever", "elsewhere", GOOD + "\nTarget = First\n")
    known = Registry()
    assert "elsewhere" in known.names("retriever")
    assert "elsewhere" not in known.names("benchmark")
    assert known.build("retriever", parse_spec("elsewhere:step=2"), {}).step == 2


def test_entry_point_is_imported_only_when_chosen(installed: Install) -> None:
    installed("benchmark", "lazy", "def Target(): return 1")
    known = Registry()
    assert "other_lazy" not in sys.modules
    assert known.build("benchmark", Spec("lazy"), {}) == 1


@pytest.mark.parametrize(
    ("name", "source", "error"),
    [
        ("raising", "raise OSError('of mine')", "OSError: of mine"),
        ("broken", "x = (", "SyntaxError"),
        ("hollow", "x = 1", "AttributeError"),
        ("lacking", "import no_such_module_anywhere", "ModuleNotFoundError"),
    ],
)
def test_entry_point_that_fails_to_import_is_named(installed: Install, name: str, source: str, error: str) -> None:
    installed("retriever", name, source)
    message = refusal(Registry().get, "retriever", name)
    assert f"retriever {name!r} fails to import: " in message
    assert error in message


def test_broken_entry_point_harms_nobody_else(installed: Install) -> None:
    installed("retriever", "unwanted", "raise OSError('of mine')")
    assert Registry().get("retriever", "bm25") is BM25


def test_entry_point_of_a_taken_name_is_refused_when_chosen(installed: Install) -> None:
    installed("retriever", "bm25", "Target = int")
    known = Registry()
    assert known.get("retriever", "dense")
    message = refusal(known.get, "retriever", "bm25")
    assert "two retrievers are called 'bm25'" in message
    assert "other_bm25:Target" in message
