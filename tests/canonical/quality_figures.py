"""The figures of docs/quality.md: quality of clean phantoms by device, and of one eye made worse step by step.

Command: python tests/canonical/quality_figures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from test_quality import blanked, cut_above, darker, filled, jittered, made, noisier

from octjepa.phantom import DEVICES
from shaped_eye import shaped_eye

DAMAGES = {
    "noise added, dB": (noisier, "snr_db"),
    "less light, dB": (darker, "snr_db"),
    "cut from above": (cut_above, "clipped_share"),
    "B-scans blanked": (blanked, "blank_share"),
    "axial jitter, um": (jittered, "motion_um"),
    "filled with white": (filled, "fill_share"),
}

if __name__ == "__main__":
    for device in DEVICES:
        eyes = [made(shaped_eye(device, seed=seed).volume).measurements for seed in range(12)]
        score, snr, motion = ([float(eye[name]) for eye in eyes] for name in ("quality", "snr_db", "motion_um"))
        print(
            f"| {device} | {np.median(score):.3f} ({min(score):.3f}, {max(score):.3f}) "
            f"| {np.median(snr):.1f} | {np.median(motion):.1f} |"
        )
    volume = shaped_eye("zeiss_cirrus", seed=2).volume
    for name, (damage, part) in DAMAGES.items():
        steps = [made(volume, damage(volume, step)).measurements for step in range(4)]
        print(f"| {name} | " + " | ".join(f"{float(of[part]):.2f}, {float(of['quality']):.2f}" for of in steps) + " |")
