"""The command `recipes`: lists, shows and copies the recipes of pretraining, fine-tuning and segmentation.

`octjepa recipes` prints the list. `octjepa recipes NAME` prints one recipe, like `octjepa recipes show NAME`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from octjepa.cli.options import Json, Overrides, Quiet
from octjepa.cli.output import print_result, print_table
from octjepa.cli.root import app
from octjepa.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from octjepa.config import RecipeKind


class RecipesGroup(TyperGroup):
    """The group `recipes`, in which a recipe's name stands for `show NAME`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            return super().resolve_command(ctx, ["show", *args])
        return super().resolve_command(ctx, args)


recipes = typer.Typer(cls=RecipesGroup, invoke_without_command=True, rich_markup_mode=None)
app.add_typer(recipes, name="recipes", help="Lists, shows and copies recipes.")


@recipes.callback()
def _recipes(ctx: typer.Context) -> None:
    """Lists, shows and copies recipes."""
    if ctx.invoked_subcommand is None:
        list_recipes()


def _kinds() -> dict[str, RecipeKind[Any]]:
    """Command -> the kind of recipe that it takes."""
    from octjepa.config import PRETRAINING
    from octjepa.tasks.finetune.recipe import RECIPES as FINETUNING
    from octjepa.tasks.segment.recipe import RECIPES as SEGMENTATION

    return {"pretrain": PRETRAINING, "finetune": FINETUNING, "segment": SEGMENTATION}


def _kind_of(name: str) -> RecipeKind[Any]:
    """The kind of the recipe `name`. Raises RecipeError."""
    kinds = _kinds()
    for kind in kinds.values():
        if name in kind.names():
            return kind
    names = [recipe for kind in kinds.values() for recipe in kind.names()]
    raise RecipeError(f"no recipe {name!r}: choose one of {', '.join(names)}")


@recipes.command("list")
def list_recipes(as_json: Json = False, quiet: Quiet = False) -> None:
    """Lists the shipped recipes, with the verb that takes each and its purpose."""
    listed = []
    for verb, kind in _kinds().items():
        for name in kind.names():
            about = _purpose(kind.path_of(name))
            listed.append({"name": name, "verb": verb, "about": about})
    if as_json:
        print_result({"recipes": listed}, as_json)
    else:
        print_table([tuple(entry.values()) for entry in listed])


def _purpose(path: Path) -> str:
    """The first sentence of the comment at the top of a recipe file."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return re.split(r"(?<=\.)\s", " ".join(comment), maxsplit=1)[0]


@recipes.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name.")],
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prints a recipe as YAML, with all keys, defaults and overrides."""
    from octjepa.config import to_yaml

    kind = _kind_of(name)
    recipe = kind.load(name, overrides or ())
    if as_json:
        print_result(recipe.model_dump(mode="json"), as_json)
    else:
        print(to_yaml(recipe), end="")


@recipes.command()
def copy(
    name: Annotated[str, typer.Argument(help="A recipe's name.")],
    path: Annotated[Path, typer.Argument(help="A new file, ending in .yaml.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copies a shipped recipe to a new file, to be edited there."""
    from octjepa.files import write_atomic
    from octjepa.locks import file_lock

    source = _kind_of(name).path_of(name)
    if path.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"{path} does not end in .yaml: recipes are YAML files, and are found by that")
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written, because {path.parent} is not a folder: create the folder first")
    with file_lock(path):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists: name a new file")
        write_atomic(path, lambda file: file.write(source.read_bytes()))
    if as_json:
        print_result({"recipe": name, "path": str(path)}, as_json)
    else:
        print(f"{path}: use this path instead of the name {name}")
