"""Inputs of every verb that writes, and an undisturbed life of each, made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from disturbances import End, live
from short_pages import draw_flat_layers, shorten_pages
from verbs import Inputs, Verb, differences, import_all, left_over


@dataclass(frozen=True)
class Lives:
    """Lives of a verb next to its undisturbed one."""

    verb: Verb
    whole: Path
    seconds: float
    folder: Path

    def life(self, before: Callable[[Path], Callable[[], object]] | None = None, **how: float) -> End:
        """One life in `folder`, with `before(folder)` done in its process first."""
        stderr = self.folder.with_suffix(".err")
        return live(self.verb.command(self.folder), stderr, *([before(self.folder)] if before else []), **how)

    def assert_ends_well(self) -> None:
        """The same command again ends with what the undisturbed life left, nothing more."""
        again = self.life()
        assert again.code == 0, again.message
        assert differences(self.folder, self.whole) == []
        assert left_over(self.folder) == []


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every life is a copy of this process. For one test only: the tests of the pages run in the same process."""
    shorten_pages(monkeypatch)
    draw_flat_layers(monkeypatch)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    torch.set_num_threads(1)
    made = Inputs.make(tmp_path_factory.mktemp("inputs"))
    import_all()
    return made


@pytest.fixture(scope="session")
def whole_lives(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, float]]:
    """(folder, seconds) of a verb's undisturbed life, lived once."""
    lived: dict[str, tuple[Path, float]] = {}

    def whole(name: str) -> tuple[Path, float]:
        if name not in lived:
            folder = tmp_path_factory.mktemp(name) / "life"
            folder.mkdir()
            end = live(inputs.verbs()[name].command(folder), folder.with_suffix(".err"))
            assert end.code == 0, end.message
            assert left_over(folder) == []
            lived[name] = folder.rename(folder.with_name("whole")), end.seconds
        return lived[name]

    return whole


@pytest.fixture
def lives(
    request: pytest.FixtureRequest, inputs: Inputs, whole_lives: Callable[[str], tuple[Path, float]]
) -> Iterator[Lives]:
    """Of the verb that the test is parametrized with; all live in one place, for paths are in what is compared."""
    whole, seconds = whole_lives(request.param)
    folder = whole.with_name("life")
    folder.mkdir()
    yield Lives(inputs.verbs()[request.param], whole, seconds, folder)
    shutil.rmtree(folder)
