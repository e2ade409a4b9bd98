"""YAML as people write it by hand: safe, and a key that is given twice is refused."""

from __future__ import annotations

from typing import Any

import yaml

from icr_bench.harness.errors import UsageError


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice; plain YAML would forget the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


def parse(text: str, name: str) -> Any:
    """What a YAML text holds.

    Raises:
        UsageError: it is not YAML, or gives a key twice; with ``name`` and the line if known.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{name}{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{name}: not YAML: {error}") from None
