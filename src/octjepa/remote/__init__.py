"""Objects in gs:// and s3:// buckets: listed, fetched through a bounded verified cache, written and tried again.

Enter: addresses, and endpoint and credentials from the environment. Leave: `RemoteObject`s, local copies, bytes.
Fails with AbsentObject (no such object, or it changed since it was listed), another UsageError (no such bucket, no
access, no credentials, an extra missing) or OctjepaError (the store does not answer or sends damaged bodies for as long
as is borne), ResourceError (the disk is full, no file is free).

All names but those of addresses are imported on first use, because work on a local disk needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octjepa.remote.address import is_remote, join

if TYPE_CHECKING:
    from octjepa.remote.bucket import RemoteObject, first_objects, info, list_objects, put, put_bytes, remove
    from octjepa.remote.cache import (
        cache_folder,
        clear_unfinished,
        local_copy,
        read_bytes,
        remembered,
        temporary_folder,
    )
    from octjepa.remote.lock import bucket_lock
    from octjepa.remote.retry import AbsentObject, retry_count

__all__ = [
    "AbsentObject",
    "RemoteObject",
    "bucket_lock",
    "cache_folder",
    "clear_unfinished",
    "first_objects",
    "info",
    "is_remote",
    "join",
    "list_objects",
    "local_copy",
    "put",
    "put_bytes",
    "read_bytes",
    "remembered",
    "remove",
    "retry_count",
    "temporary_folder",
]

_MODULES = {
    **dict.fromkeys(
        ("RemoteObject", "first_objects", "info", "list_objects", "put", "put_bytes", "remove"), "octjepa.remote.bucket"
    ),
    **dict.fromkeys(
        ("cache_folder", "clear_unfinished", "local_copy", "read_bytes", "remembered", "temporary_folder"),
        "octjepa.remote.cache",
    ),
    "bucket_lock": "octjepa.remote.lock",
    **dict.fromkeys(("AbsentObject", "retry_count"), "octjepa.remote.retry"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'octjepa.remote' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_MODULES[name]), name)
    return value
