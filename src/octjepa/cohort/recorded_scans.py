"""The record that weights keep of the scans that they learned from: content ids, and hashes of SOP instance UIDs.

Only hashes are stored, so the weights do not reveal which scans were used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

_UID = "uid:"  # what begins so is of `uid_key`, and no content id


def uid_key(sop_instance_uid: str) -> str:
    """A hash of a scan's SOP instance UID.

    A scan that was compressed anew has another content and the same UID. A phantom has the same UID on every machine,
    while processors round its voxels, and with them its content id, differently.
    """
    return _UID + hashlib.sha256(sop_instance_uid.encode()).hexdigest()[:16]


def split_recorded(recorded: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """(content ids, `uid_key` of those that have a UID) of what weights record."""
    uids = frozenset(text for text in recorded if text.startswith(_UID))
    return frozenset(recorded) - uids, uids
