"""Objects in buckets: listed, looked up, downloaded, written and removed, each call retried after transient failures.

The requests are those of fsspec's s3fs and gcsfs; their own retries are off, so that only this package decides and logs
them. Endpoint and credentials come from the environment only: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL and the usual AWS
variables. STORAGE_EMULATOR_HOST and the usual variables of Google. OCTJEPA_ANONYMOUS=1 signs nothing.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import hashlib
import importlib
import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from octjepa.errors import OctjepaError, UsageError, install_command
from octjepa.remote.address import Address, parse
from octjepa.remote.retry import DamagedBody, RetryPolicy, is_absent, is_conflict, user_error, with_retries

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteObject:
    """One object; `version` is its ETag (S3) or generation (GCS), which differs where the content does.

    `checksum` is "md5:<hex>" or "crc32c:<hex>" where the store gives one, else "". With `start` it is `size` bytes of
    an object from that byte; such an object never changes its content.
    """

    url: str
    size: int
    version: str
    checksum: str = field(default="", compare=False)
    start: int | None = None


_connections: dict[tuple[Any, ...], Any] = {}
_connecting = threading.Lock()


def _anonymous() -> bool:
    return os.environ.get("OCTJEPA_ANONYMOUS", "").lower() in {"1", "true", "yes"}


def _import(name: str, scheme: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{scheme}:// needs {name}: {install_command('gcs' if scheme == 'gs' else 's3')}") from None


def _connect_s3(policy: RetryPolicy) -> Any:
    s3fs = _import("s3fs", "s3")
    files = s3fs.S3FileSystem(
        anon=_anonymous(),
        endpoint_url=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None,
        config_kwargs={
            "retries": {"total_max_attempts": 1},
            "connect_timeout": min(10.0, policy.timeout_seconds),
            "read_timeout": policy.timeout_seconds,
        },
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    files.retries = 1
    return files


def _connect_gs(policy: RetryPolicy) -> Any:
    # Read when gcsfs is imported: with it on, gcsfs asks a gRPC control service per bucket and waits a minute for it.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    gcsfs = _import("gcsfs", "gs")
    aiohttp = _import("aiohttp", "gs")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints a traceback for what is retried here

    # gcsfs without its own six tries: the functions that its `retry_request` wraps.
    plain = gcsfs.GCSFileSystem
    once = {name: getattr(plain, name).__wrapped__ for name in ("_request", "_get_file_request")}
    OneTry = type("OneTry", (plain,), once)

    emulated = os.environ.get("STORAGE_EMULATOR_HOST", "") not in {"", "default"}
    return OneTry(
        project=os.environ.get("GOOGLE_CLOUD_PROJECT", "none"),  # needed only to make or list buckets
        token="anon" if emulated or _anonymous() else "google_default",
        requests_timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=min(10.0, policy.timeout_seconds), sock_read=policy.timeout_seconds
        ),
        use_listings_cache=False,
        skip_instance_cache=True,
    )


_CONNECT = {"s3": _connect_s3, "gs": _connect_gs}
_ENVIRONMENT = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "STORAGE_EMULATOR_HOST",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "OCTJEPA_ANONYMOUS",
)


def connection(scheme: str, policy: RetryPolicy) -> Any:
    """The file system for a scheme, one per process and environment: its sockets and threads do not survive a fork."""
    key = (os.getpid(), scheme, policy, *(os.environ.get(name, "") for name in _ENVIRONMENT))
    with _connecting:
        if key not in _connections:
            _connections[key] = _CONNECT[scheme](policy)
        return _connections[key]


@atexit.register
def disconnect() -> None:
    """Closes all connections of this process; the next call opens new connections."""
    if not _connections:
        return  # fsspec is not loaded, and at the end of the process can no longer be
    from fsspec.asyn import sync

    with _connecting:
        keys = [key for key in _connections if key[0] == os.getpid()]
        for files in (_connections.pop(key) for key in keys):
            if getattr(files, "_s3", None) is not None:
                sync(files.loop, files._s3.close, timeout=5)
            elif getattr(files, "_session", None) is not None:
                sync(files.loop, files._session.close, timeout=5)


os.register_at_fork(after_in_child=_connections.clear)


def _call(
    work: Callable[[Any], T], action: str, address: Address, expected: Callable[[Exception], bool] = lambda _: False
) -> T | None:
    """`work(file system)` with retries; None if it fails as `expected`.

    Raises UsageError: no such bucket, no access, no credentials. OctjepaError: the store does not answer.
    """
    policy = RetryPolicy.from_environment()
    try:
        return with_retries(lambda: work(connection(address.scheme, policy)), action, address.url, policy)
    except OctjepaError:
        raise
    except Exception as error:
        if expected(error):
            return None
        raise user_error(error, action, address.url) from None


def _object(address: Address, entry: dict[str, Any]) -> RemoteObject:
    url = f"{address.scheme}://{entry['name']}"
    if address.scheme == "s3":
        etag = str(entry.get("ETag", "")).strip('"')
        # The ETag of several parts, or of what the store encrypted with a managed key, is not md5 of the content.
        plain = re.fullmatch("[0-9a-f]{32}", etag) and "kms" not in str(entry.get("ServerSideEncryption", ""))
        plain = plain and "SSECustomerAlgorithm" not in entry
        return RemoteObject(url, int(entry["size"]), etag, f"md5:{etag}" if plain else "")
    checksum = ""
    for kind, name in (("md5", "md5Hash"), ("crc32c", "crc32c")):
        try:
            checksum = checksum or (entry.get(name) and f"{kind}:{base64.b64decode(entry[name]).hex()}") or ""
        except binascii.Error:
            continue
    return RemoteObject(url, int(entry["size"]), str(entry.get("generation", "")), checksum)


def list_objects(url: str, recursive: bool = True) -> list[RemoteObject]:
    """Objects below `url`, sorted by url, or the object that `url` names. Empty if there is none.

    Raises UsageError: no such bucket, no access, no credentials. OctjepaError: the store does not answer.
    """
    address = parse(url)

    def work(files: Any) -> list[RemoteObject]:
        listed = files.find(address.path, withdirs=False, detail=True, **({} if recursive else {"maxdepth": 1}))
        if not listed:
            _check_bucket(files, address)  # an absent bucket lists like an empty folder
        objects = [info for info in listed.values() if info["type"] == "file" and not info["name"].endswith("/")]
        return sorted((_object(address, info) for info in objects), key=lambda info: info.url)

    return _call(work, "list", address) or []


def first_objects(url: str, count: int) -> list[str]:
    """The addresses of the first `count` objects below `url`, in all folders, by one request. Raises as `list_objects`.

    Objects that stand for a folder are counted and left out.
    """
    address = parse(url)
    prefix = f"{address.key}/" if address.key else ""

    def work(files: Any) -> list[str]:
        if address.scheme == "s3":
            answer = files.call_s3("list_objects_v2", Bucket=address.bucket, Prefix=prefix, MaxKeys=count)
            keys = [entry["Key"] for entry in answer.get("Contents", ())]
        else:
            answer = files.call("GET", "b/{}/o", address.bucket, prefix=prefix, maxResults=count, json_out=True)
            keys = [entry["name"] for entry in answer.get("items", ())]
        return [f"{address.scheme}://{address.bucket}/{key}" for key in keys if not key.endswith("/")]

    return _call(work, "list", address) or []


def _check_bucket(files: Any, address: Address) -> None:
    """Raises the library's error where the bucket cannot be listed."""
    if address.scheme == "s3":
        files.call_s3("list_objects_v2", Bucket=address.bucket, MaxKeys=1)
    else:
        files.call("GET", "b/{}/o", address.bucket, maxResults=1, json_out=True)


