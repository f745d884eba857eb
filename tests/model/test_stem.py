"""The non-linear stem: local to a patch, non-linear, and refused where it cannot be."""

import pytest
import torch

from octjepa.errors import RecipeError, UsageError
from octjepa.model import VJEPA3D
from octjepa.model.encoder import HIDDEN, PatchMLP
from octjepa.model.vjepa2 import to_vjepa2
from synthetic import small_recipe


def encoder(**model):
    torch.manual_seed(0)
    return VJEPA3D.from_recipe(small_recipe(model={"stem": "patch_mlp", **model})).target_encoder


def test_nothing_leaks_between_patches():
    own, patches = encoder(), torch.randn(2, 6, 1024)
    before = own.embed_patches(patches)
    changed = patches.clone()
    changed[0, 3] += 1.0
    after = own.embed_patches(changed)
    others = torch.ones(2, 6, dtype=torch.bool)
    others[0, 3] = False
    assert torch.equal(before[others], after[others])
    assert not torch.allclose(before[0, 3], after[0, 3])


def test_it_is_the_mlp_of_the_sub_patches_by_hand():
    """Sub-patches in raster order, voxels of each in raster order; no sub-patch sees another before the last layer."""
    stem = PatchMLP((4, 8, 8), 10)
    stem.initialise()
    patch = torch.randn(4, 8, 8)
    hidden = [
        torch.nn.functional.gelu(stem.inner(patch[a : a + 2, b : b + 4, c : c + 4].flatten()))
        for a in (0, 2)
        for b in (0, 4)
        for c in (0, 4)
    ]
    assert torch.allclose(stem(patch.reshape(1, 1, -1))[0, 0], stem.outer(torch.cat(hidden)), atol=1e-6)
    assert stem.outer.in_features == 8 * HIDDEN


def test_it_is_not_linear():
    """Even before training: a randomly initialised encoder has to have what a stem is for."""
    embed, x, y = encoder().embed, torch.randn(1, 8, 1024), torch.randn(1, 8, 1024)
    zero = embed(torch.zeros(1, 8, 1024))
    bent = (embed(x + y) - embed(x) - embed(y) + zero).norm() / (embed(x + y) - zero).norm()
    assert bent > 0.2
    linear = VJEPA3D.from_recipe(small_recipe()).target_encoder.embed
    straight = linear(x + y) - linear(x) - linear(y) + linear(torch.zeros(1, 8, 1024))
    assert straight.norm() / linear(x + y).norm() < 1e-4


def test_patches_that_cannot_be_divided_are_refused():
    with pytest.raises(RecipeError, match=r"patch_mlp needs a tokens\.patch_size of multiples of"):
        small_recipe(model={"stem": "patch_mlp"}, tokens={"patch_size": [1, 16, 16]})
    with pytest.raises(ValueError, match="cannot be divided"):
        PatchMLP((4, 6, 16), 8)


def test_it_has_no_form_in_transformers():
    with pytest.raises(ValueError, match="a non-linear stem"):
        to_vjepa2(encoder(positions="rope_tiled"), (4, 16, 16))


def test_a_warm_start_from_the_other_stem_is_refused(tmp_path):
    from octjepa.checkpoint.warm_start import warm_start
    from planted import write_encoder

    path = write_encoder(tmp_path / "encoder.safetensors", small_recipe())
    recipe = small_recipe(model={"stem": "patch_mlp", "warm_start": str(path)})
    with pytest.raises(UsageError, match=r"linear stem, the recipe by model\.stem=patch_mlp"):
        warm_start(VJEPA3D.from_recipe(recipe), recipe)
