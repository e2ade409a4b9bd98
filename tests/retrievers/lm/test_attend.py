"""Attention and MaxSim over cached tokens: the fast forms against the plain ones, with the kernel and without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from icr_bench.retrievers.lm import attend as module
from icr_bench.retrievers.lm.attend import (
    KERNEL_ROWS,
    attend,
    attend_plain,
    attend_ranges,
    compiled,
    kernel_name,
    maxsim,
    maxsim_plain,
    merge,
)

Layout = Literal["dense", "layer", "offset"]

ROWS = (1, 2, 7, KERNEL_ROWS - 1, KERNEL_ROWS, KERNEL_ROWS + 1, 33, 100)
TOKENS = (1, 2, 63, 64, 65, 255, 256, 257, 511, 513, 1023, 1500, 4095, 4096, 4097, 5000)
HEAD_DIMS = (8, 16, 20, 128)  # 20 is no multiple of 8 and has no kernel
LAYOUTS: tuple[Layout, ...] = ("dense", "layer", "offset")
DTYPES = (torch.float32, torch.bfloat16)

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""What a fast form may differ by: bfloat16 may round queries and weights, which has 8 bits."""


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations, one after the other."""
    if request.param == "torch":
        monkeypatch.setattr(module, "compiled", lambda *arguments, **more: None)
    elif compiled(16, torch.float32) is None:
        pytest.skip("no C compiler with OpenMP")
    return str(request.param)


def seeded(*told: object) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, repr(told))))


def shard(
    heads: int, tokens: int, size: int, dtype: torch.dtype = torch.float32, layout: Layout = "dense"
) -> tuple[Tensor, Tensor]:
    """Keys and values (K, T, D): whole tensors, one layer of two, or the middle tokens of longer ones."""
    shape = {
        "dense": (1, heads, tokens, size),
        "layer": (2, heads, tokens, size),
        "offset": (1, heads, tokens + 60, size),
    }[layout]
    at = 37 if layout == "offset" else 0
    count = prod(shape)
    made = (noise(dtype)[begin : begin + count].view(shape)[-1] for begin in (0, noise(dtype).numel() - count))
    keys, values = (x[:, at : at + tokens] for x in made)
    return keys, values


@cache
def noise(dtype: torch.dtype) -> Tensor:
    """More numbers than the largest shard has keys, drawn once."""
    return torch.randn(6_000_000, generator=seeded("noise")).to(dtype)


def rows_of(heads: int, rows: int, size: int) -> Tensor:
    """Queries whose scores spread by 3, so that a few tokens have most of the weight."""
    return torch.randn(heads, rows, size, generator=seeded(heads, rows, size, "q")) * 3 / size**0.5


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], bound: float, case: object = "") -> None:
    for name, one, other in zip(("what rows read", "log-sum-exp"), got, expected, strict=True):
        assert one.dtype == torch.float32, case
        torch.testing.assert_close(one, other, atol=bound, rtol=bound, msg=lambda m, n=name: f"{case}: {n}: {m}")


def spans_of(tokens: int, lengths: tuple[int, ...], gap: int) -> tuple[Tensor, Tensor]:
    """Ranges of these lengths in turn over the tokens, ``gap`` tokens apart."""
    starts, ends, at = [], [], 0
    while at + (length := lengths[len(starts) % len(lengths)]) <= tokens:
        starts.append(at)
        ends.append(at + length)
        at += length + gap
    return torch.tensor(starts), torch.tensor(ends)


def gathered(keys: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The tokens of ranges, beside one another."""
    return torch.cat([keys[:, start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)], 1)


