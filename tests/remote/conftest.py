"""Both emulated stores, started once for these tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bucket_servers import SERVERS, Bucket, bucket_of
from faulty_proxy import FaultyProxy


@pytest.fixture(scope="session")
def proxies() -> Iterator[dict[str, FaultyProxy]]:
    with ExitStack() as stack:
        yield {scheme: stack.enter_context(server()) for scheme, server in SERVERS.items()}


@pytest.fixture(params=sorted(SERVERS))
def bucket(request: pytest.FixtureRequest, proxies: dict[str, FaultyProxy], tmp_path: Path) -> Iterator[Bucket]:
    with bucket_of(request.param, proxies[request.param], tmp_path / "cache") as place:
        yield place
