"""Rules of the house that no linter knows: names, what may be in the repository, what start-up may load."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks.peers.benchmarks import BENCHMARKS

import octjepa

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OWN_CODE = [*SOURCES, *TESTS]
PARTS_OF_BENCHMARKS = {
    "__main__",
    "marked_tables",
    "packaged_weights",
    "performance_aims",
    "phantom_measures",
    "segmenter_features",
    "spectral",
    "surface_tokens",
    "svg",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def distribution_of(need: str) -> str:
    """Normalised name at the head of a requirement: "PyYAML>=6" -> "pyyaml"."""
    return re.split(r"[^A-Za-z0-9_.-]", need, maxsplit=1)[0].lower().replace("_", "-")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_a_module_is_named_after_what_it_holds_and_has_a_docstring() -> None:
    refused = {"util", "utils", "helper", "helpers", "manager", "common", "misc"}
    vague = [name_of(path) for path in SOURCES if refused & set(re.split(r"[_/.]", name_of(path)))]
    assert not vague, f"name them after what they hold: {vague}"
    silent = [name_of(path) for path in SOURCES if not ast.get_docstring(parsed(path))]
    assert not silent, f"say on top what it is, what enters and what leaves: {silent}"


def test_public_functions_and_classes_have_docstrings() -> None:
    methods_of: dict[Path, list[tuple[ast.ClassDef, ast.FunctionDef]]] = {}
    documented: dict[Path, set[str]] = {}  # folder -> methods with a docstring: of alike classes one documents all
    for path in SOURCES:
        classes = [node for node in parsed(path).body if isinstance(node, ast.ClassDef)]
        methods = [(owner, item) for owner in classes for item in owner.body if isinstance(item, ast.FunctionDef)]
        methods_of[path] = methods
        documented.setdefault(path.parent, set()).update(item.name for _, item in methods if ast.get_docstring(item))
    missing = []
    for path, methods in methods_of.items():
        for owner, item in [(None, node) for node in parsed(path).body] + methods:
            if not isinstance(item, ast.FunctionDef | ast.ClassDef) or item.name.startswith("_"):
                continue
            if ast.get_docstring(item) or "overload" in {ast.unparse(mark) for mark in item.decorator_list}:
                continue
            if owner is None or not (
                owner.bases or item.name in documented[path.parent]
            ):  # a base documents its methods
                missing.append(f"{name_of(path)}:{item.lineno} {item.name}")
    assert not missing, "\n".join(missing)


def test_the_formatter_formats_every_line() -> None:
    """No comment keeps a statement from ruff: aligned numbers are a constant, or a file of data."""
    folders = ("src", "tests", "benchmarks", "examples", "scripts")
    sources = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    marks = re.compile(r"#\s*fmt:\s*(skip|off)\s*$", re.MULTILINE)
    assert len(sources) > 800
    assert not [name_of(path) for path in sources if marks.search(path.read_text(encoding="utf-8"))]


def test_no_exception_is_swallowed() -> None:
    swallowed = []
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = "everything" if node.type is None else ast.unparse(node.type)
                silent = all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
                if silent and caught in {"everything", "Exception", "BaseException"}:
                    swallowed.append(f"{name_of(path)}:{node.lineno} catches {caught} and says nothing")
    assert not swallowed, "\n".join(swallowed)


def test_no_pickle_is_ever_loaded() -> None:
    refused = []
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                if modules == {"pickle", "UnpicklingError"}:
                    continue  # what torch.load raises of a file that is not a plain checkpoint
                if modules & {"pickle", "cPickle", "dill", "cloudpickle", "joblib"}:
                    refused.append(f"{name_of(path)}:{node.lineno}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "np.load"}:
                allows = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if allows.get("weights_only", "True") != "True" or allows.get("allow_pickle", "False") != "False":
                    refused.append(f"{name_of(path)}:{node.lineno}")
    assert not refused, "\n".join(refused)


def test_no_test_imports_a_private_name() -> None:
    private = []
    for path in TESTS:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octjepa"):
                names = [alias.name for alias in node.names if re.match(r"_[a-z]", alias.name)]
                private += [f"{name_of(path)}:{node.lineno} {name}" for name in names]
    assert not private, "\n".join(private)


def test_start_up_does_not_pay_for_torch() -> None:
    heavy = "torch", "sklearn", "matplotlib", "pandas", "scipy"
    code = f"import octjepa.cli, sys; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [], "import octjepa.cli loads these at once; import them where they are used"


def test_every_library_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = project["dependencies"] + [need for extra in project["optional-dependencies"].values() for need in extra]
    declared = {distribution_of(need) for need in needs}
    providers = importlib.metadata.packages_distributions()
    missing = set()
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            for top in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"octjepa"}:
                if not declared & {distribution_of(provider) for provider in providers.get(top, [top])}:
                    missing.add(f"{name_of(path)}:{node.lineno} imports {top}")
    assert not missing, "\n".join(sorted(missing))


# The repository

MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|home|root|Users|mnt|opt)/\w|[A-Z]:\\\\?Users")
PRIVATE_INDEX = re.compile(
    r"--(?:extra-)?index-url[ =]\S|--find-links[ =]\S|https?://[^\s\"')]*/simple\b|\+cpu\b(?!\")"
)
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cff", ".cfg", ".html", ".j2", ".json", ".sh", ""}


def test_no_tracked_file_names_a_position_on_one_machine() -> None:
    found = []
    for path in tracked_files():
        if path.suffix in TEXT and path != Path(__file__):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if MACHINE_PATHS.search(line):
                    found.append(f"{name_of(path)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_pins_are_names_and_versions_only() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert len(pins) > 30
    wrong = [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", pin)]
    assert not wrong, f"only name==version may stand in constraints.txt (scripts/lock writes it): {wrong}"
    for path in (ROOT / "pyproject.toml", ROOT / "Makefile"):
        assert not PRIVATE_INDEX.search(path.read_text()), f"{path.name} names a package index"


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {distribution_of(need) for need in wanted} - {"octjepa"}  # dev names the other extras
    for extra in project["optional-dependencies"].values():
        names |= {distribution_of(need) for need in extra} - {"octjepa"}
    pinned = {distribution_of(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert names <= pinned, f"make lock: {names - pinned} are not in constraints.txt"


def test_nothing_made_is_tracked_and_nothing_tracked_is_large() -> None:
    for path in tracked_files():
        name = name_of(path)
        assert not re.search(r"(^|/)(\.venv|__pycache__|\.mypy_cache|\.ruff_cache|build|dist)/|\.pyc$", name), name
        is_weights = name.startswith(("src/octjepa/weights/", "benchmarks/records/exam/starts/"))
        most = 15_000_000 if is_weights else 2_000_000
        assert path.stat().st_size < most, f"{name} has {path.stat().st_size} bytes"


def test_licence_version_and_citation_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert octjepa.__version__ == project["version"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {project['version']}\n" in citation
    assert "license: Apache-2.0\n" in citation
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changes or f"## [{project['version']}]" in changes


def test_scripts_run_from_a_checkout() -> None:
    for script in (".ci/run", "scripts/setup", "scripts/lock"):
        path = ROOT / script
        assert os.access(path, os.X_OK), f"chmod +x {script}"
        assert "set -euo pipefail" in path.read_text()
        checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_every_benchmark_is_listed_with_what_it_measures() -> None:
    def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    listed = dict(line.split(maxsplit=1) for line in bench().stdout.splitlines())
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert set(listed) == modules - PARTS_OF_BENCHMARKS | set(BENCHMARKS)
    assert "usage:" in bench("start_up", "--help").stdout
    refused = bench("speed")
    assert refused.returncode == 2
    assert "no benchmark 'speed': there are step, ingest," in refused.stderr


def test_a_python_that_is_too_old_is_refused_early_and_clearly(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    old = tmp_path / "old_python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    message = subprocess.run(
        ["bash", str(tmp_path / "scripts" / "setup")],
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert message.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13 found" in message.stderr
    assert not (tmp_path / ".venv").exists()


# The tests themselves


def test_shapes_in_signatures_are_checked_at_every_call() -> None:
    """conftest.py's import hook is on: without it every shape in a signature would be a comment."""
    import torch
    from jaxtyping import TypeCheckError

    from octjepa.model.positions import rope_tables

    cosine = rope_tables(torch.zeros(2, 5, 3), 12).cosine
    assert cosine.shape == (2, 1, 5, 12)
    with pytest.raises(TypeCheckError, match="coordinates"):
        rope_tables(torch.zeros(2, 5, 4), 12)


def test_no_function_of_a_package_has_the_name_of_a_module_in_it() -> None:
    """Importing the module would put it in the function's place, whenever that happens to be."""
    for init in (ROOT / "src" / "octjepa").rglob("__init__.py"):
        modules = {path.stem for path in init.parent.iterdir()}
        names = {node.name for node in parsed(init).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert not names & modules, name_of(init)
