"""The command `octjepa` itself: its group of commands, help, exit codes and --version."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octjepa.cli.failures import exit_with_message
from octjepa.outside import set_named
from octjepa.registry import Registry

FIRST_COMMANDS = ("segment", "view", "ingest", "pretrain", "probe", "report")
PACKAGE_VERBS: Registry[Callable[..., None]] = Registry("verb", "octjepa.verbs")


class Verbs(TyperGroup):
    """The group of verbs. Every foreseeable failure of a verb ends in one message and the right exit code.

    The arguments are recorded, because paths that the user names may be opened (`octjepa.outside`). A verb that is not
    built in is looked up among the entry points `octjepa.verbs` of installed packages.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None or cmd_name not in PACKAGE_VERBS:
            return built_in
        single = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
        single.command(cmd_name)(PACKAGE_VERBS.get(cmd_name))
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists the commands that most people need first, then the others."""
        helps = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                helps[name] = command.get_short_help_str(limit=70)
        width = max(map(len, helps), default=0)
        first = [(name.ljust(width), helps.pop(name)) for name in FIRST_COMMANDS if name in helps]
        rest = [(name.ljust(width), text) for name, text in helps.items()]
        for title, lines in (("Start with", first), ("All other commands", rest)):
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        set_named(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with exit_with_message(lambda: ctx.invoked_subcommand):
            return super().invoke(ctx)


app = typer.Typer(
    name="octjepa",
    cls=Verbs,
    help="Layers, thickness and fluid of retinal OCT scans, and 3D foundation models trained on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The console command. Usage errors exit with 2, as everywhere."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal's encoding cannot show
    app(prog_name="octjepa")


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"octjepa {version('octjepa')}")
        raise typer.Exit


@app.callback()
def _octjepa(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all results, log choices.")] = False,
) -> None:
    """Layers, thickness and fluid of retinal OCT scans, and 3D foundation models trained on them."""
    if verbose:
        log = logging.getLogger("octjepa")
        log.setLevel(logging.INFO)
        log.addHandler(logging.StreamHandler())
