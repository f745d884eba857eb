"""Copies of a scan are near-duplicates; repeats, fellow eyes and other people are not; finding them is not an
all-pairs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from octjepa.canonical.near_duplicates import NEAR_BITS, near_duplicates, near_duplicates_across_people
from octjepa.canonical.pipeline import canonicalise
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume
from shaped_eye import shaped_eye


def code(volume: OCTVolume, **changes: object) -> str:
    preprocessing = Preprocessing().model_copy(update=changes)
    return canonicalise(volume, preprocessing).enface_hash


def bits(one: str, other: str) -> int:
    return (int(one, 16) ^ int(other, 16)).bit_count()


def index(codes: list[str], people: list[str] | None = None) -> pd.DataFrame:
    names = [f"v{number:06d}" for number in range(len(codes))]
    return pd.DataFrame({"volume_id": names, "enface_hash": codes, "person_id": people or names})


@pytest.mark.slow
@pytest.mark.parametrize(("device", "shape"), [("topcon_triton", "drusen"), ("zeiss_cirrus", "healthy")])
def test_copies_are_near_and_other_scans_are_not(device: str, shape: str) -> None:
    volume = shaped_eye(device, shape, seed=5).volume
    base, pixels = code(volume), volume.pixels
    rng = np.random.default_rng(0)
    copies = [
        np.clip(pixels * 1.15 + 8, 0, 255).astype(np.uint8),
        np.clip(pixels + rng.normal(0, 6, pixels.shape), 0, 255).astype(np.uint8),
        np.roll(pixels, (3, 2), (1, 2)),
        pixels[:, 4:-4, 4:-4],
    ]
    for copy in copies:
        assert bits(base, code(replace(volume, pixels=np.ascontiguousarray(copy), content_hash=""))) <= NEAR_BITS
    others = [
        shaped_eye(device, shape, seed=5, light=3, motion=4).volume,  # the same eye in another session
        shaped_eye(device, shape, seed=5, eye="OS").volume,
        shaped_eye(device, shape, seed=6).volume,
    ]
    for other in others:
        assert bits(base, code(other)) > NEAR_BITS


def test_the_hash_is_that_of_a_right_eye() -> None:
    volume = shaped_eye("zeiss_cirrus", seed=5).volume
    turned = replace(volume, pixels=np.ascontiguousarray(volume.pixels[..., ::-1]), laterality="OS", content_hash="")
    assert bits(code(volume), code(turned)) <= 8
    assert bits(code(volume), code(turned, orientation="native")) <= 8
    assert bits(code(volume), code(replace(turned, laterality="OD"))) > NEAR_BITS


def flipped(digits: str, count: int, rng: np.random.Generator) -> str:
    code = np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8))
    code[rng.choice(256, count, replace=False)] ^= 1
    return np.packbits(code).tobytes().hex()


def test_every_pair_up_to_31_bits_is_found_among_many_and_nothing_else() -> None:
    rng = np.random.default_rng(1)
    codes = [rng.bytes(32).hex() for _ in range(6000)]
    planted = [(k, int(distance)) for k, distance in enumerate(rng.integers(0, 32, 300))]
    codes += [flipped(codes[k], distance, rng) for k, distance in planted]
    found = near_duplicates(index(codes))
    assert found == sorted((f"v{k:06d}", f"v{6000 + n:06d}", d) for n, (k, d) in enumerate(planted))
    further = [flipped(codes[k], 40, rng) for k in range(300)]
    assert len(near_duplicates(index(codes[:6000] + further))) > 285
    assert not near_duplicates(index(codes[:6000] + further), bits=39)


def test_equal_hashes_are_listed_with_the_first_and_empty_ones_never() -> None:
    table = index(["ab" * 32] * 4 + ["", ""], people=["1", "1", "2", "1", "3", "4"])
    assert near_duplicates(table) == [("v000000", f"v00000{k}", 0) for k in (1, 2, 3)]
    assert near_duplicates_across_people(table) == [("v000000", "v000002", 0)]
    assert near_duplicates(table.iloc[:0]) == []
