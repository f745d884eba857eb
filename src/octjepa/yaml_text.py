"""The reader of YAML from other people: recipes, also those that came with a stranger's run.

In: text. Out: plain data. As in `octjepa.parsing`, size, depth, aliases and digits are bounded before anything is
built, and what breaks a limit raises `Malformed`. It is a separate module because PyYAML is slow to import, and most
commands read no YAML before they know that their arguments are right.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from octjepa.parsing import Malformed, parse_integer, shown

YAML_BYTES = 256 << 10
YAML_DEPTH = 32
YAML_NODES = 20_000  # after every alias is replaced by what it stands for
YAML_CHARACTERS = 4 << 20  # likewise


class _Loader(yaml.SafeLoader):
    """Null, switches, decimal numbers and text; no tags, no key given twice, no bomb of aliases or brackets.

    YAML 1.1 would read 010 as 8, 1:30 as 90 and 1e-4 as text. Here a number is what YAML 1.2 and every reader of a
    recipe take for one.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth, self._nodes = self._depth + 1, self._nodes + 1
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if (tag := getattr(event, "tag", None)) is not None:
            raise Malformed(f"line {event.start_mark.line + 1}: the tag {shown(tag)} is not read")
        if self._depth > YAML_DEPTH:
            raise Malformed(f"it is nested more than {YAML_DEPTH} deep")
        if self._nodes > YAML_NODES:
            raise Malformed(f"it has more than {YAML_NODES:,} values")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        if root is not None:
            _check_expanded(root)
        return root


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", list("yYnNtTfFoO")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    (
        "float",
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _construct_integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    return parse_integer(loader.construct_scalar(node).replace("_", "").lstrip("+"))


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[str] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        where = f"line {key_node.start_mark.line + 1}"
        if not isinstance(key, str):
            raise Malformed(f"{where}: key {shown(key)} is not text")
        if key in keys:
            raise Malformed(f"{where}: key {shown(key)} is given twice")
        keys.add(key)
    return loader.construct_mapping(node)


_Loader.yaml_constructors = {
    tag: maker
    for tag, maker in yaml.SafeLoader.yaml_constructors.items()
    if tag in {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "str", "seq")}
}
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _check_expanded(root: yaml.Node) -> None:
    """Raises Malformed where the document is too large once every alias is replaced by what it stands for."""
    sizes: dict[int, tuple[int, int]] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> tuple[int, int]:  # (nodes, characters); no deeper than YAML_DEPTH
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in open_nodes:
            raise Malformed(f"line {node.start_mark.line + 1}: an alias stands for what it is a part of")
        open_nodes.add(id(node))
        nodes, characters = 1, 0
        if isinstance(node, yaml.ScalarNode):
            characters = len(node.value)
            if any("\ud800" <= character <= "\udfff" for character in node.value):
                raise Malformed(f"line {node.start_mark.line + 1}: a text holds half of a surrogate pair")
        else:
            pairs = isinstance(node, yaml.MappingNode)
            for child in (character for pair in node.value for character in pair) if pairs else node.value:
                more = size(child)
                nodes, characters = nodes + more[0], characters + more[1]
        if nodes > YAML_NODES or characters > YAML_CHARACTERS:
            raise Malformed("it has more values, or longer text, than is read of such a file once aliases are expanded")
        open_nodes.discard(id(node))
        sizes[id(node)] = nodes, characters
        return nodes, characters

    size(root)


def parse_yaml(text: str) -> Any:
    """YAML with decimal numbers -> plain data.

    Raises Malformed: not YAML (with the line), too long, nested too deep, aliases that expand to too much, a tag, a
    key that is not text or is given twice, an integer of more than 40 digits.
    """
    if len(text) > YAML_BYTES:
        raise Malformed(f"it has more than the {YAML_BYTES:,} characters that are read")
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        parts = [error.context, error.problem]
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise Malformed(" ".join(part for part in parts if part)[:300] + where) from None
    except yaml.YAMLError as error:
        raise Malformed(" ".join(str(error).split())[:300]) from None
    except Malformed:
        raise
    except (ValueError, OverflowError) as error:  # PyYAML leaves them uncaught: an escape above U+10FFFF, for example
        raise Malformed(" ".join(str(error).split())[:300]) from None
