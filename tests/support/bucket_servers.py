"""Emulated object stores on free local ports, each behind a `FaultyProxy`: moto (S3) and gcp-storage-emulator (GCS)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faulty_proxy import FaultyProxy

BUCKET = "eyes"


@dataclass
class Bucket:
    """`url` is a place of its own in the emulated bucket."""

    url: str
    proxy: FaultyProxy
    cache: Path

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]


@contextmanager
def s3_server() -> Iterator[FaultyProxy]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        with FaultyProxy(port) as proxy:
            proxy._forward("PUT", f"/{BUCKET}", {"Host": f"127.0.0.1:{port}", "Authorization": "AWS test"}, b"")
            yield proxy
    finally:
        server.stop()


@contextmanager
def gs_server() -> Iterator[FaultyProxy]:
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        deadline = time.monotonic() + 10
        while server._api._httpd is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with FaultyProxy(server._api._httpd.server_port) as proxy:
            yield proxy
    finally:
        server.stop()


def environment(scheme: str, proxy: FaultyProxy, cache: Path, timeout_seconds: float) -> dict[str, str]:
    """What a user would set to speak to the emulator, with patience of seconds."""
    return {
        "AWS_ENDPOINT_URL" if scheme == "s3" else "STORAGE_EMULATOR_HOST": proxy.url,
        "AWS_ACCESS_KEY_ID": "AKIATESTKEYOFTHETESTS",
        "AWS_SECRET_ACCESS_KEY": "secretofthetests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_GCE_CHECK": "true",
        "OCTJEPA_CACHE": str(cache),
        "OCTJEPA_REMOTE_TRIES": "3",
        "OCTJEPA_REMOTE_WAIT": "0.02",
        "OCTJEPA_REMOTE_TIMEOUT": str(timeout_seconds),
    }


@contextmanager
def bucket_of(scheme: str, proxy: FaultyProxy, cache: Path, timeout_seconds: float = 1.2) -> Iterator[Bucket]:
    """A fresh place in the bucket, an empty cache, no faults; connections are closed at the end."""
    from octjepa.remote.bucket import disconnect

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(scheme, proxy, cache, timeout_seconds).items():
            patch.setenv(name, value)
        proxy.faults.clear()
        proxy.requests.clear()
        yield Bucket(f"{scheme}://{BUCKET}/{uuid.uuid4().hex[:12]}", proxy, cache)
        proxy.faults.clear()
        disconnect()


SERVERS: dict[str, Any] = {"s3": s3_server, "gs": gs_server}
