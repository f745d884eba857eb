"""Lets a torch that was built for CUDA be imported where there is no CUDA: tests of torch_xla need its CPU part alone.

torch_xla 2.9.0 needs torch 2.9.0, whose build for Linux on PyPI links thirteen CUDA libraries of 4.9 GB. Each is
replaced by an empty one that carries the names the loader looks for; every function in it answers "no device", so
torch.cuda.is_available() is False. For tests only: nothing of this is shipped. Does nothing for a CPU build of torch.

Usage: python without_cuda.py SITE_PACKAGES
Needs gcc, and readelf and nm of binutils. Ends with an error where one is missing or a library cannot be linked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

LIBRARY = re.compile(r"lib(cu|nccl|nvrtc|nvTools|nvJit|nvshmem)")
FUNCTION = re.compile(
    r"(cu[A-Z]|cuda|cudnn|cublas|cusparse|cusolver|cufft|curand|cupti|nccl|nvshmem|nvrtc|nvJit|nvml|nvtx|__cuda)"
)
NO_DEVICE = 100  # cudaErrorNoDevice
SPECIAL = {
    "cudaGetDeviceCount": f"int cudaGetDeviceCount(int *n) {{ if (n) *n = 0; return {NO_DEVICE}; }}",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "no CUDA"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "no CUDA"; }',
}


def main(site: Path) -> None:
    tools = [tool for tool in ("gcc", "readelf", "nm") if shutil.which(tool) is None]
    if tools:
        sys.exit(f"without_cuda: {', '.join(tools)} not found (Debian: apt install gcc binutils)")
    folder = site / "torch" / "lib"
    ours = [path for path in folder.glob("lib*.so*") if re.match(r"lib(torch|c10|shm)", path.name)]
    ours += (site / "torch").glob("_C*.so")
    if not ours:
        sys.exit(f"without_cuda: no torch in {site}")
    needed: set[str] = set()
    versions: dict[str, set[str]] = defaultdict(set)  # library -> version names that torch asks it for
    wanted: dict[str, str] = {}  # function -> its version name, or ""
    defined: set[str] = set()
    for path in ours:
        needed |= set(filter(LIBRARY.match, re.findall(r"NEEDED.*\[(.*?)\]", said("readelf", "-dW", path))))
        for library, version in version_needs(said("readelf", "-VW", path)):
            versions[library].add(version)
        for *_, kind, symbol in (line.split() for line in said("nm", "-D", path).splitlines()):
            name, _, version = symbol.partition("@")
            if kind in "Uwv":
                wanted[name] = version.strip("@") or wanted.get(name, "")
            else:
                defined.add(name)
    missing = sorted(name for name in needed if not (folder / name).exists())
    functions = {n: v for n, v in wanted.items() if FUNCTION.match(n) and n not in defined}
    named = {version for library in needed for version in versions[library]}
    for library in missing:
        nodes = {v: [n for n, own in functions.items() if own == v] for v in sorted(versions[library])}
        plain = [n for n, own in functions.items() if own not in named]
        link(folder / library, [n for node in nodes.values() for n in node] if nodes else plain, nodes)
    print(f"without_cuda: {len(missing)} empty libraries made" if missing else "without_cuda: nothing to do")


def said(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


def version_needs(listing: str) -> Iterator[tuple[str, str]]:
    """(library, version name) of readelf's section .gnu.version_r."""
    library = ""
    for line in listing.splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif library and (found := re.search(r"Name: (\S+)\s+Flags.*Version", line)):
            yield library, found[1]


def link(path: Path, functions: Iterable[str], nodes: dict[str, list[str]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "empty.c"), Path(scratch, "empty.map")
        lines = [SPECIAL.get(name, f"int {name}(void) {{ return {NO_DEVICE}; }}") for name in functions]
        source.write_text("\n".join(lines) + "\n")
        script.write_text("".join(map(node_of, nodes.items())))
        command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)]
        subprocess.run([*command, f"-Wl,--version-script={script}"] if nodes else command, check=True)


def node_of(node: tuple[str, list[str]]) -> str:
    version, names = node
    if not names:
        return f"{version} {{ }};\n"
    return f"{version} {{ global: {' '.join(name + ';' for name in names)} local: *; }};\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
