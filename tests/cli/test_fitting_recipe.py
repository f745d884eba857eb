"""`ingest` names the recipe that suits the machine, and what its grid makes of the scans."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from octjepa import machine, store
from octjepa.cli.data import print_fitting_recipe


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        (0, "recipe tiny_cpu suits this machine (no GPU found): it uses 16 x 128 x 128 voxels of scans of"),
        (1, "recipe one_gpu suits this machine (1 GPU found): it uses 32 x 256 x 256 voxels of scans of"),
        (8, "recipe eight_gpus suits this machine (8 GPUs found): it uses 32 x 256 x 256 voxels of scans of"),
    ],
)
def test_the_recipe_follows_the_number_of_gpus(
    gpus: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pd.DataFrame({"native_d": [145, 145, 11], "native_h": [496] * 3, "native_w": [512] * 3})
    monkeypatch.setattr(machine, "gpu_count", lambda: gpus)
    monkeypatch.setattr(store.Store, "open", lambda location: SimpleNamespace(table=table))
    print_fitting_recipe("store")
    printed = capsys.readouterr().out
    assert printed.startswith(f"{line} 145 x 496 x 512")
    assert ("--recipe" in printed) == (gpus > 0)
