"""Parts of token folders from blocks of equally many tokens a volume."""

from __future__ import annotations

import numpy as np


def token_part(vector: np.ndarray, untrained: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
    """What `token_folder.write_part` takes, from features [volumes, k, dim] and positions [volumes, k]."""
    volumes, count, dim = vector.shape
    return {
        "vector": vector.astype(np.float16).reshape(-1, dim),
        "untrained": untrained.astype(np.float16).reshape(-1, dim),
        "positions": positions.astype(np.int32).reshape(-1),
        "counts": np.full(volumes, count, np.int32),
    }
