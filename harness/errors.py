"""Failures that end a command, and their exit codes.

0 ok · 1 a cell failed, a regression, or nothing that keeps the limits · 2 usage · 3 data (`DataError`) · 4 a missing
extra (`MissingExtra`) · 130 interrupted
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OK, FAILED, USAGE, DATA, EXTRA, INTERRUPTED = 0, 1, 2, 3, 4, 130


class UsageError(Exception):
    """Flags, names, keys, sizes, a suite file, an output folder or a plug-in that cannot be used."""


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """An error for a name that is not in a list, with the closest matches or the whole list."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(known) or 'none'}"
    return UsageError(f"unknown {what} {name!r}; {hint}")
