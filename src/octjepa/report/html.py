"""The template system of all pages, and numbers, durations and paths as they are shown in them."""

from __future__ import annotations

import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

_PATH = re.compile(r"(?<![\w.…/:])(?:[A-Za-z]:)?[\\/](?:[^\s/\\'\":;,<>|()]+[\\/])+([^\s/\\'\":;,<>|()]*)")


def render_template(name: str, **values: Any) -> str:
    """The template `name` of this package's `templates` as HTML; every value is escaped unless it is Markup."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    templates = files("octjepa.report").joinpath("templates")
    environment = Environment(
        loader=FunctionLoader(lambda file: templates.joinpath(file).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": _breakable,
        "spaced": lambda value: str(value).replace("_", " "),
        "numeric": lambda heading: f"#{str(heading).replace('_', ' ')}",  # of a column of numbers
    }
    environment.globals |= {"number": number, "signed": signed, "duration": duration}
    rendered: str = environment.get_template(name).render(**values)
    return rendered


def _breakable(name: str) -> Markup:
    """A long file name that may break after a slash or an underscore; copied, it is the name itself."""
    return Markup("<wbr>").join(re.split(r"(?<=[/_])", name))


def number(value: Any, digits: int = 3) -> str:
    """A value as text; a dash if there is none, never a zero in its place."""
    if value is None or isinstance(value, str) or not math.isfinite(float(value)):
        return "–"
    return f"{float(value):.{digits}f}".replace("-", "−")


def signed(value: float) -> str:
    """A difference as text, with its sign."""
    return ("+" if value >= 0 else "") + number(value)


def duration(seconds: Any) -> str:
    """A time in hours, minutes and seconds; a dash if there is none."""
    if seconds is None:
        return "–"
    whole = round(float(seconds))
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{float(seconds):.1f} s"


def without_paths(text: str, root: Path) -> str:
    """`text` with absolute paths cut to their last part, so that a page can be passed on."""
    return _PATH.sub(lambda match: f"…/{match[1]}" if match[1] else "…", text.replace(str(root), root.name))


def file_name(text: str, common: str = "") -> str:
    """A file as the tables show it: relative as given; an absolute one below `common`, or as its last three parts."""
    path = text.replace("\\", "/")
    if not (path.startswith("/") or re.match(r"^[A-Za-z]:/", path)):
        return path
    if common and path.startswith(common + "/"):
        return path.removeprefix(common + "/")
    return "…/" + "/".join(path.split("/")[-3:])
