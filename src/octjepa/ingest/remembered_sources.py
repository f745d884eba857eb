"""Remember on this machine which scans a store, or a folder of segmentations, was made from.

In: a folder, the sources that its command was given, and the options for them. Out: these sources, as absolute paths or
URLs, and the options. A store holds no path, because paths can name people and stores are passed on. The note is
therefore in the cache folder of the user (OCTJEPA_CACHE), which only its owner can read, and the store stays without
it. Without a note the user names the scans, as on another machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from octjepa.errors import OctjepaError
from octjepa.files import write_json
from octjepa.read.geometry import stated_spacing_fault
from octjepa.read.reader import SpacingOption
from octjepa.remote import is_remote
from octjepa.remote.cache import cache_folder

_MOST: Final = 10_000  # sources of a folder: the last ones; a shell lists every match of a glob as a source


def remember_sources(
    folder: str | Path, sources: Sequence[str | Path], model: Path | None = None, spacing_mm: SpacingOption = None
) -> None:
    """Adds `sources` to those of `folder`, and the `model` that segmented them if it is not the packaged one.

    `spacing_mm` is the spacing that they were read with, if the user stated one. A cache that cannot be written is not
    an error: the note is a convenience.
    """
    named = [str(source) if is_remote(source) else str(_folder(Path(source).resolve())) for source in sources]
    with suppress(OSError, OctjepaError):
        repeated = frozenset(named)
        earlier = [text for text in _texts(folder, "sources") if text not in repeated]
        texts = dict.fromkeys([*earlier, *named][-_MOST:])  # in order, and fast to look up
        models = [] if model is None else [str(model.resolve())]
        stated = dict.fromkeys(named, None if spacing_mm == "file" else spacing_mm)
        spacings = {text: mm for text, mm in (spacings_of(folder) | stated).items() if mm is not None and text in texts}
        write_json(_note(folder), {"sources": list(texts), "models": models, "spacings_mm": spacings})


def sources_of(folder: str | Path) -> list[str]:
    """The sources that `folder` was made from and that are still there; [] if this machine does not know them."""
    with suppress(OSError, OctjepaError):
        return [text for text in _texts(folder, "sources") if is_remote(text) or Path(text).exists()]
    return []


def model_of(folder: str | Path) -> Path | None:
    """The model that segmented the scans of `folder`, which may be gone by now; None for the packaged one."""
    with suppress(OSError, OctjepaError):
        for model in _texts(folder, "models"):
            return Path(model)
    return None


def spacings_of(folder: str | Path) -> dict[str, tuple[float, float, float] | None]:
    """By source of `folder` the spacing that the user stated for it, or None."""
    with suppress(OSError, OctjepaError):
        noted = _noted(folder, "spacings_mm")
        stated = noted if isinstance(noted, dict) else {}
        return {text: _spacing(stated.get(text)) for text in _texts(folder, "sources")}
    return {}


def _spacing(noted: Any) -> tuple[float, float, float] | None:
    try:
        dz, dy, dx = map(float, noted)
    except (TypeError, ValueError):
        return None
    return None if stated_spacing_fault((dz, dy, dx)) else (dz, dy, dx)


def _folder(path: Path) -> Path:
    """`path`, or of a glob the folder that holds every match."""
    while any(sign in path.name for sign in "*?["):
        path = path.parent
    return path


def _note(folder: str | Path) -> Path:
    name = str(folder) if is_remote(folder) else str(Path(folder).resolve())
    return cache_folder("sources") / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json"


def _noted(folder: str | Path, key: str) -> Any:
    try:
        return json.loads(_note(folder).read_text())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _texts(folder: str | Path, key: str) -> list[str]:
    noted = _noted(folder, key)
    return [text for text in noted if isinstance(text, str)] if isinstance(noted, list) else []
