"""The small languages of the command line: specs, corpus sizes, numbers, byte counts."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from icr_bench.harness.errors import UsageError
from icr_bench.harness.export import file_name, safe_name
from icr_bench.harness.spec import Spec, parse_bytes, parse_numbers, parse_share, parse_sizes, parse_spec, spec_of


def refusal(function: Callable[..., Any], *arguments: object) -> str:
    with pytest.raises(UsageError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("x", {}),
        ("x:", {}),
        ("x:a=1", {"a": "1"}),
        ("x:a=1,b=two", {"a": "1", "b": "two"}),
        ("x:heads=3+4", {"heads": "3+4"}),
        ("x:a='1,2',b=\"3,4\"", {"a": "1,2", "b": "3,4"}),
        ("x:a='say \"hi\"'", {"a": 'say "hi"'}),
        ("x:a=' padded '", {"a": " padded "}),
        ("x:a=''", {"a": ""}),
        ("x:a=", {"a": ""}),
        ("x:a=,b=", {"a": "", "b": ""}),
        ("x:a=it's", {"a": "it's"}),
        ("x:path=C:/one:two", {"path": "C:/one:two"}),
        ("x:url=http://host:80/?q=1&r=2", {"url": "http://host:80/?q=1&r=2"}),
        ("x:pattern=a=b", {"pattern": "a=b"}),
        (r"x:pattern='[\w,]+'", {"pattern": r"[\w,]+"}),
        ("x:max-tokens=5", {"max_tokens": "5"}),
        (" x : a = 1 , b = 2 ", {"a": "1", "b": "2"}),
        ("x:a=日本", {"a": "日本"}),
    ],
)
def test_spec_is_a_name_and_options(text: str, options: dict[str, str]) -> None:
    assert parse_spec(text) == Spec("x", options)


@pytest.mark.parametrize(
    ("text", "row"),
    [("x", "x"), ("x:a=1", "x"), ("x:label=y", "y"), ("x:a=1,label='y, z'", "y, z"), ("x:label=", "x")],
)
def test_label_renames_the_row(text: str, row: str) -> None:
    spec = parse_spec(text)
    assert spec.row == row
    assert "label" not in spec.options


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("x:a", "'a'"),
        ("x:a=1,b", "'b'"),
        ("x:a=1,,b=2", "',b=2'"),
        ("x:=1", "'=1'"),
        ("x:,", "','"),
        ("x:a='1,2", "'2'"),
    ],
)
def test_missing_equals_sign_says_where(text: str, rest: str) -> None:
    message = refusal(parse_spec, text)
    assert text in message
    assert "key=value" in message
    assert message.endswith(rest)


@pytest.mark.parametrize("text", ["x:a=1,a=2", "x:max-k=1,max_k=1", "x:label=a,label=b"])
def test_key_given_twice_is_refused(text: str) -> None:
    assert "given twice" in refusal(parse_spec, text)


@pytest.mark.parametrize("text", ["", " ", ":", ":a=1"])
def test_missing_name_is_refused(text: str) -> None:
    assert "name is missing" in refusal(parse_spec, text)


def test_suite_gives_a_spec_as_text_or_mapping() -> None:
    assert spec_of("x:a=1,label=y", "suite") == Spec("x", {"a": "1"}, "y")
    assert spec_of({"name": "x", "a": 1, "label": "y"}, "suite") == Spec("x", {"a": 1}, "y")


def test_mapping_holds_what_text_cannot() -> None:
    spec = spec_of({"name": "x", "prompts": {"query": "Q: "}, "layer-ids": [1, 2], "on": True}, "suite")
    assert spec.options == {"prompts": {"query": "Q: "}, "layer_ids": [1, 2], "on": True}


@pytest.mark.parametrize("value", [5, None, [], ["x"], {}, {"likes": 20}, {"name": 5}])
def test_suite_entry_without_a_name_is_refused(value: object) -> None:
    message = refusal(spec_of, value, "my.yaml: retriever")
    assert message.startswith("my.yaml: retriever: ")
    assert repr(value) in message


def test_mapping_with_a_key_twice_is_refused() -> None:
    assert "max_k is given twice" in refusal(spec_of, {"name": "x", "max-k": 1, "max_k": 2}, "my.yaml")


def test_label_that_is_no_text_is_refused() -> None:
    assert "label must be text of at most 60 characters, got 5" in refusal(
        spec_of, {"name": "x", "label": 5}, "my.yaml"
    )


@pytest.mark.parametrize("label", ["a\nb", "\x1b[31mred", "a\x00", "\x9b", "half \ud83d", "a\u2028b"])
def test_a_name_that_cannot_be_shown_or_written_is_refused(label: str) -> None:
    for given in ({"name": "x", "label": label}, {"name": label}):
        message = refusal(spec_of, given, "my.yaml")
        assert "which can be neither shown nor written; leave it out" in message
        assert message.encode()


@pytest.mark.parametrize("letter", ["a", "-", "é", "字", "𝐀", " ", "%", "🙂"])
def test_any_two_labels_fit_into_a_file_name(letter: str) -> None:
    fitting = []
    for count in range(1, 62):
        with suppress(UsageError):
            fitting.append(parse_spec(f"x:label='x{letter * count}x'").row)
    row = {"benchmark": fitting[-1], "retriever": fitting[-1], "n": 10**12 - 1, "seed": 10**18 - 1}
    longest = [f"qrels.{file_name(row)}.trec", f"{safe_name(row['benchmark'])}-{safe_name(row['retriever'])}"]
    longest[1] += f"-seed{row['seed']}-shortlists.md"
    assert all(len(f"{name}.4194304.partial".encode()) <= 255 for name in longest)
    assert len(fitting) >= 7
    if letter not in "a-":
        assert "bytes in a file name" in refusal(parse_spec, f"x:label='x{letter * 58}x'")


def test_a_long_name_needs_a_label() -> None:
    assert "give a shorter label=" in refusal(parse_spec, "x" * 91)
    assert parse_spec("x" * 91 + ":label=short").row == "short"


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        ("46,500,1k,2.5k,all", (46, 500, 1000, 2500, "all")),
        ("46+500+1k", (46, 500, 1000)),
        ([46, "1k", "all"], (46, 1000, "all")),
        (46, (46,)),
        ("all", ("all",)),
        (" 1 , 2 ", (1, 2)),
        ("1K,ALL", (1000, "all")),
        ("0.5k", (500,)),
        ("1.25m", (1_250_000,)),
        ("1000,1k,1000", (1000,)),
        (1000.0, (1000,)),
        ("5,1", (5, 1)),
    ],
)
def test_sizes(value: object, sizes: tuple[int | str, ...]) -> None:
    assert parse_sizes(value) == sizes


@pytest.mark.parametrize(
    "value", ["0", "-1", "1.5", "x", "", "46,", "1e3", "0.0001k", "1kk", "1 000", "1_000", "nan", "alles", None, True]
)
def test_sizes_that_are_none_are_refused(value: object) -> None:
    message = refusal(parse_sizes, value)
    assert "is no corpus size" in message
    assert repr(str(value).lower().rpartition(",")[2]) in message


@pytest.mark.parametrize("value", [[], [46, 0], [1.5], [[46]], {"n": 46}])
def test_lists_that_hold_no_size_are_refused(value: object) -> None:
    refusal(parse_sizes, value)


def test_every_decimal_of_a_thousand_is_a_size() -> None:
    for n in range(1, 3000):
        assert parse_sizes(f"{n / 1000:.3f}k") == (n,)


@pytest.mark.parametrize(
    ("value", "numbers"),
    [("1,2,5", (1, 2, 5)), ("1+2", (1, 2)), ([3, "4"], (3, 4)), (7, (7,)), ("2,2", (2,)), ("0", (0,))],
)
def test_numbers(value: object, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(value, "--seed", 0) == numbers


@pytest.mark.parametrize("value", ["-1", "x", "", "1.0", "1,,2", "1k", None, True, 1.5, ["y"]])
def test_numbers_that_are_none_name_value_and_flag(value: object) -> None:
    message = refusal(parse_numbers, value, "--seed", 0)
    assert message.startswith("--seed: ")
    assert "is not a whole number of at least 0" in message


def test_number_below_the_lowest_is_refused() -> None:
    assert refusal(parse_numbers, "1,0", "-k", 1) == "-k: '0' is not a whole number of at least 1"


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("1000000", 1_000_000),
        (1_000_000, 1_000_000),
        ("8GB", 8 * 1000**3),
        ("8gb", 8 * 1000**3),
        ("8 GB", 8 * 1000**3),
        ("8G", 8 * 1000**3),
        ("512MiB", 512 * 1024**2),
        ("1.5KiB", 1536),
        ("2TB", 2 * 1000**4),
        ("7B", 7),
    ],
)
def test_bytes(value: object, count: int) -> None:
    assert parse_bytes(value) == count


@pytest.mark.parametrize(
    "value", ["0", "-1", "x", "", "GB", "8XB", "8GBB", "nan", "inf", "1e9", None, True, [], "1,5GB"]
)
def test_bytes_that_are_none_name_value_and_flag(value: object) -> None:
    message = refusal(parse_bytes, value)
    assert "memory-limit" in message
    assert repr(value) in message


def test_less_than_a_byte_is_refused() -> None:
    refusal(parse_bytes, "0.5")


@pytest.mark.parametrize("parse", [parse_sizes, parse_bytes])
def test_number_beyond_a_float_is_refused(parse: Callable[[str], object]) -> None:
    refusal(parse, "9" * 400)


@pytest.mark.parametrize("text", ["0", "-0.1", "1.1", "nan", "x", ""])
def test_what_is_no_share_is_refused(text: str) -> None:
    assert "expected a number between 0 and 1, such as" in refusal(parse_share, text, "--level")
    with pytest.raises(UsageError, match="between 0 and 1, or 1, such as"):
        parse_share(text, "--min", whole=True)


def test_the_whole_is_a_share_only_where_it_may_be() -> None:
    assert parse_share("1", "--min", whole=True) == 1
    assert "expected a number between 0 and 1" in refusal(parse_share, "1", "--level")
