"""Names of exchangeable parts (objectives, readers, probes, tasks, trackers) and the objects behind them.

A part is registered by a decorator, or by an entry point of any installed package, so that a user adds one without
changing this package:

    [project.entry-points."octjepa.objectives"]
    my_objective = "my_package.objectives:MyObjective"

Parts are imported at their first use: listing names imports nothing. A registry may also take a class without any
package, as `module:Class` of a Python file in the working folder. A recipe of another person may name such a class, so
it is imported only if the user named it in the command or allowed everything (`octjepa.outside` decides).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from typing import Generic, TypeVar

from octjepa.errors import UsageError

T = TypeVar("T")
Part = TypeVar("Part")
_CLASS = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")  # module:Class


def _nothing(name: str) -> bool:
    return False


_is_allowed: Callable[[str], bool] = _nothing  # `octjepa.outside`, a layer above, replaces it


def decide_imports(is_allowed: Callable[[str], bool]) -> None:
    """From now on `is_allowed("module:Class")` says whether the user agreed to import that class."""
    global _is_allowed
    _is_allowed = is_allowed


class Registry(Generic[T]):
    """The parts of one `kind`, a noun for messages such as "objective".

    `modules` maps built-in names to the modules that register them on import; `modules_of` lists a folder of modules
    named like their parts. A registry in a lower layer declares only the `names` of built-in parts; the layer that has
    them says by `locate` which modules hold them. Packages add parts by entry points of the group `entry_point_group`.
    With `takes_classes` a name may also be `module:Class`.
    """

    def __init__(
        self,
        kind: str,
        entry_point_group: str,
        modules: Mapping[str, str] | None = None,
        names: Iterable[str] = (),
        takes_classes: bool = False,
    ) -> None:
        self.kind, self.group, self.takes_classes = kind, entry_point_group, takes_classes
        self._modules: dict[str, str] = {**dict.fromkeys(names, ""), **(modules or {})}
        self._parts: dict[str, T] = {}  # by decorator
        self._loaded: dict[str, T] = {}  # from entry points

    def register(self, name: str) -> Callable[[Part], Part]:
        """Decorator that adds a class or function as `name`. Raises ValueError when the name is taken."""

        def add(part: Part) -> Part:
            if name in self._parts:
                raise ValueError(f"{self.kind} {name!r} is registered twice: {self._parts[name]!r} and {part!r}")
            self._parts[name] = part  # type: ignore[assignment] # T for readers of the registry, Part keeps its type
            return part

        return add

    def locate(self, modules: Mapping[str, str]) -> None:
        """Says which modules register the built-in parts. Raises ValueError for a name that was not declared."""
        if unknown := modules.keys() - self._modules.keys():
            raise ValueError(f"{self.kind} {sorted(unknown)}: not declared where the registry is made")
        self._modules |= modules

    def names(self) -> list[str]:
        """All names, sorted: built in, registered by a decorator, and declared by installed packages."""
        return sorted({*self._modules, *self._parts, *(point.name for point in self._entry_points())})

    def is_built_in(self, name: str) -> bool:
        """Whether octjepa itself declares the name."""
        return name in self._modules

    def __contains__(self, name: object) -> bool:
        return name in self._modules or name in self._parts or name in self.names() or self.is_class(name)

    def is_class(self, name: object) -> bool:
        """Whether the name is a `module:Class`, which this registry takes. Imports nothing."""
        return self.takes_classes and isinstance(name, str) and _CLASS.fullmatch(name) is not None

    def get(self, name: str) -> T:
        """The part called `name`, imported now if need be.

        Raises UsageError: no such name, two packages declare it, the package or module fails to import, or the user did
        not agree to import the module.
        RuntimeError: the package that holds a built-in part has not been imported (an error in octjepa).
        """
        if name not in self._parts and name in self._modules:
            if not self._modules[name]:
                raise RuntimeError(f"{self.kind} {name!r}: import the package that holds it first")
            import_module(self._modules[name])
        if name in self._parts:
            return self._parts[name]
        if name not in self._loaded:
            self._loaded[name] = self._load_class(name) if self.is_class(name) else self._load(name)
        return self._loaded[name]

    def _load_class(self, name: str) -> T:
        """The class `module:Class`, from the working folder or an installed package."""
        module_name, _, class_name = name.partition(":")
        if not _is_allowed(name):
            raise UsageError(
                f"{self.kind} {name} is Python code that a recipe names and the command does not, so it was not "
                f"imported. If you trust who made the recipe, write {name} in the command or add --allow-outside (in "
                "Python: octjepa.outside.allow_outside)"
            )
        # The last place to look, so that a file of this folder hides no installed package. It stays there, because the
        # module may import its neighbours later.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            module = import_module(module_name)
        except Exception as error:  # whatever the import of foreign code raises
            if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
                file = f"{module_name.partition('.')[0]}.py"
                raise UsageError(
                    f"{self.kind} {name}: there is no module {error.name} in this folder or among the installed "
                    f"packages. Run the command in the folder of {file}, or correct the name"
                ) from error
            raise UsageError(
                f"{self.kind} {name}: the module cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not hasattr(module, class_name):
            classes = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
            defined = ", ".join(classes) or "nothing"
            raise UsageError(f"{self.kind} {name}: module {module_name} has no {class_name}; it defines {defined}")
        part: T = getattr(module, class_name)
        return part

    def _load(self, name: str) -> T:
        declared = [point for point in self._entry_points() if point.name == name]
        if not declared:
            raise UsageError(f"unknown {self.kind} {name!r}: one of {', '.join(self.names())}")
        packages = [_package(point) for point in declared]
        if len(declared) > 1:
            raise UsageError(f"{self.kind} {name!r} is declared by several packages: {', '.join(packages)}. Keep one")
        try:
            part: T = declared[0].load()
        except Exception as error:  # whatever the import of a foreign package raises
            raise UsageError(
                f"{self.kind} {name!r} of package {packages[0]} ({declared[0].value}) cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        return part

    def _entry_points(self) -> list[EntryPoint]:
        return list({(point.name, point.value): point for point in entry_points(group=self.group)}.values())


def modules_of(package: str) -> dict[str, str]:
    """Module name -> dotted module of every module in `package`, without importing it (or its parents' contents)."""
    root, *folders = package.split(".")
    folder = files(root).joinpath(*folders)
    names = (entry.name for entry in folder.iterdir())
    return {name[:-3]: f"{package}.{name[:-3]}" for name in names if name.endswith(".py") and not name.startswith("_")}


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value.partition(":")[0]
