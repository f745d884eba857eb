"""Rotary positions by complex numbers, as a CPU takes them, against products and a swap, in turn in one run.

    .venv/bin/python benchmarks/rotary.py [ROUNDS]

Prints the median milliseconds of queries forward, and forward and backward, and their ratio.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from octjepa.model.positions import rope_tables, rotate

BATCH, HEADS, WIDTH = 32, 6, 32


def main(rounds: int) -> None:
    print(f"batch {BATCH}, {HEADS} heads of {WIDTH}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for tokens in (77, 512):
        tables = rope_tables(torch.rand(BATCH, tokens, 3) * 16, WIDTH)
        kinds = {"complex": tables, "swap": tables._replace(turns=None)}
        qkv = torch.randn(BATCH, tokens, 3 * HEADS * WIDTH, requires_grad=True)
        gradient = torch.randn(BATCH, HEADS, tokens, WIDTH)
        for backward in (False, True):
            seconds: dict[str, list[float]] = {name: [] for name in kinds}
            for turn in range(rounds + 2):
                for name, chosen in kinds.items():
                    query = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)[0]  # as in a block
                    start = time.perf_counter()
                    with torch.set_grad_enabled(backward):
                        turned = rotate(query, chosen)
                    if backward:
                        turned.backward(gradient)
                    if turn > 1:  # the first two warm up
                        seconds[name].append(time.perf_counter() - start)
            ours, other = (1e3 * statistics.median(values) for values in seconds.values())
            kind = "and backward" if backward else "forward"
            print(
                f"{tokens:4} tokens {kind:<13} complex {ours:7.2f} ms  swap {other:7.2f} ms  ratio {ours / other:.2f}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
