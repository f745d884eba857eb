"""The documentation is true: what it links to and names exists: commands, options, recipes, keys, scripts, tests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octjepa.config import PRETRAINING, load_recipe

ROOT = Path(__file__).resolve().parents[2]
# The log is left out: it names files and commands as they were on its dates.
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
# What may stand before a command: variables of its environment, torchrun.
BEFORE = re.compile(r"^(?:[A-Z_]+=\S+ +)*(?:torchrun .*-m )?(?:\.venv/bin/)?(?=octjepa |python )")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def command_lines(text: str) -> Iterator[str]:
    """Every line in code blocks, fenced or indented, and inline code; prompt, comment and environment taken off."""
    blocks = FENCED.findall(text)
    prose = FENCED.sub("", text)
    blocks += INDENTED.findall(prose)
    blocks += [inline.replace("\n", " ") for inline in INLINE.findall(INDENTED.sub("", prose))]
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            bare = re.sub(r"\s+#.*", "", line.strip().removeprefix("$ "))
            yield BEFORE.sub("", bare)


def anchors(path: Path) -> set[str]:
    """The places in a page that a link can lead to, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_begins_with_a_picture() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    assert sum(len(line.split()) for line in lines) <= 600
    assert any(line.startswith("![") for line in lines[:10])


def test_pages_are_few_and_short() -> None:
    """Records of decisions and pages that a script writes do not count."""
    uncounted = ("docs/decisions/", "docs/exam/", "docs/real/", "docs/zoo.md")
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if not name_of(path).startswith(uncounted)]
    assert len(pages) <= 33, [name_of(path) for path in pages]
    for path in pages:
        text = re.sub(r"^<!-- .*?^<!-- end", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        prose = INDENTED.sub("", FENCED.sub("", text)).splitlines()
        lines = [line for line in prose if line.strip() and not line.startswith(("|", "#", "!", "<"))]
        assert len(lines) <= 150, f"{name_of(path)}: {len(lines)} lines of prose"


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, location = target.partition("#")
            page = path.parent / file if file else path
            assert page.exists(), f"{name_of(path)} links to {target}"
            assert not location or location in anchors(page), f"{name_of(path)} links to {target}: no such heading"


def test_make_targets_exist(make_targets: set[str]) -> None:
    for path in DOCUMENTS:
        for line in command_lines(path.read_text(encoding="utf-8")):
            if line.startswith("make ") and path.parent.name != "lab":  # the log holds commands of their day
                named = [word for word in shlex.split(line)[1:] if "=" not in word]
                assert set(named) <= make_targets, f"{name_of(path)}: {line}"


def test_commands_options_and_recipes_exist(cli_commands: dict[str, Any]) -> None:
    for path in DOCUMENTS:
        tuning = {file.stem for file in (ROOT / "src/octjepa/tasks").rglob("recipes/*.yaml")}
        for line in command_lines(path.read_text(encoding="utf-8")):
            words = [word.strip("'\"") for word in line.split()]
            if len(words) < 2 or words[0] != "octjepa" or words[1].startswith("-"):
                continue
            message = f"{name_of(path)}: `{line}`"
            verb, *rest = words[1:]
            assert verb in cli_commands, f"{message}: no such command"
            known = {option for parameter in cli_commands[verb].params for option in parameter.opts} | {"--help"}
            for number, word in enumerate(rest):
                option = word.strip("[]").partition("=")[0]
                assert not option.startswith("--") or option in known, f"{message}: no option {option}"
                if option == "--recipe" and re.fullmatch(r"[a-z][a-z0-9_]*", rest[number + 1]):
                    assert rest[number + 1] in PRETRAINING.names(), f"{message}: no recipe {rest[number + 1]}"
            if verb in {"pretrain", "plan"} and rest and re.fullmatch(r"[a-z][a-z0-9_]*", rest[0]):
                assert rest[0] in PRETRAINING.names(), f"{message}: no recipe {rest[0]}"
                given = re.findall(r"""["']?([a-z_]+\.[a-z_]+=(?:\[[^\]]*\]|[^\s"'.]+))["']?""", line)
                given = [override for override in given if ":" not in override]  # module:Class, a file of the reader
                load_recipe(rest[0], given)  # refuses an unknown key and an invalid value
            if verb == "finetune" and rest and re.fullmatch(r"[a-z][a-z0-9_]*", rest[0]):
                assert rest[0] in tuning, f"{message}: no recipe {rest[0]}"


def test_scripts_and_their_options_exist() -> None:
    for path in DOCUMENTS:
        for line in command_lines(path.read_text(encoding="utf-8")):
            package = re.match(r"(?:make|python -m) (?:benchmarks\.)?(exam)\b", line)
            script = re.match(r"python ((?:tests|benchmarks)/\S+\.py)", line)
            listed = re.match(r"python -m benchmarks (\w+)", line)
            if package or script or listed:
                if script:
                    file = ROOT / script[1]
                else:
                    file = ROOT / "benchmarks" / (f"{listed[1]}.py" if listed else "exam/__main__.py")
                assert file.is_file(), f"{name_of(path)}: `{line}`: no {file.name}"
                needs_package = "\nfrom benchmarks" in file.read_text(encoding="utf-8")
                assert not (script and needs_package), f"{name_of(path)}: `{line}`: runs as `python -m benchmarks NAME`"
                for option in re.findall(r"--[a-z-]+", line):
                    assert f'"{option}"' in file.read_text(encoding="utf-8"), f"{name_of(path)}: `{line}`: no {option}"


def test_files_and_tests_that_are_named_exist() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for named in re.findall(r"`((?:tests|benchmarks|scripts|docs|lab)/[\w./-]+)(?:::|`)", text):
            assert (ROOT / named).exists(), f"{name_of(path)} names {named}"
        for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{name_of(path)} names {file}::{test}"
