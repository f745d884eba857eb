"""What finding a file costs, for 100 to 10,000 files in folders of 20: a tree, its manifest, a glob, a list.

Run by hand: `python tests/ingest/discovery_cost.py`. The files hold a DICOM mark and nothing else.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from octjepa.ingest import discover

FOLDER = "retinal_oct/structural_oct/topcon_maestro2"


def make(root: Path, files: int) -> dict[str, str]:
    """Sources that all mean the same files, by name."""
    rows = ["person_id\tfilepath\tlaterality"]
    for number in range(files):
        person = 1000 + number // 20
        path = root / FOLDER / str(person) / f"{person}_maestro2_3d_macula_oct_l_1.2.{number}.dcm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(128) + b"DICM")
        rows.append(f"{person}\t/{path.relative_to(root)}\tL")
    (root / "list.txt").write_text("\n".join(row.split("\t")[1].lstrip("/") for row in rows[1:]))
    sources = {"tree": str(root), "glob": f"{root}/**/*.dcm", "list": f"{root}/list.txt"}
    (root / "retinal_oct" / "manifest.tsv").write_text("\n".join(rows))
    return {**sources, "manifest": f"{root}/retinal_oct/manifest.tsv"}


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        for files in (100, 1000, 10_000):
            for name, source in make(Path(made, str(files)), files).items():
                seconds = []
                for _ in range(3):
                    start = time.perf_counter()
                    found = discover([source])
                    seconds.append(time.perf_counter() - start)
                    assert len(found.files) == files
                print(f"{files:6} files  {name:9} {min(seconds):6.3f} s  {min(seconds) / files * 1e6:5.0f} us a file")


if __name__ == "__main__":
    main()
