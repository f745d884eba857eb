"""The encoder in scikit-learn's hands: equal to `embed`, clonable, in pipelines and cross-validation by person."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import octjepa
from octjepa import VolumeEmbedder
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.pooling import POOL_WIDTHS
from octjepa.errors import ContractError, UsageError, VolumeRejected
from octjepa.ingest import build_store
from octjepa.model import VJEPA3D
from octjepa.phantom import write_cohort
from octjepa.store import Store
from synthetic import MemoryStore, small_recipe


@pytest.fixture(scope="module")
def small() -> PretrainedEncoder:
    torch.manual_seed(0)
    return PretrainedEncoder(VJEPA3D.from_recipe(small_recipe()).target_encoder, small_recipe(), "small")


@pytest.fixture(scope="module")
def memory(small: PretrainedEncoder) -> MemoryStore:
    """12 people, two of every three of them brighter than the third."""
    return MemoryStore(small.recipe.preprocessing, 12, 0)


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Store]:
    """The four scans of two phantom people, as files and in a store that phantom-tiny can read."""
    folder = tmp_path_factory.mktemp("eyes")
    write_cohort(folder / "phantom", 2, seed=3)
    recipe = octjepa.load_encoder("phantom-tiny").recipe
    build_store([str(folder / "phantom")], folder / "store", recipe.preprocessing, workers=1)
    return sorted(folder.rglob("*.dcm")), Store.open(folder / "store")


def test_a_scan_of_another_pattern_is_named_by_its_number(small: PretrainedEncoder) -> None:
    about = {"provenance": {}, "person_id": "1", "device": "topcon_triton", "source": "eye.dcm"}
    scan = octjepa.OCTVolume(np.zeros((4, 32, 32), np.uint8), (0.05, 0.004, 0.01), **about, pattern="circle")
    with pytest.raises(UsageError, match=r"scan 0: the pattern of eye\.dcm is circle: the encoder knows raster"):
        VolumeEmbedder(small).fit().transform([scan])


@pytest.mark.slow
def test_paths_volumes_and_ids_of_a_store_give_the_features_of_embed(eyes: tuple[list[Path], Store]) -> None:
    paths, store = eyes
    encoder = octjepa.load_encoder("phantom-tiny")
    expected = np.stack([encoder.embed(path, "zones_whitened") for path in paths])
    embedder = VolumeEmbedder("phantom-tiny", batch=3).fit()
    found = embedder.transform(paths)
    assert found.dtype == np.float32
    assert found.shape == (4, 48 * encoder.dim)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    read = [octjepa.read_volume(path) for path in paths]
    np.testing.assert_allclose(embedder.fit_transform([str(paths[0]), *read[1:]]), expected, atol=1e-5)
    table = store.table.set_index("sop_instance_uid")
    ids = table.loc[[volume.sop_instance_uid for volume in read], "volume_id"]
    of_store = VolumeEmbedder("phantom-tiny", store=store.path)
    np.testing.assert_allclose(of_store.fit_transform(ids), expected, atol=1e-5)


@pytest.mark.parametrize("pool", POOL_WIDTHS)
def test_every_pooling_has_named_columns(small: PretrainedEncoder, memory: MemoryStore, pool: str) -> None:
    embedder = VolumeEmbedder(small, pool=pool, store=memory)
    found = embedder.set_output(transform="pandas").fit_transform(list(memory.volumes)[:3])
    assert list(found.columns[:2]) == [f"small_{pool}_0", f"small_{pool}_1"]
    assert found.shape == (3, POOL_WIDTHS[pool] * small.dim)
    assert set(found.dtypes) == {np.dtype(np.float32)}


def test_embedding_inside_cross_validation_is_embedding_before_it(
    small: PretrainedEncoder, memory: MemoryStore
) -> None:
    ids = memory.table["volume_id"].to_numpy()
    people = np.repeat(np.arange(6), 2)
    truth = np.arange(12) % 3 == 0
    embedder = VolumeEmbedder(small, store=memory)
    by_person = GroupKFold(2)
    inside = make_pipeline(embedder, StandardScaler(), LogisticRegression())
    outside = make_pipeline(StandardScaler(), LogisticRegression())
    how = {"cv": by_person, "groups": people, "method": "predict_proba"}
    vectors = embedder.fit_transform(ids)
    found = cross_val_predict(inside, ids, truth, **how)
    np.testing.assert_allclose(found, cross_val_predict(outside, vectors, truth, **how), atol=1e-4)
    scores = cross_val_score(inside, ids, truth, cv=by_person, groups=people, scoring="roc_auc")
    assert scores.shape == (2,)
    assert np.isfinite(scores).all()


def test_beside_other_columns_of_a_table(small: PretrainedEncoder, memory: MemoryStore) -> None:
    table = memory.table.assign(age=np.linspace(40, 80, 12))
    both = ColumnTransformer(
        [("oct", VolumeEmbedder(small, pool="mean", store=memory), "volume_id"), ("age", StandardScaler(), ["age"])]
    )
    assert both.fit_transform(table).shape == (12, small.dim + 1)
    assert both.get_feature_names_out()[[0, -1]].tolist() == ["oct__small_mean_0", "age__age"]


def test_parameters_are_those_given_and_clones_start_unfitted(small: PretrainedEncoder, memory: MemoryStore) -> None:
    embedder = VolumeEmbedder("phantom-tiny", pool="mean", batch=4)
    assert embedder.get_params() == {"encoder": "phantom-tiny", "pool": "mean", "store": None, "batch": 4}
    assert clone(embedder).get_params() == embedder.get_params()
    assert embedder.set_params(pool="layers", batch=2).pool == "layers"
    fitted = VolumeEmbedder(small, store=memory).fit()
    with pytest.raises(NotFittedError):
        clone(fitted).transform(list(memory.volumes))
    with pytest.raises(NotFittedError):
        clone(fitted).get_feature_names_out()


# The others transform a matrix of numbers, which no scan is, or give parameters of types that the tests' hook refuses.
CHECKS = (
    "check_estimator_cloneable",
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
    "check_estimator_repr",
    "check_no_attributes_set_in_init",
    "check_estimators_overwrite_params",
    "check_dont_overwrite_parameters",
    "check_estimators_fit_returns_self",
    "check_get_params_invariance",
    "check_set_params",
    "check_mixin_order",
    "check_fit_check_is_fitted",
    "check_n_features_in_after_fitting",
    "check_positive_only_tag_during_fit",
    "check_transformer_n_iter",
    "check_parameters_default_constructible",
)


@pytest.mark.parametrize("check", CHECKS)
def test_scikit_learns_own_checks(check: str) -> None:
    from sklearn.utils import estimator_checks  # takes a second, and every worker imports this file

    if not hasattr(estimator_checks, check):
        pytest.skip(f"this scikit-learn has no {check}")
    run = partial(getattr(estimator_checks, check), "VolumeEmbedder")
    run(VolumeEmbedder("phantom-tiny"))


@pytest.mark.slow
def test_what_is_no_scan_is_reported(
    small: PretrainedEncoder, memory: MemoryStore, eyes: tuple[list[Path], Store]
) -> None:
    embedder = VolumeEmbedder(small, store=memory).fit()
    for scans, message in (
        ([], "no scan was given"),
        (eyes[0][0], "expected a list of scans"),
        ("volume0000", "expected a list of scans"),
        (memory.table[["volume_id"]], "table of 2 dimensions"),
        (["volume0000", 3.5], "scan 1 is float"),
    ):
        with pytest.raises(UsageError, match=message):
            embedder.transform(scans)
    with pytest.raises(UsageError, match="no pool median"):
        VolumeEmbedder(small, pool="median").fit()
    with pytest.raises(UsageError, match="batch is 0"):
        VolumeEmbedder(small, batch=0).fit()
    with pytest.raises(UsageError, match="has no volume 0123"):
        VolumeEmbedder("phantom-tiny", store=eyes[1]).fit_transform(["0123"])
    with pytest.raises(ContractError, match="image_size"):
        VolumeEmbedder(small, store=eyes[1]).fit()


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_named(eyes: tuple[list[Path], Store], tmp_path: Path) -> None:
    broken = tmp_path / "page.dcm"
    broken.write_text("<html>", encoding="utf-8")
    with pytest.raises(VolumeRejected, match=r"not_dicom: scan 1 \(.*page.dcm\)"):
        VolumeEmbedder("phantom-tiny").fit_transform([eyes[0][0], broken])


def test_scans_of_pretraining_are_reported(
    small: PretrainedEncoder, memory: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    saw = PretrainedEncoder(small.encoder, small.recipe, "small", ["volume0001", "volume0002"])
    VolumeEmbedder(saw, store=memory).fit_transform(list(memory.volumes)[:6])
    assert "small was pretrained on 2 of these 6 volumes" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        VolumeEmbedder(saw, store=memory).fit_transform(list(memory.volumes)[3:6])
    assert caplog.text == ""
