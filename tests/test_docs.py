"""The documentation is true: links lead somewhere, and every command, option, recipe and target named exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octjepa.config import recipe_names

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def command_lines(text: str) -> Iterator[str]:
    """Every line in code blocks and inline code, continued lines joined, prompt and comment taken off."""
    for block, inline in CODE.findall(text):
        for line in (block or inline).replace("\\\n", " ").splitlines():
            yield re.sub(r"\s+#.*", "", line.strip().removeprefix("$ ").removeprefix(".venv/bin/"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
            assert (path.parent / target.partition("#")[0]).exists(), f"{name_of(path)} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_exist(path: Path, make_targets: set[str]) -> None:
    for line in command_lines(path.read_text(encoding="utf-8")):
        if line.startswith("make "):
            named = [word for word in shlex.split(line)[1:] if "=" not in word]
            assert set(named) <= make_targets, f"{name_of(path)}: {line}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_options_and_recipes_exist(path: Path, cli_commands: dict[str, Any]) -> None:
    for line in command_lines(path.read_text(encoding="utf-8")):
        words = line.split()
        if len(words) < 2 or words[0] != "octjepa" or words[1].startswith("-"):
            continue
        assert words[1] in cli_commands, f"{name_of(path)}: `{line}`: no such command"
        known = {option for parameter in cli_commands[words[1]].params for option in parameter.opts} | {"--help"}
        for word in words[2:]:
            option = word.strip("[]").partition("=")[0]
            assert not option.startswith("--") or option in known, f"{name_of(path)}: `{line}`: no option {option}"
        if words[1] in {"pretrain", "plan"} and words[2:] and re.fullmatch(r"[a-z][a-z0-9_]*", words[2]):
            assert words[2] in recipe_names(), f"{name_of(path)}: `{line}`: no recipe {words[2]}"
