"""Collects wheels for Python 3.12 on Linux x86_64: what octjepa and its tests need beside torch, at constraints.txt.

    scripts/gpu/wheels FOLDER [--have LIST] [--most MEGABYTES]

`--have` names a file of packages that are there already, one a line (`pip list` will do). What only they need is not
followed. Each package is downloaded by itself, without its needs, so that pip cannot replace a torch that is there.
Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import email.parser
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALWAYS_THERE = {"torch", "triton", "numpy", "pip", "setuptools", "wheel"}
FOR_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "beartype", "hypothesis", "transformers")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def normalised(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """The distribution that a requirement asks for."""
    return normalised(re.split(r"[^A-Za-z0-9_.-]", requirement.strip(), maxsplit=1)[0])


def needs_of(wheel: Path) -> list[str]:
    """The distributions that a wheel requires on Linux with Python 3.12, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(name).decode("utf-8"))
    return [name_of(line) for line in metadata.get_all("Requires-Dist") or [] if applies(line.partition(";")[2])]


def applies(marker: str) -> bool:
    """Whether an environment marker may hold on Linux with CPython 3.12; one that is not understood may."""
    if "extra" in marker:
        return False
    if re.search(r"(sys_platform|platform_system|os_name)\s*==\s*['\"](win32|darwin|Windows|Darwin|nt)", marker):
        return False
    if re.search(r"platform_python_implementation\s*==\s*['\"]PyPy", marker):
        return False
    for sign, minor in re.findall(r"python_(?:full_)?version\s*(<=|<|==|>=|>)\s*['\"]3\.(\d+)", marker):
        if not {
            "<": int(minor) > 12,
            "<=": int(minor) >= 12,
            "==": int(minor) == 12,
            ">=": int(minor) <= 12,
            ">": int(minor) < 12,
        }[sign]:
            return False
    return True


def wanted() -> list[str]:
    """What octjepa needs to run, and its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*(name_of(one) for one in project["dependencies"]), *FOR_TESTS]


def pins() -> dict[str, str]:
    """Distribution -> version of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return {normalised(name): version for name, _, version in (line.partition("==") for line in lines)}


def download(name: str, version: str | None, folder: Path) -> Path | str:
    """The wheel, or pip's last line where there is none that fits."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--dest", str(folder)]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    before = set(folder.glob("*.whl"))
    done = subprocess.run([*command, f"{name}=={version}" if version else name], capture_output=True, text=True)
    known = [one for one in folder.glob("*.whl") if normalised(one.name.partition("-")[0]) == name]
    if done.returncode or not known:
        return (done.stderr.strip().splitlines() or ["no wheel"])[-1]
    return next(iter(set(known) - before), known[0])


def collect(folder: Path, have: set[str]) -> tuple[list[Path], dict[str, str]]:
    """(wheels, package -> why it has none), following what each wheel needs."""
    folder.mkdir(parents=True, exist_ok=True)
    versions, waiting, seen = pins(), wanted(), set(have)
    wheels, missing = [], {}
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        found = download(name, versions.get(name), folder)
        if isinstance(found, str):
            missing[name] = found
            continue
        wheels.append(found)
        waiting += needs_of(found)
    return wheels, missing


def own_wheel(folder: Path) -> Path | str:
    """octjepa's own wheel, for its metadata; or pip's last line."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True)
    known = sorted(folder.glob("octjepa-*.whl"))
    return known[-1] if known and not done.returncode else (done.stderr.strip().splitlines() or ["no wheel"])[-1]


def main() -> int:
    """0; 1 where a wheel is missing or all of them are too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--have", type=Path, help="packages that are there already, one a line")
    parser.add_argument("--most", type=float, default=60.0, help="megabytes in all")
    given = parser.parse_args()
    listed = given.have.read_text(encoding="utf-8").splitlines() if given.have else []
    have = ALWAYS_THERE | {name_of(line) for line in listed if line.strip() and not line.startswith("#")}
    wheels, missing = collect(given.folder, have)
    own = own_wheel(given.folder)
    if isinstance(own, str):
        missing["octjepa"] = own
    else:
        wheels.append(own)
    sizes = sorted(((wheel.stat().st_size / 1e6, wheel.name) for wheel in wheels), reverse=True)
    total = sum(size for size, _ in sizes)
    for size, name in sizes:
        print(f"{size:7.1f} MB  {name}")
    print(f"{total:7.1f} MB  in all, {len(sizes)} wheels in {given.folder}")
    for name, reason in missing.items():
        print(
            f"wheels: {name}: no wheel for Python 3.12 on x86_64: {reason}. Pin another version of it", file=sys.stderr
        )
    if total > given.most:
        fits = "name what the machine has by --have, or leave the largest out"
        print(f"wheels: {total:.1f} MB are more than {given.most:g}: {fits}", file=sys.stderr)
    return 1 if missing or total > given.most else 0


if __name__ == "__main__":
    sys.exit(main())
