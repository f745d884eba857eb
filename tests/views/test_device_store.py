"""Views made on the device are those of the host, to the bit; what only the host computes is refused."""

from __future__ import annotations

import pytest
import torch

from octjepa.checkpoint import folder
from octjepa.errors import UsageError
from octjepa.train.hardware_settings import choose_data_on, compiles, loader_workers, stored_bytes
from octjepa.train.loop import pretrain
from octjepa.views.cuts import DeviceLookup, cut_batches, make_patches
from octjepa.views.device_store import DeviceStore
from octjepa.views.loader import TrainingDataset, training_batches
from synthetic import MemoryStore, small_recipe

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("where", ["patches", "device"])
@pytest.mark.parametrize(
    ("views", "masks"),
    [
        ({"flip_slow": 0.5, "flip_fast": 0.5}, {}),
        ({"crop": False, "flip_slow": 0.0}, {"per_target": 2}),
        ({"gain": 0.3, "gamma": 0.2, "flip_fast": 0.5}, {"ratio": 0.5, "target_share": 0.5}),
    ],
)
def test_a_batch_is_that_of_the_host(views, masks, where):
    recipe = small_recipe(views=views, masks=masks)
    store = MemoryStore(recipe.preprocessing)
    dataset = TrainingDataset(store, recipe, sorted(store.volumes)[:12])
    here = DeviceStore(store, recipe, dataset.volume_ids, CPU) if where == "device" else DeviceLookup(CPU)
    for mine, theirs in zip(here.batches(dataset, 0, 6, 0), training_batches(dataset, 0, 6, 0), strict=True):
        assert mine.volume_ids == theirs.volume_ids
        for name, one, other in zip(mine._fields[:7], mine[:7], theirs[:7], strict=True):
            assert torch.equal(one, other), name


def test_loader_processes_send_a_byte_a_voxel():
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    dataset = TrainingDataset(store, recipe, sorted(store.volumes)[:12])
    (cut,) = cut_batches(dataset, make_patches, (0, 1, 0, 0, 1), CPU)
    assert cut.patches.dtype == torch.uint8
    assert cut.patches.shape == (4, 24, 4 * 16 * 16)
    assert cut.batch.context_view.numel() == cut.batch.target_view.numel() == 0


@pytest.mark.slow
def test_a_run_trains_the_weights_of_one_whose_views_the_host_makes(tmp_path):
    weights = []
    for where in ("host", "patches", "device"):
        recipe = small_recipe(machine={"data_on": where, "loader_workers": 0}, monitor={"every_updates": None})
        pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / where)
        last = folder.list_checkpoints(tmp_path / where / "checkpoints")[-1]
        weights.append(folder.read_tensors(last, "model.safetensors"))
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])


@pytest.mark.parametrize("views", [{"blur": 0.5}, {"speckle": 0.1}, {"rotation_degrees": 5.0}, {"zoom": 0.1}])
def test_what_only_the_host_computes_is_refused_or_left_to_it(views):
    (name,) = views
    for where in ("patches", "device"):
        with pytest.raises(UsageError, match=rf"data_on={where} does not support views\.{name}"):
            choose_data_on(small_recipe(views=views, machine={"data_on": where}), CPU, 12)
    assert choose_data_on(small_recipe(views=views), CUDA, 12).value == "host"


def test_a_gpu_holds_the_voxels_where_they_fill_a_quarter_of_it(monkeypatch):
    recipe = small_recipe()
    needed = stored_bytes(recipe, 100)
    assert needed == 100 * 8 * 72 * 72
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (4 * needed, 8 * needed))
    assert choose_data_on(recipe, CUDA, 100).value == "device"
    assert choose_data_on(recipe, CUDA, 101).value == "patches"
    assert choose_data_on(recipe, CPU, 1).value == "host"
    assert choose_data_on(small_recipe(machine={"data_on": "host"}), CUDA, 1).value == "host"


def test_processes_and_compiled_blocks_follow_the_device(monkeypatch):
    recipe = small_recipe()
    monkeypatch.setattr("octjepa.train.hardware_settings.cores", lambda: 12)
    assert (loader_workers(recipe, CPU), loader_workers(recipe, CUDA)) == (0, 11)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert loader_workers(recipe, CUDA) == 2
    assert loader_workers(small_recipe(machine={"loader_workers": 5}), CUDA) == 5
    monkeypatch.setattr("octjepa.train.hardware_settings.importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("octjepa.train.hardware_settings.shutil.which", lambda name: name)
    assert compiles(recipe, CUDA, 1000)
    assert not compiles(recipe, CUDA, 999)
    assert not compiles(recipe, CPU, 1000)
    assert compiles(small_recipe(machine={"compile": True}), CPU, 1)
    assert not compiles(small_recipe(machine={"compile": False}), CUDA, 1000)
    monkeypatch.setattr("octjepa.train.hardware_settings.shutil.which", lambda name: None)
    assert not compiles(recipe, CUDA, 1000), "without a C compiler there is nothing to build with"


def test_batches_for_a_gpu_lie_in_pinned_memory(monkeypatch):
    given = []

    class Loader:
        def __init__(self, dataset, **options):
            given.append(options["pin_memory"])

        def __iter__(self):
            return iter(())

    monkeypatch.setattr("octjepa.views.loader.DataLoader", Loader)
    recipe = small_recipe()
    dataset = TrainingDataset(MemoryStore(recipe.preprocessing), recipe, ["volume0000"])
    assert list(training_batches(dataset, 0, 1, 0, pin_memory=True)) == []
    assert given == [True]
