"""The command line: ``icr-bench COMMAND``, a function each."""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
import shutil
import signal
import sys
import types
import typing
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from icr_bench.benchmarks.base import DataError
from icr_bench.harness import suite as suites
from icr_bench.harness import train as recipes
from icr_bench.harness.errors import DATA, EXTRA, FAILED, INTERRUPTED, OK, USAGE, UsageError, unknown
from icr_bench.harness.metrics import DEFINITIONS
from icr_bench.harness.registry import Kind, Registry
from icr_bench.harness.spec import check_text, parse_bytes, parse_numbers, parse_share, parse_sizes, parse_spec
from icr_bench.retrievers.base import Inner, MissingExtra
from icr_bench.retrievers.weights import SHIPPED, CacheFolder, Model, shipped

if TYPE_CHECKING:
    from icr_bench.harness.folder import Record

RUNS = Path("results/runs")

EXIT_CODES = (
    "exit codes: 0 ok; 1 a cell failed, a table got worse, or nothing keeps the limits; "
    "2 usage (flags, names, keys, sizes, suite file, output folder, plug-in); "
    "3 data; 4 a missing extra; 130 interrupted"
)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="icr-bench",
        description="Compare retrievers as the corpus grows: recall, latency and memory for every N.",
        epilog=EXIT_CODES,
    )
    top.add_argument("--version", action="version", version=f"icr-bench {version('icr-bench')}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, epilog=EXIT_CODES, allow_abbrev=False)
        sub.add_argument(
            "--plugin", action="append", metavar="FILE", help="a Python file that defines RETRIEVERS or BENCHMARKS"
        )
        return sub

    run = command("run", "compute the cells of a suite and print its tables; a rerun computes what is missing")
    plan = command("plan", "what the cells of a suite would take, from short calibrations; computes none of them")
    diagnose = command("diagnose", "why recall falls: what attention sees in every layer, over the cells of a suite")
    spec = "NAME or NAME:key=value,key=value; may be repeated; label= renames its rows"
    for sub in (run, plan, diagnose):
        sub.add_argument("suite", nargs="?", metavar="SUITE", help="a YAML file or a name (icr-bench list suites)")
        sub.add_argument("-b", "--benchmark", action="append", metavar="SPEC", help=spec)
        sub.add_argument("-r", "--retriever", action="append", metavar="SPEC", help=spec)
        sub.add_argument("-n", metavar="SIZES", help="corpus sizes, such as 46,500,1k,2.5k,all (the suite's, else all)")
        sub.add_argument("-k", metavar="CUTOFFS", help="metric cut-offs; the largest is the depth kept (1,2,5,10)")
        sub.add_argument("--seed", metavar="SEEDS", help="seeds, such as 0,1; each is a set of cells (0)")
        sub.add_argument("--queries", metavar="M", help="a seeded sample of M declared queries (all)")
        sub.add_argument("--latency-queries", metavar="M", help="queries timed one by one (50)")
        sub.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (auto)")
        sub.add_argument("--dtype", metavar="TYPE", help=f"of model weights: {', '.join(suites.DTYPES)} (auto)")
        sub.add_argument("--timeout", metavar="S", help="seconds that a cell may take")
        sub.add_argument("--budget", metavar="B", help="what services may take: 200ktokens, or money such as 2.50")
        sub.add_argument("--memory-limit", metavar="B", help="resident bytes that a cell may use, such as 8GB")
    for sub, ending in ((run, ""), (diagnose, "-diagnosis")):
        sub.add_argument("-o", "--output", metavar="DIR", type=Path, help=f"folder of the run ({RUNS}/<suite>{ending})")
        sub.add_argument("--fresh", action="store_true", help="delete the folder's cells first")
        sub.add_argument("--retry-failed", action="store_true", help="compute failed cells again")
    run.add_argument("--dry-run", action="store_true", help="what plan prints: tokens and cost, and nothing is asked")
    diagnose.add_argument("--layers", metavar="L", help="to look at, such as 0,5,16 (all)")
    diagnose.add_argument("--heads", metavar="H", help="to look at, such as 0,1 (all)")
    diagnose.add_argument(
        "--ties", choices=("miss", "hit"), default="miss", help="what a gold whose score another document has counts as"
    )
    diagnose.add_argument(
        "--tokens", choices=("text", "block"), default="text", help="a document's tokens that MaxSim compares"
    )
    diagnose.add_argument(
        "--per-query", action="store_true", help="keep what the best heads rank first, and the digits' probabilities"
    )

    build = command("build", "make a paper's evaluation corpus from its source, as a folder in BEIR layout")
    build.add_argument("name", metavar="NAME", help="msmarco, hotpotqa, nq, limit, limit-small, obliq-math and so on")
    build.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder to write")
    build.add_argument("--source", metavar="S", default="hub", help="hub, zip (BEIR's archive) or a folder (hub)")
    build.add_argument("--miner", metavar="SPEC", default="bm25", help="bm25, dense:model=..., or a file of negatives")
    build.add_argument("--split", metavar="NAME", help="of the judgments (the paper's)")
    build.add_argument("--queries", metavar="M", help="drawn by the seed (400 where the corpus is mined, else all)")
    build.add_argument("--negatives", metavar="M", help="mined for each query (24)")
    build.add_argument("-n", metavar="N", help="documents of the corpus (10,000; nq 8,607; limit: all)")
    build.add_argument("--revision", metavar="R", help="of the data set on the hub (the newest)")
    build.add_argument("--seed", metavar="S", default="0", help="of queries and of documents drawn at random (0)")
    build.add_argument("--device", metavar="DEVICE", default="auto", help="of a dense miner (auto)")
    build.add_argument("--cache", metavar="DIR", type=Path, help="archives and mined lists (~/.cache/icr-bench/build)")

    train = command("train", "train weights from a recipe; the same command goes on where an earlier one stopped")
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file or a name (icr-bench list recipes)")
    train.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="checkpoint, log and model")
    train.add_argument("--seed", metavar="S", type=int, help="in place of the recipe's")
    train.add_argument("--start", metavar="MODEL", help="in place of the recipe's model to go on from")
    train.add_argument("--device", metavar="DEVICE", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    train.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="a key of the recipe, such as blind=0, prompt.cap=300 or, of all stages, stages.jitter=1; may be repeated",
    )

    table = command("table", "tables of one or several runs")
    table.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="folders of runs")
    table.add_argument("--metric", action="append", metavar="M", help="such as hit@1; may be repeated")
    table.add_argument(
        "--reference", action="append", metavar="PAPER", help="published numbers beside (icr-bench list references)"
    )
    table.add_argument("--format", choices=("md", "csv", "latex", "json"), default="md", help="md by default")

    plot = command("plot", "scaling curves of runs, or losses of trainings, as PNG, SVG or PDF (extra report)")
    plot.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="folders of runs, or of trainings")
    plot.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help=".png, .svg or .pdf")
    plot.add_argument("--metric", metavar="M", default="hit@1", help="such as hit@1 (the default)")

    report = command("report", "runs as one HTML page that needs no network (extra report)")
    report.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="folders of runs")
    report.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help=".html")

    baseline = command("baseline", "write what compare needs of a run into one file, to be committed")
    baseline.add_argument("folder", metavar="DIR", type=Path, help="folder of a run")
    baseline.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="file to write (JSON)")

    compare = command("compare", "paired differences between two runs; exit code 1 where a cell is worse")
    compare.add_argument("base", metavar="BASE", type=Path, help="folder of a run, or a file of icr-bench baseline")
    compare.add_argument("new", metavar="NEW", type=Path, help="the same")
    compare.add_argument("--metric", action="append", metavar="M", help="may be repeated (hit@1 and ndcg@10)")
    compare.add_argument(
        "--tolerance",
        action="append",
        metavar="NAME=T",
        help="how much worse is accepted: hit@1=0.01, ndcg@10=2%%, or a cost, which is only judged if named: "
        "latency=50%%, index_time, memory, index_bytes; may be repeated (0 for metrics)",
    )
    compare.add_argument(
        "--other-data", action="store_true", help="where data differ, compare over the queries that both sides have"
    )
    for form in ("markdown", "json", "junit"):
        compare.add_argument(f"--{form}", metavar="FILE", type=Path, help=f"write the comparison as {form} too")

    curve = command("curve", "where recall falls below a level, where retrievers cross, and how costs grow with N")
    curve.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="folders of runs")
    curve.add_argument("--metric", metavar="M", default="hit@1", help="such as hit@1 (the default)")
    curve.add_argument("--level", metavar="L", action="append", help="between 0 and 1; may be repeated (0.9)")
    curve.add_argument("--extrapolate", action="store_true", help="go on beyond the largest N, marked so")
    curve.add_argument("--format", choices=("md", "json"), default="md", help="md by default")

    recommend = command("recommend", "which retriever to use at a corpus size, from measured cells")
    recommend.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="folders of runs")
    recommend.add_argument("-n", metavar="N", required=True, help="documents, such as 5k")
    recommend.add_argument("--metric", metavar="M", default="hit@1", help="such as hit@1 (the default)")
    recommend.add_argument("--min", metavar="L", help="the least that the metric may be, such as 0.9")
    recommend.add_argument("--max-latency", metavar="S", help="of 95%% of queries alone, such as 0.5s or 200ms")
    recommend.add_argument("--max-memory", metavar="B", help="of the process, and of a GPU, such as 8GB")
    recommend.add_argument("--format", choices=("md", "json"), default="md", help="md by default")

    claims = command("claims", "the BlockSearch paper's claims, judged on measured cells")
    claims.add_argument("file", metavar="FILE", type=Path, help="a YAML file that names families and records")
    claims.add_argument("-o", "--output", metavar="FILE", type=Path, help="Markdown file to write (standard output)")

    export = command("export", "write TREC runs and qrels of a run's finished cells")
    export.add_argument("folder", metavar="DIR", type=Path, help="folder of a run")
    export.add_argument("-o", "--output", metavar="DIR", type=Path, help="folder to write to (DIR/trec)")

    listing = command("list", "names that can be chosen")
    listing.add_argument(
        "what",
        choices=("retrievers", "benchmarks", "suites", "metrics", "recipes", "models", "references"),
        help="kind of name",
    )

    describe = command("describe", "what a retriever, benchmark, suite or metric is, and its options")
    describe.add_argument("name", metavar="NAME", help="any name that icr-bench list prints")

    doctor = command("doctor", "this machine, its software, and which extras are missing")
    doctor.add_argument("--format", choices=("text", "json"), default="text", help="json is what records hold")

    validate = command("validate", "check a retriever against the contract that every retriever must keep")
    validate.add_argument("spec", metavar="NAME", help="NAME or NAME:key=value,key=value")

    lint = command("lint", "check a benchmark's data; errors name file and line")
    lint.add_argument("spec", metavar="BENCHMARK", help="NAME or NAME:key=value,key=value")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        handler = globals()[f"_{options.command}"]
        code: int = handler(options, shlex.join(["icr-bench", *given]))
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _fail(error, USAGE)
    except DataError as error:
        return _fail(error, DATA)
    except MissingExtra as error:
        return _fail(error, EXTRA)
    except KeyboardInterrupt:
        kept = "; finished cells are kept, the same command goes on from there" if options.command == "run" else ""
        print(f"icr-bench: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone, as with `| head`
        return OK
    except OSError as error:  # a full disk, say; what was finished before is kept
        return _fail(UsageError(f"{error.filename or 'file'}: {error.strerror or error}"), USAGE)
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(error: Exception, code: int) -> int:
    print(f"icr-bench: {error}", file=sys.stderr)
    return code


def _run(options: argparse.Namespace, command: str) -> int:
    if options.dry_run:
        return _plan(options, command)
    return _compute(options, command, None)


def _diagnose(options: argparse.Namespace, command: str) -> int:
    look = {
        "layers": None if options.layers is None else parse_numbers(options.layers, "--layers", 0),
        "heads": None if options.heads is None else parse_numbers(options.heads, "--heads", 0),
        "ties": options.ties,
        "tokens": options.tokens,
        "per_query": options.per_query,
    }
    return _compute(options, command, look)


def _compute(options: argparse.Namespace, command: str, look: dict[str, Any] | None) -> int:
    """Run a suite's cells, or look into them, and print and keep the tables."""
    from icr_bench.harness import diagnose, tables
    from icr_bench.harness.display import display, reason, title
    from icr_bench.harness.export import safe_name
    from icr_bench.harness.folder import latest, write
    from icr_bench.harness.run import run

    suite = suites.assemble(options.suite, {key: getattr(options, key) for key in suites.KEYS})
    out: Path = options.output or RUNS / (suite.name + ("" if look is None else "-diagnosis"))
    check_text(str(out), "output folder")
    with display() as shown:
        outcome = run(suite, out, command, shown, fresh=options.fresh, retry_failed=options.retry_failed, look=look)
    folder = out / "tables"
    shutil.rmtree(folder, ignore_errors=True)  # they are made from the records again
    folder.mkdir()
    again = shlex.join(["icr-bench", "table", str(out)]) if look is None else command

    held = latest(out)
    if look is not None:  # of cells looked at in several ways, those of this command
        held = [record for record in held if diagnose.same_look(record["config"]["look"], look)]

    def build(records: list[Record], command: str) -> list[tables.Table]:
        return tables.build(records, None, command) if look is None else diagnose.tables(records, command)

    for table in build(held, again):
        name = f"{safe_name(table.benchmark)}-{safe_name(table.file) if table.file else table.name}"
        for form, ending in tables.ENDINGS.items():
            write(folder / f"{name}.{ending}", table.render(form))
    for table in build(outcome.records, command):
        print(table.render("md"))
    if look is not None:
        pictures = out / "pictures"
        shutil.rmtree(pictures, ignore_errors=True)
        pictures.mkdir()
        try:
            for picture in diagnose.draw(held, pictures):
                print(picture)
        except MissingExtra as error:
            print(f"icr-bench: no pictures: {error}", file=sys.stderr)
    print(f"{outcome.computed} cells computed, {outcome.reused} there already; records, rankings and tables: {out}")
    for record in outcome.failed:
        print(
            f"icr-bench: {title(record)}: {record['status']}: {reason(record)} (log: {out / record['log']})",
            file=sys.stderr,
        )
    return outcome.exit_code


def _plan(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness.display import display
    from icr_bench.harness.plan import plan, render

    suite = suites.assemble(options.suite, {key: getattr(options, key) for key in suites.KEYS})
    with display() as shown:
        planned = plan(suite, shown)
    print(render(planned), end="")
    return FAILED if any(cell.problem for cell in planned) else OK


def _build(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness.build import Wish, build

    def number(given: str | None, flag: str, lowest: int) -> int | None:
        return None if given is None else parse_numbers(given, flag, lowest)[0]

    sizes = None if options.n is None else parse_sizes(options.n)
    if sizes is not None and (len(sizes) != 1 or not isinstance(sizes[0], int)):
        raise UsageError(f"-n {options.n!r}: expected one number of documents, such as 10k")
    wish = Wish(
        name=options.name,
        source=options.source,
        miner=options.miner,
        split=options.split,
        queries=number(options.queries, "--queries", 1),
        negatives=number(options.negatives, "--negatives", 0),
        documents=None if sizes is None else int(sizes[0]),
        revision=options.revision,
        seed=parse_numbers(options.seed, "--seed", 0)[0],
    )
    cache = options.cache or Path.home() / ".cache" / "icr-bench" / "build"
    told = build(wish, options.output, cache, options.device)
    own = ",exclude_self=true" if told["exclude_self"] else ""
    print(
        f"{options.output}: {told['queries']:,} queries, {told['documents']:,} documents; "
        f"icr-bench run -b beir:path={options.output}{own},label={options.name} -r bm25"
    )
    return OK


def _train(options: argparse.Namespace, command: str) -> int:
    return recipes.train(
        options.recipe,
        options.output,
        seed=options.seed,
        start=options.start,
        device=options.device,
        changes=options.set or (),
    )


def _table(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness import references, tables

    records = _records(options.folders)
    metrics = [metric for given in options.metric or () for metric in given.split(",")] or None
    built = tables.build(records, metrics, command)
    for paper in options.reference or ():
        built = references.beside(built, records, paper)
    if options.format == "json":
        import json

        print(json.dumps([table.as_dict() for table in built], indent=1))
    else:
        print("\n".join(table.render(options.format) for table in built), end="")
    return OK


def _records(folders: Sequence[Path]) -> list[Record]:
    from icr_bench.harness.folder import merge

    records = [record for _, record in merge(folders)]
    if not records:
        raise UsageError(f"{', '.join(map(str, folders))}: no finished cells yet")
    return records


def _plot(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness import tables
    from icr_bench.harness.plot import LOG, plot, plot_training

    if all((folder / LOG).is_file() for folder in options.folders):
        plot_training(options.folders, options.output)
        print(options.output)
        return OK
    plot(tables.quality(tables.build(_records(options.folders), [options.metric], command)), options.output)
    print(options.output)
    return OK


def _report(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness.report import report

    count = report(options.folders, options.output, command)
    print(f"{options.output}: {count} cells")
    return OK


def _baseline(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness.answers import write_baseline

    count = write_baseline(options.folder, options.output, command)
    print(f"{options.output}: {count} cells")
    return OK


def _compare(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness import compare
    from icr_bench.harness.answers import read
    from icr_bench.harness.folder import write

    metrics = [metric for given in options.metric or () for metric in given.split(",")] or None
    tolerances = dict(compare.parse_tolerance(text) for text in options.tolerance or ())
    base, new = read(options.base), read(options.new)
    if not base:
        raise UsageError(f"{options.base}: no finished cells yet")
    compared = compare.compare(base, new, metrics, tolerances, other_data=options.other_data)
    shown = compare.text(compared)
    forms = {"markdown": compare.text, "json": compare.as_json, "junit": compare.as_junit}
    for form, render in forms.items():
        if file := getattr(options, form):
            write(file, render(compared))
    print(shown, end="")
    return compared.exit_code


def _curve(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness import curve
    from icr_bench.harness.answers import read_runs
    from icr_bench.harness.metrics import parse_metric

    metric = parse_metric(options.metric)
    levels = [parse_share(part, "--level") for given in options.level or ["0.9"] for part in given.split(",")]
    render = curve.as_json if options.format == "json" else curve.text
    print(render(read_runs(options.folders), metric, levels, extrapolate=options.extrapolate), end="")
    return OK


def _recommend(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness import curve, recommend
    from icr_bench.harness.answers import read_runs
    from icr_bench.harness.metrics import parse_metric

    (n, *more) = parse_sizes(options.n)
    if more or not isinstance(n, int):
        raise UsageError(f"-n {options.n!r}: expected one number of documents, such as 5k")
    wish = recommend.Wish(
        n,
        parse_metric(options.metric),
        None if options.min is None else parse_share(options.min, "--min", whole=True),
        None if options.max_latency is None else recommend.parse_seconds(options.max_latency),
        None if options.max_memory is None else parse_bytes(options.max_memory, "--max-memory"),
    )
    entries = read_runs(options.folders)
    advices = recommend.advise(curve.curves(entries, wish.metric), wish, curve.failures(entries))
    print(recommend.as_json(advices) if options.format == "json" else recommend.text(advices), end="")
    return recommend.exit_code(advices)


def _claims(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness import claims
    from icr_bench.harness.folder import write

    found = claims.gather(*claims.load(options.file))
    if not found:
        raise UsageError(f"{options.file}: its records hold no cell of its families")
    text = claims.render(found, command)
    if options.output:
        write(options.output, text)
        print(options.output)
    else:
        print(text, end="")
    return OK


def _export(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness.export import export

    for file in export(options.folder, options.output or options.folder / "trec"):
        print(file)
    return OK


def _list(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness import references

    registry = Registry(options.plugin or ())
    names = {
        "retrievers": registry.names("retriever"),
        "benchmarks": registry.names("benchmark"),
        "suites": suites.names(),
        "metrics": [f"{name}@k" for name in DEFINITIONS],
        "recipes": recipes.names(),
        "models": shipped(),
        "references": references.names(),
    }
    print("\n".join(names[options.what]))
    return OK


def _describe(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness import references

    registry = Registry(options.plugin or ())
    name: str = options.name
    kinds: tuple[Kind, ...] = ("retriever", "benchmark")
    found = [_describe_target(registry, kind, name) for kind in kinds if name in registry.names(kind)]
    if name in suites.names():
        found.append(f"suite {name}\n\n{suites.text(name)}")
    if name in recipes.names():
        found.append(f"recipe {name}\n\n{recipes.text(name)}")
    if name in shipped():
        found.append(f"model {name}\n\n{(SHIPPED / name / 'README.md').read_text(encoding='utf-8')}")
    if name in references.names():
        found.append(references.describe(name))
    metric = name.partition("@")[0]
    if metric in DEFINITIONS:
        found.append(f"metric {metric}@k\n\n{DEFINITIONS[metric]}\n")
    if not found:
        known = [*registry.names("retriever"), *registry.names("benchmark"), *suites.names(), *DEFINITIONS]
        known += [*recipes.names(), *shipped(), *references.names()]
        raise unknown("name", name, known)
    print("\n".join(found), end="")
    return OK


def _describe_target(registry: Registry, kind: Kind, name: str) -> str:
    lines = [f"{kind} {name}", "", inspect.getdoc(registry.get(kind, name)) or "(no description)", "", "options:"]
    for option in registry.options(kind, name).values():
        default = "required" if option.required else f"default {option.default}"
        lines.append(f"  {option.name}= ({_type(option.annotation)}; {default})")
    if kind == "benchmark":
        from icr_bench.harness.prepare import COMMON_HELP

        lines += ["", "options of every benchmark:"] + [f"  {key}= {text}" for key, text in COMMON_HELP.items()]
    else:
        lines += ["  label= the name of the rows"]
    return "\n".join(lines) + "\n"


_WORDS = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "Path": "path"}


def _type(annotation: Any) -> str:
    """An option's type in words."""
    if typing.get_origin(annotation) is Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join("none" if a is type(None) else _type(a) for a in typing.get_args(annotation))
    if annotation is Model:
        return "hub id or path"
    if annotation is Inner:
        return "retriever"
    if annotation is CacheFolder:
        return "path"
    if typing.get_origin(annotation) is tuple:
        return f"{_type(typing.get_args(annotation)[0])}s joined by +"
    name = getattr(annotation, "__name__", str(annotation))
    return _WORDS.get(name, name)


def _doctor(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness import environment

    told = environment.environment()
    if options.format == "json":
        import json

        print(json.dumps(told, indent=1))
    else:
        print(environment.doctor(told), end="")
    return OK


def _validate(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness.prepare import place, takes_place
    from icr_bench.harness.validate import validate

    registry = Registry(options.plugin or ())
    spec = parse_spec(options.spec)
    registry.resolve("retriever", spec)
    device, dtype = place("auto", "auto") if takes_place(registry, spec) else ("cpu", "float32")
    filled = {"device": device, "dtype": dtype, "seed": 0}
    try:
        registry.build("retriever", spec, filled)
    except (ValueError, TypeError) as error:
        raise UsageError(f"retriever {spec.name}: {error}") from error
    except (Exception, SystemExit):
        pass  # what the first check reports
    results = validate(lambda: registry.build("retriever", spec, filled))
    for result in results:
        print(f"{'ok  ' if result.ok else 'FAIL'} {result.name}" + (f": {result.problem}" if result.problem else ""))
    failed = sum(not result.ok for result in results)
    print(f"{spec.name}: {len(results) - failed} of {len(results)} checks hold")
    return FAILED if failed else OK


def _lint(options: argparse.Namespace, command: str) -> int:
    from icr_bench.harness.prepare import load_benchmark, prepare_benchmark

    registry = Registry(options.plugin or ())
    asked = prepare_benchmark(registry, parse_spec(options.spec), None)
    benchmark = load_benchmark(registry, asked, (0,))[0]
    for warning in benchmark.warnings:
        print(f"warning: {warning}")
    print(
        f"{asked.spec.row}: {len(benchmark.documents):,} documents, {len(benchmark.queries):,} declared queries, "
        f"{len(benchmark.golds):,} gold documents, no errors"
    )
    return OK


if __name__ == "__main__":
    sys.exit(main())
