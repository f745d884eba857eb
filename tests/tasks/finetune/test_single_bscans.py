"""Single B-scans are tuned on and predicted, with our encoder and with a two-dimensional one of another project."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from octjepa.ingest import IngestOptions, build_store
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.tasks.finetune.external import load_start, tuned_network
from octjepa.tasks.finetune.fit import FinetuneInputs, finetune_store
from octjepa.tasks.finetune.inference import predict_scans
from octjepa.tasks.finetune.recipe import load_recipe
from octjepa.views.sample import make_sample
from planted import QUICK
from shaped_eye import shaped_eye

pytestmark = pytest.mark.timeout(600)
PEOPLE = {"train": 10, "val": 4, "test": 4}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture of each person; those of people with an odd number show another eye."""
    folder = tmp_path_factory.mktemp("pictures")
    volumes = [shaped_eye("topcon_maestro2", seed=seed).volume for seed in range(2)]
    manifest, people, labels = ["person_id\tfilepath"], ["person_id\trecommended_split"], ["person_id\timage\tmark"]
    splits = [split for split, count in PEOPLE.items() for _ in range(count)]
    for number, split in enumerate(splits):
        pixels = volumes[number % 2].pixels[8 + number // 2]
        Image.fromarray(pixels).save(folder / f"eye_{number}.png")
        manifest.append(f"p{number}\teye_{number}.png")
        people.append(f"p{number}\t{split}")
        labels.append(f"p{number}\teye_{number}.png\t{number % 2}")
    for name, lines in (("manifest", manifest), ("participants", people), ("labels", labels)):
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def store(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("store") / "store"
    made = build_store([pictures], path, Preprocessing(), options=IngestOptions(bscan_slices=4))
    assert made.accepted == sum(PEOPLE.values())
    return Store.open(path)


@pytest.mark.slow
def test_pictures_are_tuned_on_and_new_ones_predicted(pictures: Path, store: Store, tmp_path: Path) -> None:
    quick = load_recipe("finetune", (*QUICK, "stages.head=2", "stages.last=2", "stages.all=2", "resamples=50"))
    inputs = FinetuneInputs("phantom-tiny", store, pictures / "labels.tsv", ("mark",), tmp_path / "uses")
    finetune_store(quick, inputs, tmp_path / "tuned")
    made = predict_scans(
        tmp_path / "tuned", [pictures / "eye_1.png", pictures / "eye_2.png"], tmp_path / "out", images=True
    )
    assert made.cases == 2
    assert len((tmp_path / "out" / "predictions.tsv").read_text().splitlines()) == 3


def test_a_training_sample_holds_only_patches_of_the_bscan(store: Store) -> None:
    recipe = load_recipe("finetune", QUICK).sampling(load_start("phantom-tiny", None).recipe)
    for epoch in (None, 0, 1):
        sample = make_sample(store.read(store.table["volume_id"].iloc[0]), recipe, epoch)
        assert len(sample.grid_index) == recipe.token_count // recipe.grid[0]
        slices = set(np.unravel_index(sample.grid_index, recipe.grid)[0].tolist())
        assert len(slices) == 1
        assert slices <= {1, 2}  # a flip exchanges them


@pytest.mark.slow
def test_a_two_dimensional_encoder_reads_each_bscan_once(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import ViTConfig, ViTModel

    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(image_size=32, patch_size=16, **size)).save_pretrained(tmp_path / "vit")
    start = load_start(tmp_path / "vit", store.preprocessing)
    volume = store.read(store.table["volume_id"].iloc[0])
    (tokens,) = start.encode_volumes([volume])
    assert len(tokens.features) == 4  # four patches of one B-scan, without the class token
    network = tuned_network(start, [("binary", 2)])
    view = network.make_sample(volume, start.recipe, 0)
    assert view.shape == (1, *store.preprocessing.image_size[1:])
    assert view.any()
