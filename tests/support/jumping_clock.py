"""A time of day that jumps by hours and weeks, forwards and back, for every program that is started with it.

A small shared library stands before the C library's clocks. Python, PyTorch and their C++ parts all read these. The
monotonic clock stays as it is, as on a machine whose clock is set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/time.h>
#include <time.h>
static const long seconds[] = {0, -5 * 3600, 7 * 3600, -3600, 40 * 86400, -86400};
static int real(clockid_t id, struct timespec *now) {
    static int (*found)(clockid_t, struct timespec *);
    if (!found) found = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return found(id, now);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = real(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        struct timespec steady;
        real(CLOCK_MONOTONIC, &steady);
        long turn = steady.tv_sec * 5 + steady.tv_nsec / 200000000; /* a jump every 0.2 s */
        now->tv_sec += seconds[turn % 6];
    }
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    now->tv_sec = t.tv_sec;
    now->tv_usec = t.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (now) *now = t.tv_sec;
    return t.tv_sec;
}
"""


def jumping_clock(folder: Path) -> dict[str, str]:
    """The environment of a program whose clock jumps; the library is built in `folder`. Skips without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler here, or not Linux")
    (folder / "clock.c").write_text(SOURCE, encoding="utf-8")
    library = folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"], check=True)
    read = "import time; a = [(time.sleep(0.1), time.time())[1] for _ in range(14)]; print(max(a) - min(a) > 3600)"
    environment = {"LD_PRELOAD": str(library)}
    shown = subprocess.run(
        [sys.executable, "-c", read], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "True", "the clock does not jump"
    return environment
