"""Reference pages generated from the code: recipe keys, reason codes, commands, the Python API.

`pages()` returns {path below docs/reference: Markdown}; hooks.py adds them to the site when it is built, so that they
are always up to date. `python scripts/site/reference.py FOLDER` writes them as files.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import octjepa


def pages() -> dict[str, str]:
    """{file name: Markdown} of every reference page."""
    return {
        "recipes.md": recipe_page(),
        "reasons.md": reason_page(),
        "cli.md": cli_page(),
        "python.md": python_page(),
    }


# Recipes


def recipe_page() -> str:
    """Every key of the three kinds of recipe, and the recipes that the package ships."""
    from octjepa.config import PRETRAINING
    from octjepa.tasks.finetune.recipe import RECIPES as FINETUNING
    from octjepa.tasks.segment.recipe import RECIPES as SEGMENTATION

    parts = [
        "# Recipe reference",
        "A recipe is a YAML file; `key=value` on the command line overrides one key. "
        "Sizes are `[slice, depth, column]`. "
        "Keys marked *machine* say where or how fast a run goes and are no part of its hash. "
        "`octjepa recipes list`, `octjepa recipes show NAME` and `octjepa recipes copy NAME` read the shipped ones.",
    ]
    for title, command, kind in (
        ("Pretraining", "octjepa pretrain", PRETRAINING),
        ("Fine-tuning", "octjepa finetune", FINETUNING),
        ("Segmentation", "octjepa segment", SEGMENTATION),
    ):
        parts += [f"## {title}", f"For `{command}`; shipped: {', '.join(f'`{name}`' for name in kind.names())}."]
        parts += list(_sections(kind.model, "", title))
    return "\n\n".join(parts) + "\n"


def _sections(model: type[BaseModel], prefix: str, title: str) -> Iterator[str]:
    """A heading, the docstring and a table of the keys of `model`, then the same of each section below it."""
    comments = _field_comments(model)
    lines, below = [], []
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        if section is not None:
            below.append((name, section))
            continue
        extra = field.json_schema_extra
        notes = ["*machine*"] if isinstance(extra, dict) and extra.get("machine") else []
        notes += [comments[name]] if name in comments else []
        lines.append(
            f"| `{prefix}{name}` | {_code(_type_of(model, name))} | {_default(field)} | {_cell('; '.join(notes))} |"
        )
    if prefix:
        yield f"### {title}: {prefix.rstrip('.')}"
    if model.__doc__:
        yield _prose(model.__doc__)
    if lines:
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *lines])
    for name, section in below:
        yield from _sections(section, f"{prefix}{name}.", title)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds (or may hold: `Section | None`); None where it holds a value."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _type_of(model: type[BaseModel], name: str) -> str:
    """The annotation of a field as it is written in the source."""
    for owner in model.__mro__:
        own = inspect.get_annotations(owner)
        if name in own:
            return str(own[name])
    return ""


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else _code(repr(field.default_factory()))
    value = field.default
    shown = {None: "null", True: "true", False: "false"}.get(value) if value is None or value in (True, False) else None
    if shown is None or (isinstance(value, float | int) and not isinstance(value, bool)):
        shown = str(list(value)) if isinstance(value, tuple) else str(value)
    return _code(shown)


def _field_comments(model: type[BaseModel]) -> dict[str, str]:
    """{field: the comment at the end of its line}, of the class and those it inherits from."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        lines = textwrap.dedent(inspect.getsource(owner)).splitlines()
        body = ast.parse("\n".join(lines)).body[0]
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                tail = lines[(node.end_lineno or 0) - 1][node.end_col_offset :]
                _, sign, comment = tail.partition("# ")
                if sign and not comment.startswith(("type:", "fmt:", "noqa")):
                    found[node.target.id] = comment
    return found


# Reasons


