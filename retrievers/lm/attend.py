"""Attention of query rows over the cached corpus: once plainly, as the reference, and once fast.

Rows of queries that share a key/value head come together: ``q`` is (K, R, D) for K key/value heads, where R counts
query rows times the query heads of each key/value head. Scores are ``q @ k``: whoever calls has scaled ``q``.
Attention over parts of what a row sees is merged by log-sum-exp (`merge`), so that a corpus may lie in several shards.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]
"""What rows read from one part of the tokens, (..., R, D) in float32, and their log-sum-exp there, (..., R)."""

KERNEL_ROWS = 16
"""Rows that the compiled kernel takes at once (MAX_ROWS in attend.c)."""

CHUNK = 4096
"""Tokens whose scores the plain forms hold at once."""

TRACED_SCORES = 1 << 17
"""Scores of a head that the way back holds at once, so that they stay in a processor's own memory."""


def wide(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def attend_plain(q: Tensor, keys: Tensor, values: Tensor) -> Part:
    """The reference: softmax over all tokens at once, in float32, on any device; keys and values are (K, T, D)."""
    scores = wide(q) @ wide(keys).transpose(-1, -2)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ wide(values), lse


def merge(parts: Iterable[Part]) -> Part:
    """Attention over the union of disjoint sets of tokens from that over each, of which two are held at once."""
    whole: Part | None = None
    for out, lse in parts:
        if whole is None:
            whole = out, lse
            continue
        both = torch.logaddexp(whole[1], lse)
        base = both.masked_fill(both == -torch.inf, 0.0)  # no tokens in either: 0, not -inf - -inf
        mine, new = (whole[1] - base).exp().unsqueeze(-1), (lse - base).exp().unsqueeze(-1)
        whole = whole[0] * mine + out * new, both
    assert whole is not None
    return whole


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Part:
    """Attention over all tokens of one shard's layer; equal to `attend_plain` up to rounding.

    Few rows are bound by the speed of memory and go to the compiled kernel, many by arithmetic and go to PyTorch's
    flash attention; where either is missing, the plain form runs by chunks. With gradients on, no scores are kept for
    the way back.
    """
    if torch.is_grad_enabled() and (q.requires_grad or keys.requires_grad):
        traced: Part = Traced.apply(q, keys, values)  # type: ignore[no-untyped-call]
        return traced
    if keys.device.type == "cpu":
        kernel = compiled(keys.shape[-1], keys.dtype)
        if kernel and q.shape[1] <= KERNEL_ROWS:
            # Several tasks a head, so that the threads share the work evenly whatever the number of heads is.
            count = max(min(16, keys.shape[1] // 256), 1)
            bounds = torch.linspace(0, keys.shape[1], count + 1, dtype=torch.float64).round().long()
            return kernel.attend(q, keys, values, bounds[:-1], bounds[1:], torch.arange(count + 1))
        if keys.dtype == torch.float32 or (keys.dtype == torch.bfloat16 and _has_bfloat16()):
            return _flash(q.to(keys.dtype), keys, values)
    return merge(attend_plain(q, k, v) for k, v in zip(keys.split(CHUNK, 1), values.split(CHUNK, 1), strict=True))


class Traced(torch.autograd.Function):
    """`attend` with gradients: on the way back, the scores are computed once more, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor) -> Part:
        out, lse = attend(q, keys, values)
        ctx.save_for_backward(q, keys, values, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (q, keys, values, out, lse), (of_out, of_lse) = ctx.saved_tensors, gradients
        # P = exp(S - lse) has dP/dS = P (1 - P), and dlse/dS = P. One more dimension makes the products subtract.
        shift = (of_out * out).sum(-1) - of_lse
        rows, k, v = wide(q), wide(keys), wide(values)
        one = torch.ones_like(k[..., :1])
        longer_k, longer_v = (torch.cat((x, one), -1).transpose(-1, -2) for x in (k, v))
        longer_q, longer_out = (torch.cat((x, -y.unsqueeze(-1)), -1) for x, y in ((rows, lse), (of_out, shift)))
        of_q, of_k, of_v = torch.zeros_like(rows), torch.empty_like(k), torch.empty_like(v)
        size = max(TRACED_SCORES // q.shape[1], 64)
        for at in range(0, k.shape[1], size):
            some = slice(at, at + size)
            shares = (longer_q @ longer_k[..., some]).exp_()
            of_v[:, some] = shares.transpose(-1, -2) @ of_out
            of_scores = (longer_out @ longer_v[..., some]).mul_(shares)
            of_k[:, some] = of_scores.transpose(-1, -2) @ rows
            of_q.baddbmm_(of_scores, k[:, some])
        return of_q.to(q.dtype), of_k.to(keys.dtype), of_v.to(values.dtype)


def attend_ranges(q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor) -> Part:
    """Attention over some ranges of a shard's tokens: those of the documents on a shortlist."""
    kernel = compiled(keys.shape[-1], keys.dtype) if keys.device.type == "cpu" else None
    if kernel is None:
        index = ranges_index(starts, ends)
        return attend(q, keys[:, index], values[:, index])
    count = min(16, len(starts))
    groups = torch.linspace(0, len(starts), count + 1, dtype=torch.float64).round().long()
    parts = [kernel.attend(rows, keys, values, starts, ends, groups) for rows in q.split(KERNEL_ROWS, 1)]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def maxsim_plain(q: Tensor, keys: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The reference: per range of tokens the highest score of each row, (ranges, K, R); -inf for an empty range."""
    best = torch.full((len(starts), *q.shape[:2]), -torch.inf, device=q.device)
    for at, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if end > start:
            best[at] = (q.float() @ keys[:, start:end].float().transpose(-1, -2)).amax(-1)
    return best


def maxsim(q: Tensor, keys: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """MaxSim of every row and range: equal to `maxsim_plain` up to rounding."""
    if q.shape[1] == 0:
        return q.new_empty((len(starts), *q.shape[:2]), dtype=torch.float32)
    kernel = compiled(keys.shape[-1], keys.dtype) if keys.device.type == "cpu" else None
    if kernel is not None:
        return kernel.maxsim(q, keys, starts, ends)
    # Tokens of no range get the number after the last one and are dropped with it.
    owner = torch.full((keys.shape[1],), len(starts), device=q.device)
    index = ranges_index(starts, ends)
    owner[index] = torch.repeat_interleave(torch.arange(len(starts), device=q.device), ends - starts)
    best = torch.full((*q.shape[:2], len(starts) + 1), -torch.inf, device=q.device)
    for at in range(0, keys.shape[1], CHUNK):
        scores = q.float() @ keys[:, at : at + CHUNK].float().transpose(-1, -2)
        best.scatter_reduce_(-1, owner[at : at + CHUNK].expand_as(scores), scores, "amax")
    return best[..., :-1].permute(2, 0, 1)


def ranges_index(starts: Tensor, ends: Tensor) -> Tensor:
    """All positions in the given ranges, range by range."""
    lengths = ends - starts
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=starts.device) + torch.repeat_interleave(starts - before, lengths)


def _flash(q: Tensor, keys: Tensor, values: Tensor) -> Part:
    tokens = keys.shape[1]
    # The tokens fall into pieces that lie beside the heads as a second dimension, for the same reason as above; many
    # rows are work enough for all threads as they are, and pieces would only multiply what is put out.
    count = max(min(16, tokens // 512, 1024 // q.shape[1]), 1)
    size = tokens // count
    pieces = [x[:, : count * size].unflatten(1, (count, size)) for x in (keys, values)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(1).expand(-1, count, -1, -1), *pieces, 0.0, False, scale=1.0
    )
    parts = [(out[:, i].float(), lse[:, i].float()) for i in range(count)]
    if rest := tokens - count * size:
        parts.append(attend_plain(q, keys[:, -rest:], values[:, -rest:]))
    return merge(parts)


@cache
def _has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware; emulation is hundreds of times slower."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


class Kernel:
    """The functions of attend.c for one size of head and one type of element."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, groups: Tensor) -> Part:
        """Attention of at most `KERNEL_ROWS` rows over ranges of tokens, of which each group is a task."""
        q = q.float().contiguous()
        heads, rows, size = q.shape
        count = len(groups) - 1
        out, lse = torch.empty(heads, count, rows, size), torch.empty(heads, count, rows)
        arguments = (q, keys, values, _strides(keys, values), heads, rows, starts, ends, groups, count, out, lse)
        self._library.attend(*map(_pass, arguments))
        whole = lse.logsumexp(1)  # over the groups, as `merge` does for any parts
        return (out * (lse - whole.unsqueeze(1)).exp().unsqueeze(-1)).sum(1), whole

    def maxsim(self, q: Tensor, keys: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        q = q.float().contiguous()
        heads, rows = q.shape[:2]
        best = torch.empty(heads, len(starts), rows)
        arguments = (q, keys, _strides(keys), heads, rows, starts.contiguous(), ends.contiguous(), len(starts), best)
        self._library.maxsim(*map(_pass, arguments))
        return best.masked_fill_(best <= -1e30, -torch.inf).transpose(0, 1)


def _strides(*tensors: Tensor) -> int:
    """Elements from head to head, the same in all tensors, whose tokens lie densely."""
    stride = tensors[0].stride(0)
    assert all(t.stride() == (stride, t.shape[2], 1) for t in tensors)
    return stride


def _pass(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous() or argument.dim() == 3
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_long(argument)


@cache
def compiled(head_dim: int, dtype: torch.dtype) -> Kernel | None:
    """The compiled kernel; None where there is no C compiler with OpenMP, or no kernel for the type or size."""
    if head_dim % 8 or dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        library = _build(head_dim, dtype)
        return Kernel(library) if library else None
    except OSError:  # the user's cache is nowhere, cannot be written to, or what it holds may not be executed
        return None


def _build(head_dim: int, dtype: torch.dtype) -> Path | None:
    """Compile attend.c into the user's cache, once for each compiler, processor, size and type."""
    source = Path(__file__).with_name("attend.c")
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
    except ValueError:  # a quotation that does not end
        return None
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    options = ["-O3", "-march=native", "-ffast-math", "-funroll-loops", "-fopenmp", "-fPIC"]
    options += [f"-DHEAD_DIM={head_dim}"] + (["-DBFLOAT16"] if dtype == torch.bfloat16 else [])
    identity = repr((compiler, options, _processor())).encode() + source.read_bytes()
    folder = cache_folder() / "kernels"
    library = folder / f"attend-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / library.name
        # Linking with -ffast-math would switch off denormal numbers in the whole process.
        for step in (
            [*options, "-c", str(source), "-o", f"{made}.o"],
            ["-shared", "-fopenmp", f"{made}.o", "-o", str(made), "-lm"],
        ):
            if subprocess.run([*compiler, *step], capture_output=True).returncode:
                return None
        made.replace(library)  # whole or not at all: several cells may compile at once
    return library


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def cache_folder() -> Path:
    """Where this package keeps what is made once a machine.

    Raises:
        OSError: the user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "icr-bench"
    except RuntimeError as error:
        raise OSError(f"{error}; set XDG_CACHE_HOME") from None


def kernel_name(head_dim: int, dtype: torch.dtype, device: str) -> str:
    """Which implementation runs, for the record."""
    if device == "cpu" and compiled(head_dim, dtype):
        return "compiled"
    return "torch"
