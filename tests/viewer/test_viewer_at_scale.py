"""The viewer on many volumes, and on a store and scans that are in a bucket."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bucket_servers import Bucket
from octjepa.errors import OctjepaError
from octjepa.ingest.build import build_store
from octjepa.phantom import write_cohort
from octjepa.read.reader import read_volume
from octjepa.recipe import Preprocessing
from octjepa.remote import join, put_bytes
from octjepa.viewer.scans import Scans
from octjepa.viewer.server import open_scans

pytest.importorskip("starlette")
COUNT = 100_000


@pytest.fixture(scope="module")
def many(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Scans:
    """100,000 volumes of half as many people, of which the first twelve alone are there."""
    store = tmp_path_factory.mktemp("many") / "store"
    shutil.copytree(made / "store", store)
    table = pd.read_parquet(store / "volumes.parquet")
    grown = table.iloc[np.arange(COUNT) % len(table)].reset_index(drop=True)
    rest = range(len(table), COUNT)
    for column, name in (("volume_id", "x{:015d}"), ("content_hash", "x{:063d}"), ("person_id", "p{:06d}")):
        values = [name.format(number // 2 if column == "person_id" else number) for number in rest]
        grown[column] = [*table[column], *values]
    grown.to_parquet(store / "volumes.parquet")
    return open_scans(store)


@pytest.mark.slow
def test_a_store_of_100_000_volumes_is_given_out_in_pages(many: Scans) -> None:
    assert many.about().volumes == COUNT
    first, last = many.volumes.page(), many.volumes.page(offset=COUNT - 50)
    assert (first.matching, len(first.volumes), len(last.volumes)) == (COUNT, 200, 50)
    name = f"x{COUNT - 1:015d}"
    around = many.volumes.page(around=name)
    assert name in {row.id for row in around.volumes}
    assert [row.id for row in many.volumes.page(search=name).volumes] == [name]
    assert [row.id for row in many.volumes.same_person(name)] == [f"x{COUNT - 2:015d}"]


def test_a_volume_that_is_not_there_is_reported_and_the_others_go_on(many: Scans) -> None:
    name = f"x{COUNT - 1:015d}"
    with pytest.raises(OctjepaError, match="ingest again"):
        many.band(name)
    assert many.first(name).number is None
    assert many.native_about(name).reason
    assert many.band(next(one.id for one in many.volumes.page(search="eyes/03.dcm").volumes))


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_a_store_and_its_scans_in_a_bucket_are_shown(bucket: Bucket, tmp_path: Path) -> None:
    """Also where the scans were ingested from a disk and copied to the bucket since."""
    write_cohort(tmp_path / "eyes", people=1, seed=3, devices=["zeiss_cirrus"], size="small", workers=1)
    build_store([tmp_path / "eyes"], tmp_path / "store", Preprocessing())
    for kind in ("eyes", "store"):
        for file in (tmp_path / kind).rglob("*"):
            if file.is_file():
                put_bytes(file.read_bytes(), join(bucket.url, file.relative_to(tmp_path).as_posix()))
    scans = open_scans(join(bucket.url, "store"), [join(bucket.url, "eyes")])
    name = min(scans.ids)
    volume = read_volume(tmp_path / "eyes" / scans.volumes.entry(name).file)
    assert scans.first(name).number is not None
    assert scans.native_about(name).to_json()["shape"] == list(volume.shape)
    np.testing.assert_array_equal(scans.native(name).volume.pixels, volume.pixels)
    assert scans.slice_png(name, 3).startswith(b"\x89PNG")
