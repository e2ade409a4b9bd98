"""``NAME:key=value,key=value``, sizes, byte counts: the small languages of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from icr_bench.harness.errors import UsageError
from icr_bench.harness.export import safe_name


@dataclass(frozen=True)
class Spec:
    """A retriever or benchmark as asked for: its name, its options as written, and the name of its rows."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def row(self) -> str:
        """What the record and the tables call it."""
        return self.label or self.name


MOST_LABEL = 60  # characters

MOST_BYTES = 90
"""Bytes of a row's name in a file name, where it may be percent-encoded: two of them, size, seed, ending and what a
half-written file is called stay within the 255 that file systems take."""

UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, and what no file or terminal can hold."""

_PAIR = re.compile(r"""\s*([^=,]*?)\s*=\s*("[^"]*"|'[^']*'|[^,]*)\s*(?:,|$)""")


def parse_spec(text: str) -> Spec:
    """Parse ``NAME`` or ``NAME:key=value,…``: split at the first colon, then commas, then the first ``=``.

    Values may be quoted with ' or "; a quoted value may hold commas.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    position = 0
    while position < len(rest):
        match = _PAIR.match(rest, position)
        if match is None or not match[1]:
            after = rest[:position] or f"{name}:"
            raise UsageError(f"{text!r}: expected key=value after {after!r}, got {rest[position:]!r}")
        key, value = match[1], match[2].strip()
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        _put(options, key, value[1:-1] if quoted else value, text)
        position = match.end()
    return _spec(name.strip(), options, text)


def spec_of(value: object, where: str) -> Spec:
    """A spec from a suite: a string as on the command line, or a mapping with ``name`` and options."""
    if isinstance(value, str):
        return parse_spec(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise UsageError(f"{where}: expected NAME:key=value or a mapping with a name, got {value!r}")
    options: dict[str, Any] = {}
    for key, option in value.items():
        if key != "name":
            _put(options, str(key), option, where)
    return _spec(value["name"], options, where)


def _put(options: dict[str, Any], key: str, value: Any, where: str) -> None:
    key = key.replace("-", "_")
    if key in options:
        raise UsageError(f"{where!r}: {key} is given twice")
    options[key] = value


def _spec(name: str, options: dict[str, Any], where: str) -> Spec:
    if not name:
        raise UsageError(f"{where!r}: the name is missing")
    label = options.pop("label", "")
    if not isinstance(label, str) or len(label) > MOST_LABEL:
        raise UsageError(f"{where}: label must be text of at most {MOST_LABEL} characters, got {label!r}")
    spec = Spec(name, options, label)
    check_text(spec.row, "label" if label else "name")
    if (size := len(safe_name(spec.row).encode())) > MOST_BYTES:
        raise UsageError(
            f"{where}: {spec.row!r} takes {size} bytes in a file name, at most {MOST_BYTES} are left for it; letters "
            "and digits take the fewest, so give a shorter label="
        )
    return spec


def check_text(text: str, what: str) -> None:
    """Check what is shown and names files.

    Raises:
        UsageError: it holds a control character, or half of one that UTF-16 writes in two.
    """
    if found := UNSEEN.search(text):
        raise UsageError(f"{what}: {text!r} holds {found[0]!r}, which can be neither shown nor written; leave it out")


ALL = "all"
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([km]?)")


def parse_sizes(value: object) -> tuple[int | str, ...]:
    """``46,500,1k,2.5k,all`` (or a list, or ``46+500``) as integers and ``"all"``, without repeats."""
    return tuple(dict.fromkeys(ALL if part == ALL else _size(part) for part in _parts(value, "-n")))


def _parts(value: object, what: str) -> list[str]:
    parts = value if isinstance(value, (list, tuple)) else re.split(r"[,+]", str(value))
    if not parts:
        raise UsageError(f"{what}: the list is empty")
    return [str(part).strip().lower() for part in parts]


def _size(part: str) -> int:
    match = _SIZE.fullmatch(part)
    size = Decimal(match[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[match[2]] if match else 0
    if size < 1 or size != int(size):
        raise UsageError(f"-n: {part!r} is no corpus size; give whole numbers above 0 (1k, 2.5k, 1m too) or all")
    return int(size)


def parse_numbers(value: object, what: str, lowest: int) -> tuple[int, ...]:
    """``1,2,5`` (or a list) as distinct integers of at least ``lowest``."""
    numbers = []
    for part in _parts(value, what):
        if not re.fullmatch(r"-?[0-9]{1,18}", part) or int(part) < lowest:
            raise UsageError(f"{what}: {part!r} is not a whole number of at least {lowest}")
        numbers.append(int(part))
    return tuple(dict.fromkeys(numbers))


_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,12})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_bytes(value: object, what: str = "--memory-limit") -> int:
    """``8GB``, ``512MiB`` or plain bytes."""
    match = _BYTES.fullmatch(str(value).strip())
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ") if match else 0
    size = int(Decimal(match[1]) * unit) if match else 0
    if size < 1:
        raise UsageError(f"{what}: {value!r} is no number of bytes; write 8GB, 512MiB or 1000000")
    return size


_BUDGET = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([km]?)\s*(tokens?)?", re.IGNORECASE)


def parse_budget(value: object) -> dict[str, float]:
    """``200k tokens`` as ``{"tokens": 200000}``; ``2.50``, in the money of the prices, as ``{"money": 2.5}``."""
    match = _BUDGET.fullmatch(str(value).strip())
    amount = float(match[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[match[2].lower()] if match else 0.0
    if match is None or amount <= 0 or (match[2] and not match[3]):
        raise UsageError(
            f"--budget: {value!r} is neither tokens, such as 200ktokens, nor an amount of money, such as 2.50"
        )
    return {"tokens": amount} if match[3] else {"money": amount}


def parse_share(text: str, what: str, *, whole: bool = False) -> float:
    """A number between 0 and 1, not 0, and 1 only if the ``whole`` may be asked for."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not (0 < share < 1 or (whole and share == 1)):
        raise UsageError(f"{what} {text!r}: expected a number between 0 and 1{', or 1' * whole}, such as 0.9")
    return share
