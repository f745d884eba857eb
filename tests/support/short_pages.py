"""Report pages that cost a fraction of a second, for tests that are not about their pictures.

The tests of the pictures themselves are in tests/report (`page`, test_occlusion, test_mask_report, test_store_layers).
"""

from __future__ import annotations

import pytest
from markupsafe import Markup


def shorten_pages(patch: pytest.MonkeyPatch) -> None:
    """One eye's occlusion map instead of four, and a few masks without their chart."""
    patch.setattr("octjepa.explain.eyes.MAX_EYES", 1)
    patch.setattr("octjepa.report.sections._MASK_TOKENS", 1000)
    patch.setattr("octjepa.report.sections._FEWEST_MASKS", 1)
    patch.setattr("octjepa.report.figures.masks.mask_chart", lambda measured: Markup('<svg class="chart"></svg>'))


def draw_flat_layers(patch: pytest.MonkeyPatch) -> None:
    """Even layers in every scan of a store, without the segmentation network, which takes seconds for each scan."""
    from flat_layers import FlatLayers

    patch.setattr("octjepa.tasks.segmenter.store_layers.LayerCache", FlatLayers)