def info(url: str) -> RemoteObject | None:
    """The object that `url` names, None if there is none. Raises as `list_objects`."""
    address = parse(url)
    if not address.key:
        raise UsageError(f"{url} names a bucket: name an object in it")

    def work(files: Any) -> RemoteObject | None:
        try:
            if address.scheme == "s3":
                head = files.call_s3("head_object", Bucket=address.bucket, Key=address.key)
                return _object(address, {**head, "name": address.path, "size": head["ContentLength"]})
            answer = files.call("GET", "b/{}/o/{}", address.bucket, address.key, json_out=True)
            return _object(address, {**answer, "name": address.path})
        except Exception as error:
            if not is_absent(error):
                raise
        _check_bucket(files, address)
        return None

    return _call(work, "look up", address)


def download(source: RemoteObject, path: Path) -> None:
    """Writes the object's body to `path`, in one try and unverified. Raises the library's errors."""
    address = parse(source.url)
    files = connection(address.scheme, RetryPolicy.from_environment())
    if source.start is not None:
        path.write_bytes(files.cat_file(address.path, start=source.start, end=source.start + source.size))
        return
    # In one stream: several at once write into a file of full length, where a missing piece would be zeros.
    one_stream = {"max_concurrency": 1} if address.scheme == "s3" else {"concurrency": 1}
    files.get_file(address.path, str(path), **one_stream)


def put(path: Path, url: str) -> None:
    """Writes the local file `path` as the object `url` and checks that all of it arrived. Raises as `list_objects`."""
    address = parse(url)

    def work(files: Any) -> None:
        files.put_file(str(path), address.path)
        written = info(url)
        if written is None or written.size != path.stat().st_size:
            raise DamagedBody("the object is shorter than the file")
        kind, _, stored = written.checksum.partition(":")
        if stored and stored != checksum_of(path, kind):
            raise DamagedBody(f"its {kind} differs from the file's")

    _call(work, "write", address)


def checksum_of(path: Path, kind: str) -> str:
    """Hexadecimal md5, crc32c, or the first half of blake2b, of a local file."""
    if kind == "crc32c":
        from google_crc32c import Checksum  # comes with gcsfs

        crc = Checksum()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                crc.update(block)
        return crc.digest().hex()
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()[:64]


def put_bytes(data: bytes, url: str, only_if_absent: bool = False) -> bool:
    """Writes `data` as the object `url`; False where `only_if_absent` and there is one already.

    The store itself decides who is first. Raises as `list_objects`.
    """
    address = parse(url)
    mode = {"mode": "create"} if only_if_absent else {}

    def work(files: Any) -> bool:
        files.pipe_file(address.path, data, **mode)
        return True

    if _call(work, "write", address, lambda error: only_if_absent and is_conflict(error)):
        return True
    # Of two tries the first may have written it, with only its answer lost.
    written = info(url) and _call(lambda files: files.cat_file(address.path), "read", address)
    return bool(written == data)


def remove(url: str) -> None:
    """Removes the object `url`; does nothing if there is none. Raises as `list_objects`."""
    address = parse(url)
    _call(lambda files: files.rm_file(address.path), "remove", address, is_absent)
