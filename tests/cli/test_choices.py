"""Options of a closed list show it in their help, and it is the list that the code knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest

from octjepa.cli import data, results
from octjepa.embed.sklearn_transformer import VolumeEmbedder
from octjepa.encoders.pooling import DEFAULT_POOL, DEFAULT_POOLS, POOL_WIDTHS, POSITION_FREE_POOL
from octjepa.evaluate.cases import LEVELS, RULES
from octjepa.evaluate.probe import ProbeSettings
from octjepa.evaluate.targets import TASKS
from octjepa.explain import occlusion

KNOWN = {
    (results.probe, "task"): set(TASKS),
    (results.probe, "level"): set(LEVELS),
    (results.probe, "several"): set(RULES),
    (results.leaderboard, "level"): set(LEVELS),
    (results.leaderboard, "task"): set(TASKS) - {"multilabel"},
    (data.split, "by"): {"recommended", "stratified"},
}


@pytest.mark.parametrize(("verb", "option"), list(KNOWN), ids=lambda value: getattr(value, "__name__", value))
def test_the_help_names_every_choice(verb: Callable[..., None], option: str) -> None:
    assert set(get_args(get_type_hints(verb)[option])) == KNOWN[verb, option]


def test_one_pooling_is_the_default_of_all() -> None:
    assert DEFAULT_POOL == ProbeSettings().paired_pool == VolumeEmbedder("run").pool == "zones_whitened"
    assert DEFAULT_POOLS == (POSITION_FREE_POOL, DEFAULT_POOL)
    assert POSITION_FREE_POOL == occlusion.POOL == "mean_std_max"
    option = get_type_hints(results.embed, include_extras=True)["pool"].__metadata__[0]
    assert "Default: " + " and ".join(DEFAULT_POOLS) in option.help
    assert results.POOLS.split(", ") == list(POOL_WIDTHS)
