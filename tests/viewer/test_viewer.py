"""The viewer: answers are the store's, to this machine alone, and a page can be asked for nothing else."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from octjepa.errors import UsageError
from octjepa.record import to_json
from octjepa.report.figures import masks
from octjepa.store.storage import DamagedVolume
from octjepa.viewer.scans import Scans
from octjepa.viewer.server import ANSWER_OF, answers, open_scans, serve
from octjepa.views.tokens import TISSUE_SHARE
from viewer_server import served

pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def scans(made: Path) -> Scans:
    return open_scans(made)


@pytest.fixture(scope="module")
def url(scans: Scans) -> Iterator[str]:
    with served(scans) as address:
        yield address


@pytest.fixture(scope="module")
def plain_url(made: Path) -> Iterator[str]:
    """The store alone, without the files of its scans."""
    with served(open_scans(made / "store")) as address:
        yield address


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers), timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def pixels(url: str) -> np.ndarray:
    status, headers, body = ask(url)
    assert status == 200
    assert headers["content-type"] == "image/png"
    return np.asarray(Image.open(io.BytesIO(body)))


def test_a_slice_is_the_stores_to_the_voxel(url: str, scans: Scans) -> None:
    about = json.loads(ask(f"{url}/about")[2])
    rows = json.loads(ask(f"{url}/volumes")[2])["volumes"]
    assert about["volumes"] == len(rows) == len(scans.store.table)
    name = rows[3]["id"]
    volume = scans.store.read(name)
    assert about["shape"] == list(volume.pixels.shape)
    for number in (0, len(volume.pixels) - 1):
        np.testing.assert_array_equal(pixels(f"{url}/volumes/{name}/slices/{number}.png"), volume.pixels[number])
    assert json.loads(ask(f"{url}/volumes/{name}/band")[2]) == volume.band.tolist()
    depth, _, width = volume.pixels.shape
    assert pixels(f"{url}/volumes/{name}/en_face.png").shape == (depth, width)


def test_the_listing_tells_geometry_and_doubts_and_the_number_of_the_person(url: str, scans: Scans) -> None:
    body = ask(f"{url}/volumes")[2]
    table = scans.store.table.set_index("volume_id")
    for row in json.loads(body)["volumes"]:
        known = table.loc[row["id"]]
        assert [axis["count"] for axis in row["axes"]] == [known["native_d"], known["native_h"], known["native_w"]]
        unsure = ["slice"] if known["uncertain"] else []
        assert [axis["axis"] for axis in row["axes"] if axis["uncertain"]] == unsure
        assert "person_id" not in row
        assert row["person"] == 1 + sorted(set(table["person_id"])).index(known["person_id"])
    assert b"/private/place" not in body


def test_the_layers_are_the_encoders_tokens_and_the_recipes_masks(url: str, scans: Scans) -> None:
    encoder = scans.encoder
    assert encoder is not None
    about = json.loads(ask(f"{url}/about")[2])
    assert about["layers"] == [
        "tokens",
        "similarity",
        *(name for name in masks.FAMILIES if getattr(encoder.recipe.masks, name) > 0),
    ]
    assert about["corner"] == list(scans.store.preprocessing.margin)
    name = str(scans.store.table["volume_id"].iloc[0])
    volume = scans.store.read(name)
    depth, height, width = encoder.recipe.grid
    painted = pixels(f"{url}/volumes/{name}/grid/tokens.png").reshape(depth, height, width, 4)
    seen = encoder.tokens(volume)
    there = np.zeros(encoder.recipe.grid_tokens, bool)
    there[seen.grid_index[seen.tissue >= TISSUE_SHARE]] = True
    np.testing.assert_array_equal(painted[..., 3] > 0, there.reshape(encoder.recipe.grid))
    drawn = pixels(f"{url}/volumes/{name}/grid/tubes.png").reshape(depth, height, width, 4)
    states = masks.mask_states(volume, encoder.recipe, "tubes")
    colours = {state: np.unique(drawn[states == state], axis=0) for state in np.unique(states)}
    assert all(len(found) == 1 for found in colours.values())
    assert len({tuple(found[0]) for found in colours.values()}) == len(colours)


@pytest.mark.parametrize(
    "path",
    [
        "volumes/../store.json/band",
        "volumes/nobody/band",
        "volumes/ID/slices/99.png",
        "volumes/ID/slices/-1.png",
        "volumes/ID/grid/other.png",
        "volumes/ID/grid/similarity.png",
        "volumes/ID/native/..%2f..%2fx/1.png",
        "viewer.py",
        "..%2f..%2fserver.py",
        "static/viewer.js",
        "docs",
        "openapi.json",
    ],
)
def test_nothing_else_is_given_out(url: str, scans: Scans, path: str) -> None:
    status, _, body = ask(f"{url}/{path.replace('ID', min(scans.ids))}")
    assert status == 404
    assert b"Traceback" not in body


def test_only_to_this_machine_only_to_read_only_its_own_script(url: str) -> None:
    assert ask(f"{url}/volumes", Host="elsewhere.example")[0] == 400  # a name that resolves to here
    assert ask(f"{url}/volumes", method="POST")[0] == 405
    for path in ("", "viewer.js", "native.js", "viewer.css", "about", "volumes"):
        status, headers, body = ask(f"{url}/{path}", Origin="http://elsewhere.example")
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "access-control-allow-origin" not in headers
        assert b"http://" not in body.replace(b"http://www.w3.org", b"")
        assert b"https://" not in body


def test_every_answer_about_a_volume_names_it(url: str, scans: Scans) -> None:
    first, second = sorted(scans.ids)[:2]
    for path in answers(scans):
        for name in (first, second):
            values = {"volume_id": name, **dict.fromkeys(("number", "depth", "column", "index"), 0)}
            status, headers, _ = ask(url + path.replace(":int", "").format(**values, plane="slice", layer="random"))
            assert headers[ANSWER_OF] == (name if "{volume_id}" in path else None), (path, status)
    status, headers, _ = ask(f"{url}/volumes/{first}/slices/99.png")
    assert (status, headers[ANSWER_OF]) == (404, first)  # an error is about the volume as well
    assert ask(f"{url}/volumes/nobody/band")[1][ANSWER_OF] is None


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("misread", 400),
        ("misread?target=nothing", 404),
        ("volumes?offset=x", 400),
        ("volumes?offset=1e999", 400),
        (f"volumes?offset={10**30}", 400),
        ("volumes?limit=-3", 200),
        ("volumes/ID/native/etdrs?slice_index=nan", 400),
        ("volumes/ID/native/etdrs?slice_index=inf&column=1", 400),
        ("volumes/ID/native/other/1.png", 422),
        ("volumes/ID/native/surfaces/other/1", 422),
        ("volumes/ID/native/surfaces/slice/999999", 422),
        (f"volumes/ID/native/place/{10**40}/0/0", 400),
        (f"volumes/ID/native/slice/{10**40}.png", 400),
        (f"volumes/ID/native/slice/{10**400}.png", 400),
        (f"volumes/ID/grid/similarity.png?token={10**25}", 400),
        ("volumes/ID/native/overlay/other/1.png", 422),
        ("volumes/ID/native/classes/other", 422),
        ("volumes/ID/native/face.png", 422),
        ("volumes/ID/neighbours", 404),
        ("live", 404),
        ("nothing", 404),
    ],
)
def test_a_bad_request_gets_one_line_and_the_security_headers(
    plain_url: str, scans: Scans, path: str, status: int
) -> None:
    found, headers, body = ask(f"{plain_url}/{path.replace('ID', min(scans.ids))}")
    assert found == status
    check_headers(headers)
    if status != 200:
        assert len(body.decode().splitlines()) == 1
        assert b"Traceback" not in body


def check_headers(headers: Any) -> None:
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_an_unexpected_error_has_the_security_headers_and_no_traceback(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scans = open_scans(demo / "store")
    name = min(scans.ids)
    monkeypatch.setattr(scans.volumes, "facts", lambda volume_id: 1 / 0)
    with served(scans) as url:
        for method, host, wanted in (("GET", "", 500), ("POST", "", 405), ("GET", "elsewhere.example", 400)):
            status, headers, body = ask(f"{url}/volumes/{name}", method, **({"Host": host} if host else {}))
            assert status == wanted
            check_headers(headers)
            assert headers[ANSWER_OF] == name
            assert len(body.decode().splitlines()) == 1
            assert b"Traceback" not in body
    assert "ZeroDivisionError" in capsys.readouterr().err  # the terminal of the server tells it


def test_a_damaged_volume_is_reported_and_the_others_go_on(demo: Path) -> None:
    scans = open_scans(demo / "store")
    assert scans.about().layers == []
    first, second = sorted(scans.ids)[:2]
    (scans.store.chunk_folder(first) / "pixels.npy").write_bytes(b"no array")
    with pytest.raises(DamagedVolume, match=first):
        scans.slice_png(first, 0)
    assert scans.slice_png(second, 0)


def test_a_damaged_first_eye_does_not_take_the_colours_of_the_others(demo: Path) -> None:
    scans = open_scans(demo)
    assert scans.encoder is not None
    for name in sorted(scans.ids)[:6]:  # the first of a device or two
        (scans.store.chunk_folder(name) / "pixels.npy").write_bytes(b"no array")
    assert scans.grid_png(max(scans.ids), "tokens")


def test_without_its_encoder_the_eyes_are_shown_and_the_page_says_why(demo: Path) -> None:
    shutil.rmtree(demo / "run" / "checkpoints")
    found = open_scans(demo / "run").about()
    assert "tokens" not in found.layers
    assert "random" in found.layers  # masks need no weights
    assert "no checkpoint" in found.missing or "no pretrained encoder" in found.missing
    (demo / "run" / "run.json").write_text("{")
    assert "run.json" in open_scans(demo).about().missing


def test_an_index_with_gaps_is_still_listed(demo: Path) -> None:
    index = demo / "store" / "volumes.parquet"
    table = pd.read_parquet(index)
    table.loc[0, "quality"] = np.nan
    table.drop(columns=["region", "site", "mirrored"]).to_parquet(index)
    rows = open_scans(demo / "store").volumes.page().volumes
    assert sum(row.quality is None for row in rows) == 1
    assert {row.region for row in rows} == {""}
    assert json.dumps(to_json(rows), allow_nan=False)


def test_a_source_without_eyes_or_a_taken_port_is_refused(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        open_scans(tmp_path / "nothing")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UsageError, match="give another --port"):
            serve(demo / "store", other.getsockname()[1], lambda url: None)


def test_an_absent_library_is_reported_with_its_extra(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UsageError, match=r"\[viewer\]"):
        serve(made / "store", 0, lambda url: None)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_verb_says_where_it_is_and_ends_by_a_signal(made: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "octjepa", "view", str(made / "store"), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        assert url.startswith("http://127.0.0.1:")
        assert b"octjepa viewer" in ask(url)[2]
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == ""
    assert "Traceback" not in err
