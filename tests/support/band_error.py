"""How far the membranes that the store finds lie from the true ones."""

from __future__ import annotations

import numpy as np

from octjepa.canonical.pipeline import resample_in_plane
from octjepa.canonical.quality import structured_frames
from octjepa.canonical.resample import centred_positions
from octjepa.canonical.surfaces import find_surfaces
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume

Errors = dict[str, np.ndarray]


def errors_um(volume: OCTVolume, ilm: np.ndarray, bm: np.ndarray, preprocessing: Preprocessing) -> Errors:
    """Signed error in um of "ilm" and "bm" at every A-scan of the B-scans that are kept; positive is too deep.

    `ilm` and `bm` are the true native rows, [D, W].
    """
    varied = structured_frames(volume.pixels)
    _, height, width = volume.shape
    _, dy, dx = volume.spacing_mm
    _, ty, tx = preprocessing.target_spacing_mm
    columns_mm = centred_positions(int(width * dx / tx), tx)
    image = resample_in_plane(volume.pixels[varied], volume, preprocessing, columns_mm)
    found = find_surfaces(image, ty, tx)
    result = {}
    for name, rows, true in (("ilm", found.ilm, ilm[varied]), ("bm", found.bm, bm[varied])):
        found_mm = (rows - (image.shape[1] - 1) / 2) * ty
        native_mm = (true - (height - 1) / 2) * dy
        true_mm = np.stack([np.interp(columns_mm, centred_positions(width, dx), line) for line in native_mm])
        result[name] = (found_mm - true_mm) * 1000
    return result
