"""A small cohort and a set of tiny eyes, each written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from oct_dicom import make_dataset, retina, save


@pytest.fixture(scope="session")
def phantom_cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four people, two eyes each, four devices; an AI-READI-shaped tree."""
    from octjepa.phantom import write_cohort

    out = tmp_path_factory.mktemp("cohort") / "set"
    write_cohort(out, people=4, seed=11)
    return out


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five people, two eyes each, of one device; no manifest; a few milliseconds each to ingest."""
    root = tmp_path_factory.mktemp("tiny") / "set"
    for number in range(10):
        ds = make_dataset(retina(seed=number))
        ds.PatientID, ds.ImageLaterality = str(1001 + number // 2), "RL"[number % 2]
        save(ds, root / "topcon_maestro2" / f"eye{number}.dcm")
    return root
