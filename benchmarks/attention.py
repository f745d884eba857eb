"""Attention as training on a CPU in bf16 takes it for few tokens, against torch's own, in turn in one run.

    .venv/bin/python benchmarks/attention.py [ROUNDS]

Prints the median milliseconds of forward and backward and their ratio. With more tokens, and in fp32, both are torch's.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.nn.functional as F

from octjepa.model.blocks import attend

BATCH, HEADS, WIDTH = 16, 6, 32


def main(rounds: int) -> None:
    print(f"batch {BATCH}, {HEADS} heads of {WIDTH}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for tokens in (51, 128, 256, 512):
        for dtype in (torch.bfloat16, torch.float32):
            shape = (BATCH, HEADS, tokens, WIDTH)
            q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
            gradient = torch.randn(shape, dtype=dtype)
            seconds: dict[str, list[float]] = {"plain": [], "torch": []}
            for turn in range(rounds + 2):
                for name, function in (("plain", attend), ("torch", F.scaled_dot_product_attention)):
                    start = time.perf_counter()
                    function(q, k, v).backward(gradient)
                    if turn > 1:  # the first two warm up
                        seconds[name].append(time.perf_counter() - start)
            plain, known = (1e3 * statistics.median(values) for values in seconds.values())
            kind = str(dtype).removeprefix("torch.")
            print(
                f"{tokens:4} tokens {kind:<9} plain {plain:7.2f} ms  torch {known:7.2f} ms  ratio {plain / known:.2f}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
