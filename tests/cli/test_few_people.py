"""Pretraining on the scans of one person warns before it starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from octjepa.cli import training


@pytest.mark.parametrize(("people", "warns"), [(1, True), (training.FEWEST_PEOPLE, False)])
def test_few_people_are_named_before_a_pretraining(people: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    table = pd.DataFrame({"person_id": [str(number % people) for number in range(60)]})
    store: Any = SimpleNamespace(table=table, location="store")
    training._warn_of_few_people(store)
    assert ("store has 1 person, and an encoder needs at least 20" in caplog.text) == warns
    assert bool(caplog.records) == warns
