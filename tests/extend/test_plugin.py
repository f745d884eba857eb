"""The example package: a wheel of it adds its parts to octjepa, and its code is what the pages show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from command_line import call

ROOT = Path(__file__).parents[2]
PLUGIN, PAGE = ROOT / "examples" / "plugin", ROOT / "docs" / "extend.md"
HEADINGS = {
    "reader": "File format",
    "objective": "Objective",
    "encoder": "Encoder",
    "probe": "Probe head",
    "task": "Task",
    "tracker": "Tracker",
}


def section(heading):
    """The text of the page under a heading."""
    page = PAGE.read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return text


@pytest.mark.parametrize("kind", HEADINGS)
def test_the_page_shows_the_code_that_is_tested(kind):
    page = section(HEADINGS[kind])
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert code == (PLUGIN / "src" / "octjepa_example" / f"{kind}.py").read_text(encoding="utf-8")
    assert page.count("\n") < 60
    declared = re.findall(r"^    (\w+ = \".*\")$", page, re.MULTILINE)
    project = (PLUGIN / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert declared
    assert set(declared) <= set(project)


@pytest.mark.slow
def test_the_tests_of_the_package_pass_against_its_wheel(tmp_path):
    """Built offline, unpacked as an installation does, tested from the package's own folder."""
    pytest.importorskip("setuptools", minversion="77")
    shutil.copytree(PLUGIN, tmp_path / "plugin")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=tmp_path / "plugin", check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("octjepa_example-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    shutil.rmtree(tmp_path / "plugin" / "src")
    paths = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path / "plugin",
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


def test_a_verb_of_a_package_is_run_and_its_failure_is_one_line(install_package):
    install_package(
        *("verbs_of_a_user", "octjepa.verbs", "greet = verbs_of_a_user:greet\nplan = verbs_of_a_user:greet"),
        "from octjepa.errors import UsageError\n\n"
        "def greet(name: str):\n    if name == 'nobody':\n        raise UsageError('nobody is here')\n"
        "    print('hello', name)\n",
    )
    done = call("greet", "world")
    assert (done.code, done.out) == (0, "hello world\n")
    done = call("greet", "nobody")
    assert (done.code, done.err) == (2, "octjepa: nobody is here\n")
    assert "hello" not in call("plan", "world").out  # built in
    assert call("unheard_of").code == 2


def test_a_verb_of_a_package_that_fails_on_import_is_one_line(install_package):
    install_package("broken_verbs", "octjepa.verbs", "break_it = broken_verbs:run", "import absent_library")
    done = call("break_it")
    assert done.code == 2
    assert re.fullmatch(
        r"octjepa: verb 'break_it' of package broken_verbs .*ModuleNotFoundError.*absent_library.*\n", done.err
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of peft on new versions of its own dependencies
def test_lora_by_peft_trains_its_adapters_alone():
    """The page's code: the loss falls, adapters alone change, and merged into the encoder they compute the same."""
    pytest.importorskip("peft")
    page = section("LoRA on a pretrained encoder")
    setup, training, merging = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    torch.manual_seed(0)
    scope: dict = {}
    exec(setup, scope)
    module, encoder = scope["module"], scope["encoder"]
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    images, labels = torch.randn(2, 1, *encoder.recipe.preprocessing.image_size), torch.tensor([0, 1])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    exec(training, scope | {"batches": [(images, labels)] * 8}, found := {})
    assert found["losses"][-1] < found["losses"][0]
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    with torch.no_grad():
        adapted = module(images)[1]
        exec(merging, scope)
        merged = encoder.module(trainable=False)
        assert torch.allclose(merged(images)[1], adapted, atol=1e-5)
    assert not any("lora" in name for name in merged.state_dict())