# Attention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", HEAD_DIMS)
def test_attention_equals_the_plain_form(way: str, size: int, dtype: torch.dtype) -> None:
    for number, tokens in enumerate(TOKENS):
        for place, rows in enumerate(ROWS):
            if (number + place) % (2 if size < 64 else 8):
                continue  # time; every count of tokens and of rows has its turn
            heads, layout = 1 + number % 4, LAYOUTS[(number // 2 + place) % 3]
            keys, values = shard(heads, tokens, size, dtype, layout)
            q = rows_of(heads, rows, size).to(dtype).float()  # hardware that multiplies in bfloat16 rounds them so
            case = f"{heads} heads, {rows} rows, {tokens} tokens, {layout}"
            assert_same(attend(q, keys, values), attend_plain(q, keys, values), BOUND[dtype], case)


def test_attention_over_a_lone_token_is_its_value(way: str) -> None:
    keys, values = shard(2, 1, 16)
    q = rows_of(2, 3, 16)
    out, lse = attend(q, keys, values)
    assert torch.allclose(out, values.expand(2, 3, 16), atol=1e-6)
    assert torch.allclose(lse, (q * keys).sum(-1), atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_neither_queries_nor_cache_are_written_to(way: str, layout: Layout) -> None:
    keys, values = shard(2, 600, 16, layout=layout)
    q = rows_of(2, 3, 16)
    before = [x.clone() for x in (q, keys, values)]
    attend(q, keys, values)
    attend_ranges(q, keys, values, torch.tensor([3]), torch.tensor([90]))
    maxsim(q, keys, torch.tensor([3]), torch.tensor([90]))
    assert all(torch.equal(x, y) for x, y in zip((q, keys, values), before, strict=True))


def test_queries_need_not_lie_densely(way: str) -> None:
    keys, values = shard(2, 700, 16)
    q = rows_of(4, 6, 16).transpose(0, 1)[:2, ::2]
    starts, ends = torch.tensor([5, 600]), torch.tensor([400, 650])
    assert not q.is_contiguous()
    assert_same(attend(q, keys, values), attend(q.contiguous(), keys, values), 1e-6)
    expected = attend_ranges(q.contiguous(), keys, values, starts, ends)
    assert_same(attend_ranges(q, keys, values, starts, ends), expected, 1e-6)
    assert torch.allclose(maxsim(q, keys, starts, ends), maxsim_plain(q.contiguous(), keys, starts, ends), atol=1e-5)


EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "all equal": lambda steps: steps * 0,
    "all equal and low": lambda steps: steps * 0 - 30_000,
    "all equal and high": lambda steps: steps * 0 + 30_000,
    "low": lambda steps: steps - 20_000,
    "high": lambda steps: steps + 20_000,
    "falling": lambda steps: 10_000 - 64.0 * torch.arange(len(steps)),
    "rising": lambda steps: 64.0 * torch.arange(len(steps)) - 10_000,
    "one high among low": lambda steps: torch.where(torch.arange(len(steps)) == 321, 20_000.0, -20_000.0),
    "one low among high": lambda steps: torch.where(torch.arange(len(steps)) == 321, -20_000.0, 20_000.0),
    "blocks far apart": lambda steps: torch.where(torch.arange(len(steps)) % 256 < 128, -20_000.0, 20_000.0) + steps,
}


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_scores(way: str, kind: str, rows: int) -> None:
    """Scores are exact in any order of summing, since only one component of queries and keys is not zero."""
    tokens = 1000
    steps = torch.randint(0, 12, (tokens,), generator=seeded(kind)) / 4
    _, values = shard(2, tokens, 16)
    keys, q = torch.zeros(2, tokens, 16), torch.zeros(2, rows, 16)
    keys[..., 0], q[..., 0] = EXTREMES[kind](steps), 1
    q[1] *= -1  # the other head sees the opposite
    starts, ends = spans_of(tokens, (100, 1, 30), 5)
    # A log-sum-exp near 20,000 is rounded by 0.001, and what is merged by it is off by as much.
    bound = 1e-5 + float(EXTREMES[kind](steps).abs().max()) * 2.0**-22
    for form, over in ((attend_plain, None), (attend, None), (attend_ranges, (starts, ends))):
        k, v = (x.double() if over is None else gathered(x, *over).double() for x in (keys, values))
        scores = q.double() @ k.transpose(1, 2)
        expected = (scores.softmax(-1) @ v).float(), scores.logsumexp(-1).float()
        assert_same(form(q, keys, values, *(over or ())), expected, bound, form.__name__)
    assert torch.equal(maxsim(q, keys, starts, ends), maxsim_plain(q, keys, starts, ends))


# Ranges


RANGES = {
    "one": ((200,), 9999),
    "one of a single token": ((1,), 9999),
    "two": ((300,), 0),
    "all tokens": ((5000,), 0),
    "a few": ((150, 17, 64), 90),
    "fifteen": ((70,), 260),
    "many": ((17, 1, 30, 2), 3),
    "many in more than one chunk": ((37, 1, 64, 120, 2), 3),
    "single tokens": ((1,), 9),
    "without gaps": ((16, 1, 40), 0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 20, 128])
def test_attention_over_ranges_equals_that_over_their_tokens(way: str, size: int, dtype: torch.dtype) -> None:
    for number, (kind, (lengths, gap)) in enumerate(RANGES.items()):
        tokens = 5000 if number % 2 else 600
        starts, ends = spans_of(tokens, lengths, gap)
        for place, rows in enumerate((1, KERNEL_ROWS, 37)[: 3 if size < 64 else 1]):
            heads, layout = 1 + (number + place) % 4, LAYOUTS[(number + place) % 3]
            keys, values = shard(heads, tokens, size, dtype, layout)
            q = rows_of(heads, rows, size)
            expected = attend_plain(q, gathered(keys, starts, ends), gathered(values, starts, ends))
            got = attend_ranges(q, keys, values, starts, ends)
            assert_same(got, expected, BOUND[dtype], f"{kind}: {heads} heads, {rows} rows, {layout}")


def test_the_order_of_ranges_does_not_matter(way: str) -> None:
    keys, values = shard(2, 2000, 16)
    starts, ends = spans_of(2000, (37, 1, 64), 3)
    order = torch.randperm(len(starts), generator=seeded("order"))
    q = rows_of(2, 5, 16)
    expected = attend_ranges(q, keys, values, starts, ends)
    assert_same(attend_ranges(q, keys, values, starts[order], ends[order]), expected, 1e-5)


@pytest.mark.parametrize("count", [3, 16, 40])
def test_ranges_without_tokens_add_nothing(way: str, count: int) -> None:
    keys, values = shard(2, 1000, 16)
    starts = torch.arange(count) * 20
    ends = starts + 15
    ends[1::3] = starts[1::3]
    q = rows_of(2, 5, 16)
    expected = attend_plain(q, gathered(keys, starts, ends), gathered(values, starts, ends))
    assert_same(attend_ranges(q, keys, values, starts, ends), expected, 1e-5)


# Merging


@settings(max_examples=40, deadline=None, database=None)
@given(
    tokens=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    rows=st.integers(1, 4),
)
@example(tokens=1, cuts=[0, 0], spread=0.0, rows=1)
@example(tokens=5, cuts=[5, 5], spread=1.0, rows=2)
def test_attention_over_parts_merges_to_that_over_the_whole(
    tokens: int, cuts: list[int], spread: float, rows: int
) -> None:
    """Also where a part has no tokens, as between two equal cuts."""
    keys, values = shard(2, tokens, 8)
    q = rows_of(2, rows, 8) * spread
    bounds = [0, *sorted(min(cut, tokens) for cut in cuts), tokens]
    pieces = list(pairwise(bounds))
    parts = [attend_plain(q, keys[:, start:end], values[:, start:end]) for start, end in pieces]
    assert_same(merge(parts), attend_plain(q, keys, values), 1e-4 if spread > 10 else 1e-5)


def test_merging_leaves_the_parts_as_they_are() -> None:
    keys, values = shard(1, 50, 8)
    parts = [attend_plain(rows_of(1, 2, 8), k, v) for k, v in zip(keys.split(20, 1), values.split(20, 1), strict=True)]
    before = [x.clone() for part in parts for x in part]
    merge(parts)
    assert all(torch.equal(x, y) for x, y in zip([x for part in parts for x in part], before, strict=True))


# MaxSim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", HEAD_DIMS)
def test_maxsim_equals_the_plain_form(way: str, size: int, dtype: torch.dtype) -> None:
    bound = 5 * BOUND[dtype]  # scores reach 15
    for number, (kind, (lengths, gap)) in enumerate(RANGES.items()):
        tokens = 5000 if number % 2 else 600
        starts, ends = spans_of(tokens, lengths, gap)
        for place, rows in enumerate((1, 16, 17, 100)[number % 2 :: 1 if size < 64 else 3]):
            heads, layout = 1 + (number + place) % 4, LAYOUTS[(number + place) % 3]
            keys, _ = shard(heads, tokens, size, dtype, layout)
            q = rows_of(heads, rows, size)
            got, expected = maxsim(q, keys, starts, ends), maxsim_plain(q, keys, starts, ends)
            assert got.shape == (len(starts), heads, rows)
            case = f"{kind}: {heads} heads, {rows} rows, {layout}"
            torch.testing.assert_close(got, expected, atol=bound, rtol=bound, msg=lambda m, c=case: f"{c}: {m}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_range_has_no_score(way: str, dtype: torch.dtype) -> None:
    keys, _ = shard(2, 300, 16, dtype)
    starts = torch.tensor([0, 10, 10, 200, 300])
    ends = torch.tensor([0, 10, 70, 201, 300])
    q = rows_of(2, 3, 16)
    got = maxsim(q, keys, starts, ends)
    assert torch.isneginf(got[[0, 1, 4]]).all()
    assert torch.allclose(got[[2, 3]], maxsim_plain(q, keys, starts, ends)[[2, 3]], atol=5 * BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maxsim_of_no_rows_and_of_no_ranges(way: str, dtype: torch.dtype) -> None:
    keys, _ = shard(2, 300, 16, dtype)
    none = torch.empty(0, dtype=torch.long)
    rows = rows_of(2, 3, 16).to(dtype)
    for q, starts, ends, shape in (
        (rows[:, :0], torch.tensor([0, 5]), torch.tensor([5, 9]), (2, 2, 0)),
        (rows, none, none, (0, 2, 3)),
    ):
        found = maxsim(q, keys, starts, ends)
        assert (found.shape, found.dtype) == (shape, torch.float32)


# The same from call to call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, os.cpu_count() or 2])
def test_a_second_call_gives_the_same_bits(
    way: str, threads: int, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    set_threads(threads)
    keys, values = shard(3, 3001, 16, dtype, "layer")
    starts, ends = spans_of(3001, (37, 1, 64, 120, 2), 3)
    for rows in (5, 33):
        q = rows_of(3, rows, 16)
        runs = [
            (*attend(q, keys, values), *attend_ranges(q, keys, values, starts, ends), maxsim(q, keys, starts, ends))
            for _ in range(2)
        ]
        assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("rows", [5, 33])
def test_threads_share_the_work_rightly(way: str, rows: int, set_threads: Callable[[int], None]) -> None:
    set_threads(4)
    keys, values = shard(3, 3001, 16)
    starts, ends = spans_of(3001, (37, 1, 64, 120, 2), 3)
    q = rows_of(3, rows, 16)
    assert_same(attend(q, keys, values), attend_plain(q, keys, values), 1e-5)
    expected = attend_plain(q, gathered(keys, starts, ends), gathered(values, starts, ends))
    assert_same(attend_ranges(q, keys, values, starts, ends), expected, 1e-5)
    assert torch.allclose(maxsim(q, keys, starts, ends), maxsim_plain(q, keys, starts, ends), atol=1e-4)


# Compiling


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and nothing compiled in this process."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    compiled.cache_clear()
    yield folder
    compiled.cache_clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Make a compiler of a shell script; ``cc "$@"`` in it is the real one."""

    def make(script: str) -> None:
        file = tmp_path / "my-cc"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("CC", str(file))

    return make


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.so"))


def assert_right_without_kernel() -> None:
    assert compiled(16, torch.float32) is None
    assert kernel_name(16, torch.float32, "cpu") == "torch"
    keys, values = shard(2, 700, 16)
    starts, ends = torch.tensor([5, 600]), torch.tensor([400, 650])
    q = rows_of(2, 3, 16)
    assert_same(attend(q, keys, values), attend_plain(q, keys, values), 1e-5)
    expected = attend_plain(q, gathered(keys, starts, ends), gathered(values, starts, ends))
    assert_same(attend_ranges(q, keys, values, starts, ends), expected, 1e-5)
    assert torch.allclose(maxsim(q, keys, starts, ends), maxsim_plain(q, keys, starts, ends), atol=1e-5)


needs_compiler = pytest.mark.skipif(compiled(16, torch.float32) is None, reason="no C compiler with OpenMP")


def test_without_a_compiler_pytorch_does_it(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nonexistent")
    assert_right_without_kernel()
    assert libraries(fresh) == []


@pytest.mark.parametrize("script", ["exit 1", "echo 'no OpenMP' >&2; exit 4", "kill -9 $$"])
def test_with_a_compiler_that_fails_pytorch_does_it(fresh: Path, compiler: Callable[[str], None], script: str) -> None:
    compiler(script)
    assert_right_without_kernel()
    assert libraries(fresh) == []


WRITE_NONSENSE = 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"'


def test_a_library_that_cannot_be_loaded_counts_as_none(fresh: Path, compiler: Callable[[str], None]) -> None:
    """As where the folder is mounted noexec, or where OpenMP's own library is missing."""
    compiler(WRITE_NONSENSE)
    assert_right_without_kernel()


def test_with_a_compiler_that_cannot_be_read_pytorch_does_it(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    assert_right_without_kernel()
    assert libraries(fresh) == []


def test_without_a_home_folder_pytorch_does_it(homeless: None) -> None:
    compiled.cache_clear()
    assert_right_without_kernel()
    compiled.cache_clear()


def test_where_nothing_can_be_kept_pytorch_does_it(fresh: Path) -> None:
    fresh.write_text("a file in the folder's place")
    assert_right_without_kernel()


@needs_compiler
def test_a_library_is_compiled_once_and_used_again(fresh: Path, compiler: Callable[[str], None]) -> None:
    calls = fresh.parent / "calls"
    compiler(f'echo call >> "{calls}"; exec cc "$@"')
    for _ in range(2):
        compiled.cache_clear()  # as another process would start
        assert compiled(16, torch.float32) is not None
    assert calls.read_text().split() == ["call", "call"]  # to compile and to link
    assert len(libraries(fresh)) == 1
    assert [file for file in fresh.rglob("*") if file.is_file()] == libraries(fresh)
    assert compiled(16, torch.bfloat16) is not None
    assert len(libraries(fresh)) == 2


def test_what_has_no_kernel_is_told_as_torch() -> None:
    assert compiled(20, torch.float32) is None
    assert compiled(16, torch.float64) is None
    assert kernel_name(20, torch.float32, "cpu") == "torch"
    assert kernel_name(16, torch.float32, "cuda") == "torch"


@needs_compiler
def test_the_kernel_is_told_as_compiled() -> None:
    assert kernel_name(16, torch.float32, "cpu") == "compiled"
    assert kernel_name(16, torch.bfloat16, "cpu") == "compiled"


PROCESS = """
import torch
from icr_bench.retrievers.lm.attend import attend, attend_plain, kernel_name

torch.set_num_threads(1)
q, keys, values = torch.randn(2, 3, 16), torch.randn(2, 500, 16), torch.randn(2, 500, 16)
out, expected = attend(q, keys, values)[0], attend_plain(q, keys, values)[0]
print(kernel_name(16, torch.float32, "cpu"), torch.allclose(out, expected, atol=1e-5))
"""

WAIT_FOR_THE_OTHER = """
case " $* " in *" -c "*)
    touch "{here}/$$"
    tries=0
    while [ "$(ls "{here}" | wc -l)" -lt 2 ] && [ "$tries" -lt 600 ]; do sleep 0.05; tries=$((tries + 1)); done
esac
exec cc "$@"
"""
"""To link, nobody waits."""


@pytest.mark.slow
@needs_compiler
def test_two_processes_may_compile_at_once(fresh: Path, compiler: Callable[[str], None]) -> None:
    here = fresh.parent / "compiling"
    here.mkdir()
    compiler(WAIT_FOR_THE_OTHER.format(here=here))
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].split() for process in processes] == [["compiled", "True"]] * 2
    assert len(list(here.iterdir())) == 2, "they did not compile at the same time"
    assert len(libraries(fresh)) == 1
    assert [file for file in fresh.rglob("*") if file.is_file()] == libraries(fresh)


@pytest.mark.parametrize(("scores", "hardware"), [(1, False), (40, True), (1 << 17, False)])
def test_gradients_of_attention_equal_finite_differences(
    scores: int, hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through what rows read and through its log-sum-exp, in chunks of several sizes, on any processor."""
    monkeypatch.setattr(module, "TRACED_SCORES", scores)
    monkeypatch.setattr(module, "_has_bfloat16", lambda: hardware)
    torch.manual_seed(0)
    q, keys, values = (torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 130, 130))
    assert torch.autograd.gradcheck(attend, (q, keys, values))
    merged = merge([attend(q, keys[:, :50], values[:, :50]), attend(q, keys[:, 50:], values[:, 50:])])
    whole = attend_plain(q, keys, values)
    for one, other in zip(merged, whole, strict=True):
        inputs = (q, keys, values)[: 3 if one.dim() == 3 else 2]  # the log-sum-exp does not depend on values
        grads = [torch.autograd.grad(x.square().sum(), inputs, retain_graph=True) for x in (one, other)]
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(*grads, strict=True))
