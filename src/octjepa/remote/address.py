"""Addresses of buckets, gs://bucket/key and s3://bucket/key, distinguished from local paths."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import NamedTuple

from octjepa.errors import UsageError

_SCHEMES = {"gs": "gs", "gcs": "gs", "s3": "s3"}


class Address(NamedTuple):
    """`scheme` is gs or s3; `key` is "" for the bucket itself and never begins or ends with "/"."""

    scheme: str
    bucket: str
    key: str

    @property
    def path(self) -> str:
        """bucket/key, as fsspec names it."""
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.path}"


def is_remote(location: str | PurePath) -> bool:
    """True for gs:// and s3://, False for a local path.

    Raises UsageError for another scheme, and for an address that went through a Path, which makes "s3:/" of "s3://":
    read as a folder it would be created on the local disk without a word.
    """
    text = str(location)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)", text)
    if scheme is None:
        return False
    name = scheme[1].lower()
    if scheme[2]:
        if name in _SCHEMES:
            return True
        raise UsageError(f"{name}:// is not read: give a local path, gs://bucket/... or s3://bucket/...")
    if name in _SCHEMES:
        raise UsageError(f"{text} lost a slash: write {name}://bucket/..., and give it as text, not as a Path")
    return False


def parse(url: str) -> Address:
    """The parts of a bucket's address. Raises UsageError: no such address, no bucket, a key that climbs with ".."."""
    if not is_remote(url):
        raise UsageError(f"{url} is not an address of a bucket: expected gs://bucket/... or s3://bucket/...")
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    key = key.strip("/")
    if not bucket:
        raise UsageError(f"{url} names no bucket: expected {scheme}://bucket/...")
    if any(part in {".", ".."} for part in key.split("/")):
        raise UsageError(f"{url} holds '.' or '..' as a folder: write the address out")
    return Address(_SCHEMES[scheme.lower()], bucket, key)


def join(url: str, *parts: str) -> str:
    """The address of `parts` below `url`, with one "/" between them."""
    address = parse(url)
    below = [part.strip("/") for part in (address.key, *parts)]
    return parse(address._replace(key="/".join(part for part in below if part)).url).url
