"""Names of their own for a retriever with other defaults: variants are data, not subclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from icr_bench.retrievers.base import Retriever


def row(kind: type[Retriever], what: str, **defaults: Any) -> Callable[..., Retriever]:
    """What makes a retriever of a kind, with these defaults in its signature and ``what`` as its description."""
    signature = inspect.signature(kind)
    parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in signature.parameters.values()]

    def make(**options: Any) -> Retriever:
        return kind(**(defaults | options))

    make.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    make.__annotations__ = get_type_hints(kind.__init__)
    arguments = (inspect.getdoc(kind) or "").partition("\n\n")[2]
    make.__doc__ = f"{what}\n\n{arguments}"
    return make
