"""How far the en face hashes of copies, repeats, fellow eyes and other people lie apart, in bits of 256.

Commands: python tests/canonical/near_duplicate_distances.py [--people N]
          python tests/canonical/near_duplicate_distances.py --seconds 10000 30000 100000    (CPU-seconds of the search)
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from test_near_duplicates import flipped, index

from octjepa.canonical.near_duplicates import near_duplicates
from octjepa.canonical.pipeline import canonicalise
from octjepa.phantom import DEVICES
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume
from shaped_eye import LESIONS, shaped_eye


def jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    frames = []
    for frame in pixels:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=quality)
        frames.append(np.asarray(Image.open(buffer)))
    return np.stack(frames)


COPIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "JPEG quality 60": lambda pixels: jpeg(pixels, 60),
    "JPEG quality 20": lambda pixels: jpeg(pixels, 20),
    "brightened by 15 % and 8": lambda pixels: np.clip(pixels * 1.15 + 8, 0, 255).astype(np.uint8),
    "gamma 0.8": lambda pixels: (255 * (pixels / 255) ** 0.8).astype(np.uint8),
    "shifted by 3 depth samples, 2 columns": lambda pixels: np.roll(pixels, (3, 2), (1, 2)),
    "shifted by 5 depth samples, 4 columns": lambda pixels: np.roll(pixels, (-5, 4), (1, 2)),
    "4 pixels cropped all around": lambda pixels: pixels[:, 4:-4, 4:-4],
    "2 B-scans and 8 columns cropped": lambda pixels: pixels[1:-1, :, 6:-2],
}


def code(volume: OCTVolume) -> np.ndarray:
    digits = canonicalise(volume, Preprocessing()).enface_hash
    return np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8))


def table(people: int) -> dict[str, list[int]]:
    """pair -> distances. Each person is scanned on one device; five of six people have a lesion."""
    found: dict[str, list[int]] = defaultdict(list)
    first = []
    for number in range(people):
        device, shape = DEVICES[number % 4], ("healthy", *LESIONS)[number % 6]
        volume = shaped_eye(device, shape, number).volume
        base = code(volume)
        first.append(base)
        for name, change in COPIES.items():
            copy = replace(volume, pixels=np.ascontiguousarray(change(volume.pixels)), content_hash="")
            found[name].append(int((code(copy) != base).sum()))
        again = shaped_eye(device, shape, number, light=1, motion=number + 1).volume
        found["same eye, another session"].append(int((code(again) != base).sum()))
        elsewhere = shaped_eye(DEVICES[(number + 1) % 4], shape, number, light=2).volume
        found["same eye, another instrument"].append(int((code(elsewhere) != base).sum()))
        fellow = shaped_eye(device, shape, number, eye="OS").volume
        found["fellow eye"].append(int((code(fellow) != base).sum()))
    found["another person"] = [int((a != b).sum()) for a, b in itertools.combinations(first, 2)]
    return found


def seconds_of_search(volumes: int) -> float:
    """CPU-seconds to find 1,000 planted pairs, up to 31 bits apart, among so many random hashes."""
    rng = np.random.default_rng(1)
    codes = [rng.bytes(32).hex() for _ in range(volumes)]
    codes += [flipped(codes[k], int(apart), rng) for k, apart in enumerate(rng.integers(0, 32, 1000))]
    rows = index(codes)
    start = time.process_time()
    assert len(near_duplicates(rows)) == 1000
    return time.process_time() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--people", type=int, default=24)
    parser.add_argument("--seconds", type=int, nargs="+", metavar="VOLUMES", help="time the search instead")
    requested = parser.parse_args()
    for volumes in requested.seconds or ():
        print(f"{volumes:,} volumes: {seconds_of_search(volumes):.1f} s")
    for name, bits in ({} if requested.seconds else table(requested.people)).items():
        print(f"| {name} | {min(bits)} | {np.median(bits):.0f} | {max(bits)} |")
