"""CPU-seconds and recall of the search for near-duplicates among random hashes of which a twentieth has a near one.

python benchmarks/near_duplicates.py 10000 100000 1000000
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import pandas as pd

from octjepa.canonical.near_duplicates import NEAR_BITS, near_duplicates


def hashes(count: int, planted: int) -> pd.DataFrame:
    """A table of `count` random hashes and of `planted` that are 1 to 40 bits from one of them."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    near = np.unpackbits(codes[:planted], axis=1)
    for code in near:
        code[rng.choice(256, rng.integers(1, NEAR_BITS + 1), replace=False)] ^= 1
    every = np.concatenate([codes, np.packbits(near, axis=1)])
    return pd.DataFrame(
        {"volume_id": [f"v{k:08d}" for k in range(len(every))], "enface_hash": [row.tobytes().hex() for row in every]}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hashes", type=int, nargs="+")
    print("| hashes | CPU-seconds | planted | found |\n|---|---|---|---|")
    for count in parser.parse_args().hashes:
        table = hashes(count, count // 20)
        started = time.process_time()
        found = near_duplicates(table)
        print(f"| {count:,} | {time.process_time() - started:.1f} | {count // 20:,} | {len(found):,} |", flush=True)


if __name__ == "__main__":
    main()
