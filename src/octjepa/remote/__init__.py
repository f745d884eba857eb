"""Objects in gs:// and s3:// buckets: listed, fetched through a bounded verified cache, written and tried again.

Enter: addresses, and endpoint and credentials from the environment. Leave: `RemoteObject`s, local copies, bytes.
Fails with UsageError (no such bucket or object, no access, no credentials, an extra missing) or OctjepaError (the store
does not answer or sends damaged bodies for as long as is borne), ResourceError (the disk is full, no file is free).
"""

from octjepa.remote.address import is_remote, join
from octjepa.remote.bucket import RemoteObject, info, list_objects, put, put_bytes, remove
from octjepa.remote.cache import cache_folder, local_copy, read_bytes, remembered
from octjepa.remote.lock import bucket_lock
from octjepa.remote.retry import retry_count

__all__ = [
    "RemoteObject",
    "bucket_lock",
    "cache_folder",
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
]
