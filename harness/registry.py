"""Names to retrievers and benchmarks: the built-in tables, entry points of other packages, and plug-in files."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from icr_bench.benchmarks import BENCHMARKS
from icr_bench.harness.errors import UsageError, unknown
from icr_bench.harness.spec import Spec, spec_of
from icr_bench.retrievers import RETRIEVERS
from icr_bench.retrievers.base import Inner

Kind = Literal["retriever", "benchmark"]

FILLED = ("device", "dtype", "seed", "budget")
"""Arguments that the run fills; they are no options of a spec."""


@dataclass(frozen=True)
class Option:
    """One keyword argument of a retriever or benchmark."""

    name: str
    annotation: Any
    default: Any  # inspect.Parameter.empty where the option is required

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


class Registry:
    """All names that can be chosen. Nothing is imported before it is chosen, except plug-in files."""

    def __init__(self, plugins: Iterable[str | Path] = ()) -> None:
        self._targets: dict[Kind, dict[str, Any]] = {"retriever": dict(RETRIEVERS), "benchmark": dict(BENCHMARKS)}
        self._clashes: dict[tuple[Kind, str], str] = {}
        for kind in self._targets:
            for point in entry_points(group=f"icr_bench.{kind}s"):
                if point.name in self._targets[kind]:  # told when the name is chosen, not to everybody
                    self._clashes[kind, point.name] = point.value
                else:
                    self._targets[kind][point.name] = point
        self._plugin_of: dict[tuple[Kind, str], Path] = {}
        self.plugins = tuple(Path(plugin).absolute() for plugin in plugins)
        for plugin in self.plugins:
            self._load_plugin(plugin)

    def _add(self, kind: Kind, name: str, target: Any, where: str) -> None:
        if name in self._targets[kind]:
            raise UsageError(f"{where}: a {kind} called {name!r} exists already; choose another name")
        self._targets[kind][name] = target

    def _load_plugin(self, file: Path) -> None:
        if not file.is_file():
            raise UsageError(f"--plugin {file}: no such file")
        name = f"icr_bench_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UsageError(f"--plugin {file}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # whatever the author's code raises is his to read
            line = _line_in(error, file)
            raise UsageError(f"--plugin {file}{line}: fails to import: {type(error).__name__}: {error}") from error
        tables: dict[Kind, Any] = {
            "retriever": getattr(module, "RETRIEVERS", None),
            "benchmark": getattr(module, "BENCHMARKS", None),
        }
        if tables["retriever"] is None and tables["benchmark"] is None:
            raise UsageError(f"--plugin {file}: defines neither RETRIEVERS nor BENCHMARKS (a dict: name -> class)")
        for kind, table in tables.items():
            if table is None:
                continue
            if not isinstance(table, dict):
                raise UsageError(f"--plugin {file}: {kind.upper()}S must be a dict, got {type(table).__name__}")
            for name, target in table.items():
                if not isinstance(name, str):
                    raise UsageError(f"--plugin {file}: a name in {kind.upper()}S must be text, got {name!r}")
                self._add(kind, name, target, f"--plugin {file}")
                self._plugin_of[kind, name] = file

    def names(self, kind: Kind) -> list[str]:
        return sorted(self._targets[kind])

    def get(self, kind: Kind, name: str) -> Callable[..., Any]:
        """The class or function behind a name."""
        if name not in self._targets[kind]:
            raise unknown(kind, name, self._targets[kind])
        if (kind, name) in self._clashes:
            raise UsageError(
                f"two {kind}s are called {name!r}; the other is the entry point {self._clashes[kind, name]}"
            )
        target = self._targets[kind][name]
        try:
            if isinstance(target, EntryPoint):
                target = target.load()
            elif isinstance(target, str):
                module, _, attribute = target.partition(":")
                target = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # another package's code may raise anything when imported
            raise UsageError(f"{kind} {name!r} fails to import: {type(error).__name__}: {error}") from error
        if not callable(target):
            raise UsageError(f"{kind} {name!r} is {target!r}, not a class or function")
        found: Callable[..., Any] = target
        return found

    def is_own(self, spec: Spec) -> bool:
        """Whether a retriever and all that its options name come with this package."""
        return all(isinstance(self._targets["retriever"][one.name], str) for _, one in self.within(spec))

    def sources(self, kind: Kind, name: str) -> list[Path]:
        """The files behind a name: where it is defined, the plug-in that names it, and what these import of the files
        beside the plug-in, be it when they are needed."""
        file = inspect.getsourcefile(inspect.unwrap(self.get(kind, name)))
        files = {Path(file)} if file else set()
        if plugin := self._plugin_of.get((kind, name)):
            left = {plugin, *(one for one in files if one.is_relative_to(plugin.parent))}
            while left:
                files |= left
                left = {found for one in left for found in _imports(one, plugin.parent)} - files
        return sorted(files)

    def options(self, kind: Kind, name: str) -> dict[str, Option]:
        """The options that a spec may give."""
        return {o.name: o for o in self._arguments(kind, name) if o.name not in FILLED}

    def filled(self, kind: Kind, name: str) -> set[str]:
        """The arguments among `FILLED` that it takes."""
        return {o.name for o in self._arguments(kind, name)} & set(FILLED)

    def _arguments(self, kind: Kind, name: str) -> list[Option]:
        target = self.get(kind, name)
        try:
            parameters = inspect.signature(target).parameters.values()
            hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
        except (NameError, TypeError, ValueError) as error:
            raise UsageError(f"{kind} {name!r}: its options cannot be read: {error}") from error
        arguments = []
        for parameter in parameters:
            if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                raise UsageError(f"{kind} {name!r}: options must be named arguments, got {parameter}")
            unannotated = str if parameter.default in (None, parameter.empty) else type(parameter.default)
            arguments.append(Option(parameter.name, hints.get(parameter.name, unannotated), parameter.default))
        return arguments

    def resolve(self, kind: Kind, spec: Spec, also: Iterable[str] = ("label",)) -> dict[str, Any]:
        """All options of a spec, converted to the types that the annotations name, defaults included; another retriever
        as a mapping of its name and its own options.

        Args:
            also: options that the harness takes itself, to be named when one is misspelt.
        """
        known = self.options(kind, spec.name)
        for key in spec.options:
            if key not in known:
                raise unknown(f"option of {kind} {spec.name}", key, {*known, *also})
        values = {}
        for option in known.values():
            if option.name in spec.options:
                value = _given(kind, spec, option)
                values[option.name] = _each(value, lambda one: {"name": one.name, **self.resolve("retriever", one)})
            elif option.required:
                raise UsageError(f"{kind} {spec.name} needs {option.name}=: {spec.name}:{option.name}=...")
            else:
                values[option.name] = option.default
        return values

    def build(self, kind: Kind, spec: Spec, filled: Mapping[str, Any]) -> Any:
        """Make the retriever or benchmark; ``filled`` holds values for `FILLED`, used where it takes them."""
        taken = self.filled(kind, spec.name)
        given = {key: value for key, value in filled.items() if key in taken}
        options = self.resolve(kind, spec)
        for option in self.options(kind, spec.name).values():
            if option.name in spec.options:
                value = _given(kind, spec, option)
                if _held(value):
                    options[option.name] = _each(value, lambda one: self.build("retriever", one, filled))
        return self.get(kind, spec.name)(**options, **given)

    def within(self, spec: Spec) -> list[tuple[str, Spec]]:
        """A retriever and all that its options name, each with what tells it from the others (empty for itself)."""
        found = [("", spec)]
        for option in self.options("retriever", spec.name).values():
            if option.name in spec.options:
                for number, one in enumerate(_held(_given("retriever", spec, option))):
                    path = f"{option.name}[{number}]."
                    found += [(path + further, inner) for further, inner in self.within(one)]
        return found


def _given(kind: Kind, spec: Spec, option: Option) -> Any:
    """What a spec gives for an option, converted.

    Raises:
        UsageError: it is no value of the option's type.
    """
    try:
        return convert(spec.options[option.name], option.annotation)
    except ValueError as error:
        raise UsageError(f"{kind} {spec.name}: {option.name}: {error}") from None


def _held(value: Any) -> list[Spec]:
    """The retrievers that a converted option names."""
    return [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, Spec)]


def _each(value: Any, what: Callable[[Spec], Any]) -> Any:
    """The same with every retriever that it names replaced."""
    if isinstance(value, Spec):
        return what(value)
    return type(value)(_each(one, what) for one in value) if _held(value) else value


def _imports(file: Path, folder: Path) -> Iterator[Path]:
    """The files in a folder that a file imports, wherever in it; none where it is not Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(folder, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = [folder, *file.parents][min(node.level, len(file.parents))]
            module = node.module or ""
            names = [(above, module), *((above, f"{module}.{alias.name}") for alias in node.names)]
        else:
            continue
        for above, name in names:
            path = above
            for part in filter(None, name.split(".")):  # a package before what is in it
                path = path / part
                for found in (path.with_name(f"{part}.py"), path / "__init__.py"):
                    if found.is_file() and found.is_relative_to(folder):
                        yield found


def _line_in(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno and error.filename == str(file):
        return f":{error.lineno}"
    trace, line = error.__traceback__, None
    while trace:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f":{line}" if line else ""


_WORDS = {int: "a whole number", float: "a number", str: "text"}
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def convert(value: Any, annotation: Any) -> Any:
    """A value from text or YAML as the annotation's type; lists are written ``3+4``.

    Raises:
        ValueError: what was got and what was expected.
    """
    if annotation is Inner:
        try:
            return value if isinstance(value, Spec) else spec_of(value, "a retriever")
        except UsageError as error:
            raise ValueError(str(error)) from None
    if isinstance(annotation, typing.NewType):
        annotation = annotation.__supertype__
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (Any, inspect.Parameter.empty, object):
        return value
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and (value is None or (isinstance(value, str) and value.lower() == "none")):
            return None
        problems = []
        for argument in (a for a in arguments if a is not type(None)):
            try:
                return convert(value, argument)
            except ValueError as error:
                problems.append(str(error))
        raise ValueError(problems[0] if len(problems) == 1 else f"got {value!r}: " + "; ".join(problems))
    if origin is Literal:
        for choice in arguments:
            if value == choice or str(value) == str(choice):
                return choice
        raise ValueError(f"expected one of {', '.join(map(str, arguments))}, got {value!r}")
    if origin in (list, tuple, set, frozenset, abc.Sequence) or annotation in (list, tuple):
        of = arguments[0] if arguments else str
        parts = value.split("+") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
        kind = list if origin is abc.Sequence else origin or annotation
        return kind(convert(part, of) for part in parts)
    if annotation is bool:
        if str(value).lower() in _BOOLEANS:
            return _BOOLEANS[str(value).lower()]
        raise ValueError(f"expected true or false, got {value!r}")
    if isinstance(value, bool) and annotation in (int, float, str):
        raise ValueError(f"expected {_WORDS[annotation]}, got {value!r}")
    if annotation in (int, float):
        try:
            number = annotation(value if isinstance(value, str) else repr(value))
        except ValueError:
            raise ValueError(f"expected {_WORDS[annotation]}, got {value!r}") from None
        return number
    if annotation is Path and isinstance(value, str) and value:
        try:
            return Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError(f"expected a path, got {value!r}: {error}") from None
    if annotation is str and isinstance(value, (str, int, float)):
        return str(value)
    if origin in (dict, abc.Mapping, abc.MutableMapping) and isinstance(value, dict):
        return {convert(key, arguments[0]): convert(item, arguments[1]) for key, item in value.items()}
    if inspect.isclass(annotation) and isinstance(value, annotation):
        return value
    raise ValueError(f"expected {getattr(annotation, '__name__', annotation)}, got {value!r}")