def reason_page() -> str:
    """The closed list of reasons for which a file is refused."""
    from octjepa.reasons import REASONS

    rows = [
        f"| `{code}` | {_cell(reason.meaning)} | {_cell(reason.action)} | {'yes' if reason.lost else 'no'} |"
        for code, reason in sorted(REASONS.items())
    ]
    return "\n".join(
        [
            "# Reason codes",
            "",
            "Every file that `octjepa ingest` refuses is a line of the store's `quarantine.jsonl` with one of these "
            f"{len(REASONS)} codes. "
            "*Lost*: whether it counts towards `--max-lost`. [How files are read](../ingest.md).",
            "",
            "| code | meaning | what to do | lost |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


# Commands


def cli_page() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    from typer.main import get_command

    from octjepa.cli import app

    group: Any = get_command(app)
    parts = [
        "# Command reference",
        "`octjepa COMMAND --help` prints the same. Exit codes: 0 done, 1 failed, 2 wrong input or usage, "
        "3 more lost than allowed, 130 interrupted.",
    ]
    for name, command in sorted(group.commands.items()):
        parts += _command(f"octjepa {name}", command)
    return "\n\n".join(parts) + "\n"


def _command(path: str, command: Any) -> Iterator[str]:
    yield f"## {path}"
    yield _prose(command.help or "")
    if hasattr(command, "commands"):
        for name, sub in sorted(command.commands.items()):
            yield from _command(f"{path} {name}", sub)
        return
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            shown, text = f"`{(parameter.metavar or parameter.name).upper()}`", getattr(parameter, "help", None) or ""
        else:
            shown = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
            text = parameter.help or ""
        default = parameter.default
        plain = isinstance(default, str | int | float | Path) and not isinstance(default, bool)
        rows.append(f"| {shown} | {_code(str(default)) if plain else ''} | {_cell(text)} |")
    if rows:
        yield "\n".join(["| argument or option | default | meaning |", "|---|---|---|", *rows])


# Python


def python_page() -> str:
    """The public names of `octjepa` and what they return, with signatures, docstrings and public methods."""
    from octjepa.encoders import PretrainedEncoder

    parts = [
        "# Python reference",
        "The public names of `octjepa`. Everything else may change between minor versions. "
        "[How they work together](../python.md).",
    ]
    for name in sorted(octjepa.__all__, key=str.lower):
        parts += _object(f"octjepa.{name}", getattr(octjepa, name), "##")
    parts += _object("octjepa.encoders.PretrainedEncoder", PretrainedEncoder, "##")
    parts += ["## Errors", "Every foreseeable mistake raises one of these; `exit_code` is that of the command."]
    parts += ["\n".join(["| error | exit code | meaning |", "|---|---|---|", *_errors()])]
    return "\n\n".join(parts) + "\n"


def _object(name: str, value: Any, level: str) -> Iterator[str]:
    """Heading, signature and docstring of a function or class, then of the public methods and properties of a class."""
    yield f"{level} {name}"
    if isinstance(value, property):
        yield (
            f"*property* `{_annotation(inspect.signature(value.fget).return_annotation)}`"
            if value.fget
            else "*property*"
        )
    elif callable(value):
        yield f"```python\n{name.rpartition('.')[2]}{_signature(value)}\n```"
    text = inspect.getdoc(value)
    if text:
        yield _prose(text)
    if inspect.isclass(value) and level == "##":
        own = [base for base in value.__mro__ if base.__module__.startswith("octjepa")]  # and what it inherits from us
        for member, item in {name: item for base in reversed(own) for name, item in vars(base).items()}.items():
            target = item.__func__ if isinstance(item, classmethod | staticmethod) else item
            if not member.startswith("_") and (inspect.isfunction(target) or isinstance(target, property)):
                yield from _object(f"{name.rpartition('.')[2]}.{member}", target, "###")


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    words = []
    for parameter in signature.parameters.values():
        if parameter.name in {"self", "cls"}:
            continue
        word = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            word += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            plain = type(parameter.default) in (int, float, str, bool, tuple, type(None))
            word += f" = {parameter.default!r}" if plain else " = ..."
        words.append(word)
    inside = ", ".join(words)
    end = "" if signature.return_annotation is signature.empty else f" -> {_annotation(signature.return_annotation)}"
    return f"({inside}){end}" if len(inside) < 90 else "(\n    " + ",\n    ".join(words) + f",\n){end}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _errors() -> Iterator[str]:
    from octjepa import errors

    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.OctjepaError):
            yield f"| `octjepa.errors.{name}` | {value.exit_code} | {_cell((value.__doc__ or '').splitlines()[0])} |"


# Markdown


def _prose(text: str) -> str:
    """A docstring or help as Markdown: indented blocks stay code, what looks like HTML is shown as it is."""
    return inspect.cleandoc(text.replace("\b", "")).replace("<", "&lt;")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`" if text else ""


def write(folder: Path, names: Iterable[str] = ()) -> None:
    """Writes the pages (those named, or all) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        if not names or name in names:
            (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2:])
