"""The first moments of the console command."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap

import pytest

from octjepa.__main__ import main


class _CtrlC:
    """An import hook that is interrupted at octjepa.cli."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "octjepa.cli":
            raise KeyboardInterrupt


def test_ctrl_c_while_the_command_line_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "octjepa.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_CtrlC(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "octjepa: interrupted before anything started\n"


def test_every_option_of_every_verb_is_used() -> None:
    from octjepa.cli import app

    unused = []
    for command in app.registered_commands:
        assert command.callback is not None
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(command.callback))).body
        assert isinstance(function, ast.FunctionDef)
        used = {node.id for line in function.body for node in ast.walk(line) if isinstance(node, ast.Name)}
        unused += [
            f"{function.name} {one.arg}"
            for one in function.args.args
            if one.arg not in used and ast.unparse(one.annotation) not in ("Quiet", "AllowOutside")  # act by callbacks
        ]
    assert unused == []


def test_every_verb_prints_json_where_requested() -> None:
    """The README promises it of every command, `octjepa recipes copy` among them."""
    import typer

    from octjepa.cli import app

    commands = dict(typer.main.get_command(app).commands)
    for group in [name for name, command in commands.items() if hasattr(command, "commands")]:
        commands |= commands.pop(group).commands
    assert {"ingest", "pretrain", "copy"} <= set(commands)
    without = [
        name for name, one in commands.items() if not any("--json" in parameter.opts for parameter in one.params)
    ]
    assert without == []


def test_the_line_of_every_verb_in_help_is_a_whole_sentence() -> None:
    """Rich cuts what does not fit 80 columns; a verb's first sentence must, next to the longest name."""
    from command_line import call

    _, _, commands = call("--help").out.partition("Start with:")
    first, _, others = commands.partition("All other commands:")
    six = ["segment", "view", "ingest", "pretrain", "probe", "report"]
    assert [line.split()[0] for line in first.strip().splitlines()] == six
    lines = [*first.strip().splitlines(), *others.strip().splitlines()]
    assert len(lines) > 15
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_it_runs_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["octjepa", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("octjepa ")
