"""How easy the code is to take over: import graph, duplicated ideas, and files to read for four walks.

    python benchmarks/structure.py [--walks] [--write]

Everything is computed from the source, except the walks (`--walks`), which run small jobs under `sys.setprofile` and
count the source files in which a function of the walk runs (`WALKS`). `--write` puts the table into CONTRIBUTING.md.
`make check` runs the part without walks as a test (tests/house/test_structure.py) against the limits in `LIMITS`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
MAX_PARAMETERS = 8
LOOP = "octjepa.train.loop"
# Measure -> the most that `make check` allows. A limit only falls.
LIMITS: dict[str, int] = json.loads((ROOT / "benchmarks" / "structure_limits.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Import:
    """An import of one module of octjepa by another. `late`: inside a function, so at run time."""

    source: str
    target: str
    late: bool


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {}
    for path in sorted((SRC / "octjepa").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    """The parsed source of a module."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _import_nodes(node: ast.AST, late: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late
        yield from _import_nodes(child, late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


@cache
def imports(module: str) -> tuple[Import, ...]:
    """The imports of other modules of octjepa; imports under TYPE_CHECKING are left out."""
    found = []
    for node, late in _import_nodes(tree(module)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif node.level:
            continue  # relative imports are not used in src
        else:
            base = node.module or ""
            targets = [name if (name := f"{base}.{alias.name}") in modules() else base for alias in node.names]
        found += [Import(module, target, late) for target in dict.fromkeys(targets) if target in modules()]
    return tuple(found)


def _with_packages(module: str) -> list[str]:
    """A module and the packages that importing it loads first."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def loaded_by(module: str) -> set[str]:
    """All modules that importing `module` loads, by module-level imports."""
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        for name in _with_packages(waiting.pop()):
            if name in loaded or name not in modules():
                continue
            loaded.add(name)
            waiting += [one.target for one in imports(name) if not one.late]
    return loaded


def line_count(names: set[str]) -> int:
    """Lines of these modules."""
    return sum(len(modules()[name].read_text(encoding="utf-8").splitlines()) for name in names)


def package_circles() -> list[tuple[str, str]]:
    """Pairs of packages that import each other, at module level or at run time."""
    edges = set()
    for module in modules():
        for one in imports(module):
            a, b = _layer(one.source), _layer(one.target)
            if a and b and a != b:
                edges.add((a, b))
    return sorted((a, b) for a, b in edges if a < b and (b, a) in edges)


def module_circles() -> int:
    """Strongly connected groups of at least two modules (module-level imports), by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles = 0

    def visit(name: str) -> None:
        nonlocal circles
        index[name] = low[name] = len(index)
        stack.append(name)
        for one in imports(name):
            if one.late or one.target == name:
                continue
            if one.target not in index:
                visit(one.target)
                low[name] = min(low[name], low[one.target])
            elif one.target in stack:
                low[name] = min(low[name], index[one.target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            circles += len(group) > 1

    for name in modules():
        if name not in index:
            visit(name)
    return circles


def _layer(module: str) -> str:
    """The package of the layer contract that a module belongs to; empty for octjepa itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def run_time_imports_upwards() -> list[Import]:
    """Imports of a higher layer inside functions, or by name at run time, which import-linter does not see."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    rank = {}
    for number, line in enumerate(contract["contracts"][0]["layers"]):
        for name in re.split(r"[:|]", line):
            rank[name.strip().strip("()")] = number
    found = []
    for module in modules():
        own = rank.get(_layer(module))
        for one in imports(module):
            other = rank.get(_layer(one.target))
            if one.late and own is not None and other is not None and other < own:
                found.append(one)
    return found + [
        Import(module, target, True) for module, target in imports_by_name() if _above(rank, module, target)
    ]


def _above(rank: dict[str, int], module: str, target: str) -> bool:
    own, other = rank.get(_layer(module)), rank.get(_layer(target))
    return own is not None and other is not None and other < own


def imports_by_name() -> list[tuple[str, str]]:
    """(module, target) of every string in the source that names a module of octjepa, such as for `import_module`.

    A registry's group of entry points is not a module, although `octjepa.objectives` is the name of both.
    """
    found = []
    for module in modules():
        if module == "octjepa":
            continue  # its table of public names
        groups = set(_entry_point_groups(module))
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in groups:
                name = node.value.partition(":")[0]
                if name in modules() and name != "octjepa":
                    found.append((module, name))
    return found


def _entry_point_groups(module: str) -> Iterator[ast.expr]:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Registry":
            yield from node.args[1:2]


def functions_with_many_parameters() -> list[str]:
    """Functions with more than `MAX_PARAMETERS` parameters, `self` not counted; the command line is left out."""
    found = []
    for module in modules():
        if _layer(module) == "cli":
            continue
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([name for name in names if name not in ("self", "cls")]) > MAX_PARAMETERS:
                    found.append(f"{module}:{node.lineno} {node.name}")
    return found


def occurrences(pattern: str) -> int:
    """Matches of a regular expression in the package's source."""
    return sum(len(re.findall(pattern, path.read_text(encoding="utf-8"))) for path in modules().values())


def definitions(name: str) -> int:
    """Functions of this name in the package and in benchmarks."""
    paths = [*modules().values(), *(ROOT / "benchmarks").rglob("*.py")]
    return sum(len(re.findall(rf"^ *def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE)) for path in paths)


def measure() -> dict[str, int]:
    """Every measure that needs no run."""
    loaded = loaded_by(LOOP)
    return {
        "files loaded by importing train.loop": len(loaded),
        "lines loaded by importing train.loop": line_count(loaded),
        "direct imports of train.loop": len({one.target for one in imports(LOOP) if not one.late}),
        f"functions with more than {MAX_PARAMETERS} parameters (without cli)": len(functions_with_many_parameters()),
        "`dict[str, Any]`": occurrences(r"dict\[str, Any\]"),
        "`# fmt: skip`": occurrences(r"# fmt: skip"),
        "circles of modules": module_circles(),
        "pairs of packages that import each other": len(package_circles()),
        "run-time imports upwards": len(run_time_imports_upwards()),
        "implementations of `take_step`": definitions("take_step"),
        "files in src": len(modules()),
        "lines in src": line_count(set(modules())),
    }


# The walks: the files that one reads to follow something through the code.


@dataclass(frozen=True)
class Walk:
    """What a walk follows. Functions are `path below octjepa:qualified name`.

    within: a file counts if one of its functions runs inside one of these. without: steps beside the walk, whose
    functions do not count.
    """

    within: tuple[str, ...]
    without: tuple[str, ...] = ()


# From the work on one file to its entry in the store, without the search for files and the report of the whole ingest;
# the loop's body with the samples it needs, without monitor and checkpoint; a probe and a fine-tuning without the
# command line, and the fine-tuning without the frozen probes beside it, which are the walk of a probe.
WALKS = {
    "from one DICOM file to the store": Walk(("ingest/build.py:_ingest", "ingest/one_file.py:ingest_one")),
    "one update of pretraining": Walk(
        ("train/loop.py:Trainer.fit", "views/loader.py:TrainingDataset.__getitem__"),
        ("train/loop.py:Trainer.monitor", "train/loop.py:Trainer.save"),
    ),
    "from embeddings to the metric of a probe": Walk(("evaluate/probe.py:run_probes",)),
    "one fine-tuning": Walk(("tasks/finetune/training.py:tune",)),
}


@contextmanager
def traced(walk: Walk) -> Iterator[set[str]]:
    """Collects the source files of octjepa in which a function runs in this walk.

    What runs because a module is imported on the way (its body, classes and `__getattr__`) is not part of the walk.
    """
    files: set[str] = set()
    package = str(SRC / "octjepa") + "/"
    depth = threading.local()

    def follow(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(package):
            return
        name = f"{code.co_filename.removeprefix(package)}:{code.co_qualname}"
        step = 1 if event == "call" else -1
        depth.within = getattr(depth, "within", 0) + step * (name in walk.within)
        depth.without = getattr(depth, "without", 0) + step * (name in walk.without)
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_qualname != "__getattr__"
        if event == "call" and is_function and depth.within > 0 and depth.without == 0:
            files.add(code.co_filename)

    sys.setprofile(follow)
    threading.setprofile(follow)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def walks() -> dict[str, set[str]]:
    """Walk -> its files, from a small job of each kind."""
    from octjepa.config import load_recipe
    from octjepa.ingest.build import build_store
    from octjepa.phantom import write_cohort
    from octjepa.store import Store

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_cohort(folder / "phantom", 8, 5, split_shares=(0.5, 0.25, 0.25))
        recipe = load_recipe("smoke_test", ["train.max_updates=1", "train.precision=fp32"])
        build_store([folder / "phantom"], folder / "store", recipe.preprocessing, workers=1)
        one_file = next((folder / "phantom").rglob("*.dcm"))
        ingested, updated, probed, tuned = WALKS.values()
        found = [_files(ingested, lambda: _ingest(one_file, folder, recipe))]
        store = Store.open(folder / "store")
        found.append(_files(updated, lambda: _pretrain(recipe, store, folder / "run")))
        _embed(folder)
        labels = ("--labels", _labels(folder), "--target", "drusen")
        table, out = str(folder / "run/embeddings.parquet"), str(folder / "run/probe.json")
        found.append(_files(probed, lambda: _cli("probe", table, *labels, "--out", out)))
        stages = ("stages.head=1", "stages.last=0", "stages.all=1")
        folders = ("--from", str(folder / "run"), "--store", str(folder / "store"), "--out", str(folder / "tuned"))
        found.append(_files(tuned, lambda: _cli("finetune", "finetune", *stages, *folders, *labels)))
    return dict(zip(WALKS, found, strict=True))


def _files(walk: Walk, work: Callable[[], None]) -> set[str]:
    with traced(walk) as files:
        work()
    assert files, f"no function of {walk.within} ran"
    return files


def _labels(folder: Path) -> str:
    return str(folder / "phantom" / "truth" / "eyes.tsv")


def _ingest(file: Path, folder: Path, recipe: object) -> None:
    from octjepa.ingest.build import build_store

    build_store([file], folder / "one", recipe.preprocessing, workers=1)  # type: ignore[attr-defined]


def _pretrain(recipe: object, store: object, out: Path) -> None:
    from octjepa.train.loop import pretrain

    pretrain(recipe, store, out)  # type: ignore[arg-type]


def _embed(folder: Path) -> None:
    _cli(
        "embed", str(folder / "run"), "--store", str(folder / "store"), "--out", str(folder / "run/embeddings.parquet")
    )


def _cli(*arguments: str) -> None:
    from octjepa.cli import app

    app([*arguments, "--quiet"], standalone_mode=False)


def table(values: dict[str, int]) -> str:
    """Markdown rows: measure, value, limit."""
    lines = ["| measure | now | limit |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value:,} | {LIMITS.get(name, '')} |" for name, value in values.items())])


def main() -> None:
    """Prints the table; with --write puts it into CONTRIBUTING.md between its marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", action="store_true", help="also run and count the four walks (a minute)")
    parser.add_argument("--write", action="store_true", help="write the table into CONTRIBUTING.md")
    options = parser.parse_args()
    walked = walks() if options.walks else {}
    values = measure() | {name: len(files) for name, files in walked.items()}
    print(table(values))
    for name, files in walked.items():
        print(
            f"{name}: {' '.join(sorted(str(Path(file).relative_to(SRC / 'octjepa')) for file in files))}",
            file=sys.stderr,
        )
    for one in run_time_imports_upwards():
        print(f"upwards: {one.source} imports {one.target}", file=sys.stderr)
    for name in functions_with_many_parameters():
        print(f"many parameters: {name}", file=sys.stderr)
    if options.write:
        page = ROOT / "CONTRIBUTING.md"
        text = page.read_text(encoding="utf-8")
        marked = f"<!-- structure -->\n{table(values)}\n<!-- end of structure -->"
        page.write_text(re.sub(r"<!-- structure -->.*<!-- end of structure -->", marked, text, flags=re.S), "utf-8")


if __name__ == "__main__":
    main()
