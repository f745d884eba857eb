"""Content changes for the fuzzer: whole files of another meaning, each with the verdicts that are right for it.

A phantom eye has frames swapped, shuffled or repeated, is encoded again at a random quality, cropped, mirrored or
turned; frames of many eyes are mixed; a fundus picture, an instrument, a cornea or the eye of a small animal is drawn.
A header that is whole goes with it, so that nothing but the pixels (or the orientation they are stored in) can tell.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from drawn_eyes import CORNEA, RODENT, bent, fundus_picture, with_instrument
from lossy_frames import encoded
from oct_dicom import make_dataset
from octjepa.phantom import DEVICES
from octjepa.volume import OCTVolume
from shaped_eye import shaped_eye

SEEDS = 3
CUT = frozenset({"no_tissue", "blank", "not_b_scans", "too_few_frames", "not_retina"})  # of what is left of a scan


@dataclass(frozen=True)
class Expected:
    """`reasons` for which the file may be refused; it may be accepted unless `refused`, and then has the `note`."""

    reasons: frozenset[str] = frozenset()
    refused: bool = False
    note: str = ""
    shape: tuple[int, int, int] | None = None

    def is_right(self, reason: str, notes: tuple[str, ...], shape: tuple[int, ...]) -> bool:
        """Whether a refusal for `reason`, or an acceptance ("") with `notes` and `shape`, is right."""
        if reason:
            return reason in self.reasons
        noted = not self.note or any(note.partition("=")[0] == self.note for note in notes)
        return not self.refused and noted and self.shape in (None, shape)


Changed = tuple[str, np.ndarray, Expected]
Spacing = tuple[float, float, float]


def _swapped(chance: random.Random, pixels: np.ndarray) -> Changed:
    one, two = chance.sample(range(len(pixels)), 2)
    order = list(range(len(pixels)))
    order[one], order[two] = two, one
    return f"frames {one} and {two} swapped", pixels[order], Expected(shape=pixels.shape)


def _shuffled(chance: random.Random, pixels: np.ndarray) -> Changed:
    order = chance.sample(range(len(pixels)), len(pixels))
    # By chance a shuffle leaves neighbours that are half alike: noted, not refused.
    return "frames shuffled", pixels[order], Expected(frozenset({"frames_unrelated"}), note="neighbours_unlike")


def _repeated(chance: random.Random, pixels: np.ndarray) -> Changed:
    times = chance.choice((2, 3, 4))
    some = np.repeat(pixels[:: chance.choice((1, 2))], times, axis=0)
    return f"every frame {times} times", some, Expected(note="repeated_frames", shape=some.shape)


def _encoded_again(chance: random.Random, pixels: np.ndarray) -> Changed:
    quality = chance.randrange(40, 99)
    return f"JPEG of quality {quality}", encoded(pixels, quality), Expected(shape=pixels.shape)


def _cropped(chance: random.Random, pixels: np.ndarray) -> Changed:
    parts = []
    for count, least in zip(pixels.shape, (3, 48, 48), strict=True):
        first = chance.randrange(0, count - least)
        parts.append(slice(first, chance.randrange(first + least, count + 1)))
    some = pixels[tuple(parts)]
    return f"cropped to {some.shape}", some, Expected(CUT)


def _turned(chance: random.Random, pixels: np.ndarray) -> Changed:
    return "upside down", pixels[:, ::-1], Expected(note="turned_upright", shape=pixels.shape)


def _mirrored(chance: random.Random, pixels: np.ndarray) -> Changed:
    return "mirrored", pixels[:, :, ::-1], Expected(note="columns_mirrored", shape=pixels.shape)


def _picture_first(chance: random.Random, pixels: np.ndarray) -> Changed:
    picture = fundus_picture(*pixels.shape[1:], seed=chance.randrange(100))
    shape = (len(pixels) - 1, *pixels.shape[1:])
    return (
        "a fundus picture first",
        np.concatenate([picture[None], pixels[1:]]),
        Expected(note="localizer_by_content", shape=shape),
    )


def _instrument(chance: random.Random, pixels: np.ndarray) -> Changed:
    first = chance.randrange(2, len(pixels) - 8)
    drawn = with_instrument(pixels, first, first + chance.randrange(3, 7))
    return "an instrument", drawn, Expected(note="object_in_vitreous", shape=pixels.shape)


CHANGES: dict[str, Callable[[random.Random, np.ndarray], Changed]] = {
    "swapped": _swapped,
    "shuffled": _shuffled,
    "repeated": _repeated,
    "encoded again": _encoded_again,
    "cropped": _cropped,
    "upside down": _turned,
    "mirrored": _mirrored,
    "picture first": _picture_first,
    "instrument": _instrument,
}
OTHERS = ("many eyes", "one position", "cornea", "rodent")  # no change of one eye
KINDS = (*CHANGES, *OTHERS)
_LEFTWARDS = [-1.0, 0.0, 0.0, 0.0, 0.0, -1.0]


def _written(pixels: np.ndarray, spacing_mm: Spacing, leftwards: bool) -> bytes:
    """A DICOM file of no known maker, with true spacing and positions."""
    data = make_dataset(np.ascontiguousarray(pixels), pitch_mm=spacing_mm[0])
    data.Manufacturer, data.ManufacturerModelName, data.ProtocolName = "Maker", "OCT", "macula"
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = "1.2.826.0.1.3680043.8.498.7"
    shared = data.SharedFunctionalGroupsSequence[0]
    shared.PixelMeasuresSequence[0].PixelSpacing = [round(mm, 6) for mm in spacing_mm[1:]]
    if leftwards:
        shared.PlaneOrientationSequence[0].ImageOrientationPatient = _LEFTWARDS
    buffer = BytesIO()
    data.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def _film(chance: random.Random) -> tuple[str, OCTVolume, np.ndarray]:
    """(what, the eye, six takes of one of its B-scans with other speckle, noise and motion)."""
    device, position = chance.choice(("topcon_maestro2", "zeiss_cirrus")), chance.choice((4, 17))
    takes = [shaped_eye(device, "healthy", 3, light=take, motion=take).volume for take in range(6)]
    film = np.stack([take.pixels[position] for take in takes])
    return f"{device}: six takes of B-scan {position}", takes[0], film


def content_case(chance: random.Random, kind: str) -> tuple[str, bytes, Expected]:
    """(what was done, the file, the verdicts that are right) for one of `KINDS`."""
    device = chance.choice(DEVICES)
    if kind in ("cornea", "rodent"):
        drawn = bent(*(CORNEA if kind == "cornea" else RODENT))
        return (
            f"drawn {kind}",
            _written(drawn.pixels, drawn.spacing_mm, False),
            Expected(frozenset({"not_retina"}), refused=True),
        )
    if kind == "one position":
        what, eye, film = _film(chance)
        wide = (0.28, *eye.spacing_mm[1:])  # 1.4 mm by the header: a film of less may be a small field
        return what, _written(film, wide, False), Expected(frozenset({"one_position"}), refused=True)
    eye = shaped_eye(device, seed=chance.randrange(SEEDS)).volume
    if kind == "many eyes":
        eyes = [shaped_eye(device, seed=seed).volume.pixels for seed in range(SEEDS)]
        frames = [eyes[index % SEEDS][(5 * index) % len(eye.pixels)] for index in range(len(eye.pixels))]
        what, pixels, expected = (
            "frames of many eyes",
            np.stack(frames),
            Expected(frozenset({"frames_unrelated"}), refused=True),
        )
    else:
        what, pixels, expected = CHANGES[kind](chance, eye.pixels)
    return f"{device}: {what}", _written(pixels, eye.spacing_mm, kind == "mirrored"), expected
