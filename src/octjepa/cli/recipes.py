"""The verbs of recipes: list, show and copy, of pretraining, fine-tuning and segmentation alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octjepa.cli.options import Json, Overrides
from octjepa.cli.output import print_result, print_table
from octjepa.cli.root import app
from octjepa.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from octjepa.config import RecipeKind

recipes = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(recipes, name="recipes", help="Lists, shows and copies recipes.")


def _kinds() -> dict[str, RecipeKind[Any]]:
    """Verb -> the kind of recipe that it takes."""
    from octjepa.config import PRETRAINING
    from octjepa.tasks.finetune.recipe import RECIPES as FINETUNING
    from octjepa.tasks.segment.recipe import RECIPES as SEGMENTATION

    return {"pretrain": PRETRAINING, "finetune": FINETUNING, "segment": SEGMENTATION}


def _kind_of(name: str) -> RecipeKind[Any]:
    """The kind that has a recipe `name`. Raises RecipeError."""
    kinds = _kinds()
    for kind in kinds.values():
        if name in kind.names():
            return kind
    names = [known for kind in kinds.values() for known in kind.names()]
    raise RecipeError(f"no recipe {name!r}: one of {', '.join(names)}")


@recipes.command("list")
def list_recipes(as_json: Json = False) -> None:
    """Lists the shipped recipes, with the verb that takes each and its purpose."""
    found = []
    for verb, kind in _kinds().items():
        for name in kind.names():
            about = kind.path_of(name).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            found.append({"name": name, "verb": verb, "about": about})
    if as_json:
        print_result({"recipes": found}, as_json)
    else:
        print_table([tuple(one.values()) for one in found])


@recipes.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name.")], overrides: Overrides = None, as_json: Json = False
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
) -> None:
    """Copies a shipped recipe to a new file, to be edited there."""
    source = _kind_of(name).path_of(name)
    if path.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"{path} does not end in .yaml: recipes are YAML files, and are found by that")
    if path.exists():
        raise UsageError(f"{path} exists: name a new file")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): name a file in a folder that exists") from None
    if as_json:
        print_result({"recipe": name, "path": str(path)}, as_json)
    else:
        print(f"{path}: use this path instead of the name {name}")
