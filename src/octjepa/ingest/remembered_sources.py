"""Remember on this machine which scans a store, or a folder of segmentations, was made from.

In: a folder and the sources that its command was given. Out: these sources, as absolute paths or URLs. A store holds no
path, because paths can name people and stores are passed on. The note is therefore in the cache folder of the user
(OCTJEPA_CACHE), which only its owner can read, and the store stays without it. Without a note the user names the
scans, as on another machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from octjepa.errors import OctjepaError
from octjepa.files import write_json
from octjepa.remote import is_remote
from octjepa.remote.cache import cache_folder

_MOST: Final = 10_000  # sources of a folder: the last ones; a shell lists every match of a glob as a source


def remember_sources(folder: str | Path, sources: Sequence[str | Path], model: Path | None = None) -> None:
    """Adds `sources` to those of `folder`, and the `model` that segmented them if it is not the packaged one.

    A cache that cannot be written is not an error: the note is a convenience.
    """
    named = [str(source) if is_remote(source) else str(_folder(Path(source).resolve())) for source in sources]
    with suppress(OSError, OctjepaError):
        repeated = frozenset(named)
        earlier = [text for text in _texts(folder, "sources") if text not in repeated]
        models = [] if model is None else [str(model.resolve())]
        write_json(_note(folder), {"sources": [*earlier, *named][-_MOST:], "models": models})


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


def _folder(path: Path) -> Path:
    """`path`, or of a glob the folder that holds every match."""
    while any(sign in path.name for sign in "*?["):
        path = path.parent
    return path


def _note(folder: str | Path) -> Path:
    name = str(folder) if is_remote(folder) else str(Path(folder).resolve())
    return cache_folder("sources") / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json"


def _texts(folder: str | Path, key: str) -> list[str]:
    try:
        noted = json.loads(_note(folder).read_text())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [text for text in noted if isinstance(text, str)] if isinstance(noted, list) else []
