"""The cache of the viewer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Layers that the viewer finds are kept in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTJEPA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
