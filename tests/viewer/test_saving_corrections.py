"""The requests with which the page saves corrected boundaries: who may write, and what comes of it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flat_layers import FlatLayers
from octjepa import load_encoder
from octjepa.errors import UsageError
from octjepa.ingest.build import build_store
from octjepa.notes import Note
from octjepa.phantom import make_eye
from octjepa.phantom.dicom import write_eye
from octjepa.tasks.segmenter.adapt import AdaptSettings
from octjepa.tasks.segmenter.adapt_scans import AdaptRequest, adapt_sources
from octjepa.tasks.segmenter.measurement import Measurement
from octjepa.viewer.corrections import Corrections
from octjepa.viewer.scan_layers import ScanLayers, measured
from octjepa.viewer.server import open_scans
from viewer_server import served

pytest.importorskip("uvicorn")
KEY = "the-key-of-the-address"


@dataclass(frozen=True)
class Site:
    """A running viewer: its port, the only volume, the folder of the scan and that of corrections."""

    port: int
    volume_id: str
    eyes: Path
    corrections: Path

    @property
    def path(self) -> str:
        return f"/volumes/{self.volume_id}/native"

    def send(self, method: str, path: str, body: Any = None, **changed: str | None) -> tuple[int, str]:
        """Status and text. The headers are those of the page, but for those in `changed`; None: without it."""
        host = f"127.0.0.1:{self.port}"
        names = {
            "key": "X-Octjepa-Key",
            "kind": "Content-Type",
            "site": "Sec-Fetch-Site",
            "origin": "Origin",
            "host": "Host",
        }
        headers = {"Origin": f"http://{host}", "X-Octjepa-Key": KEY, "Content-Type": "application/json"}
        for name, value in changed.items():
            headers.pop(names[name], None)
            if value is not None:
                headers[names[name]] = value
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        text = body if isinstance(body, bytes | str) or body is None else json.dumps(body)
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        received = answer.read().decode()
        connection.close()
        return answer.status, received


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("saving")
    (root / "eyes").mkdir()
    write_eye(root / "eyes" / "eye.dcm", make_eye(3, 41, "OD", "heidelberg_spectralis"), 3)
    build_store([root / "eyes"], root / "store", load_encoder("phantom-tiny").recipe.preprocessing)
    scans = open_scans(root / "store", [str(root / "eyes")])
    scans.layers = ScanLayers(FlatLayers())
    scans.corrections = Corrections(root / "labels")
    with served(scans, key=KEY) as url:
        (volume_id,) = scans.ids
        scans.layers.layers(scans.native(volume_id).volume)
        yield Site(int(url.rpartition(":")[2]), volume_id, root / "eyes", root / "labels")


def lines_of(site: Site, number: int) -> list[list[float]]:
    status, text = site.send("GET", f"{site.path}/surfaces/slice/{number}")
    assert status == 200
    made: list[list[float]] = json.loads(text)
    return made


def test_from_a_correction_to_a_network(site: Site, tmp_path: Path) -> None:
    """Correct -> saved -> shown and measured -> `octjepa segment adapt` learns from it -> removed."""
    before = lines_of(site, 2)
    assert len(before) == 8
    thickness = json.loads(site.send("GET", f"{site.path}/etdrs")[1])
    assert thickness["corrected"] == 0
    corrected = [*before[:7], [row + 10 for row in before[7]]]
    assert site.send("POST", f"{site.path}/corrections/2", {"rows": corrected}) == (200, '{"slices":[2]}')
    assert np.allclose(lines_of(site, 2), corrected)
    assert lines_of(site, 1) == before
    again = json.loads(site.send("GET", f"{site.path}/etdrs")[1])
    assert again["corrected"] == 1
    assert again["sectors"] != thickness["sectors"]
    (file,) = site.corrections.iterdir()
    assert file.name == f"{site.volume_id}_boundaries.npz"
    request = AdaptRequest([str(site.eyes)], [site.corrections], baseline=False)
    made = adapt_sources(request, tmp_path / "network", AdaptSettings(most_steps=1, batch=1))
    assert (made.training_bscans, made.held_out_bscans, made.scans) == (1, 0, 1)
    assert any("no label of fluid" in note for note in made.notes)
    assert (tmp_path / "network" / "segmenter.safetensors").is_file()
    assert site.send("DELETE", f"{site.path}/corrections/2", {}) == (200, '{"slices":[]}')
    assert list(site.corrections.iterdir()) == []
    assert lines_of(site, 2) == before


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"key": None}, "its key is missing"),
        ({"key": "another"}, "its key is missing"),
        ({"key": ""}, "its key is missing"),
        ({"origin": None}, "another page"),
        ({"origin": "null"}, "another page"),
        ({"origin": "http://evil.example"}, "another page"),
        ({"origin": "http://127.0.0.1:1"}, "another page"),
        ({"site": "cross-site"}, "another site"),
        ({"kind": None}, "is not JSON"),
        ({"kind": "text/plain"}, "is not JSON"),
        ({"host": "evil.example", "origin": "http://evil.example"}, "Invalid host header"),
    ],
)
def test_only_the_page_of_the_printed_address_may_write(
    site: Site, method: str, changed: dict[str, str | None], reason: str
) -> None:
    status, text = site.send(method, f"{site.path}/corrections/2", {"rows": lines_of(site, 2)}, **changed)
    assert status == (400 if "host" in changed else 403)
    assert reason in text
    assert list(site.corrections.iterdir()) == []


def test_wrong_requests_write_nothing(site: Site) -> None:
    rows = lines_of(site, 2)
    path = f"{site.path}/corrections"
    for body in ("", "{", "[]", "null", "{}", '{"rows": null}', "[" * 100_000, b"\xff"):
        assert site.send("POST", f"{path}/2", body)[0] == 400
    assert site.send("POST", f"{path}/2", {"rows": rows[::-1]})[0] == 422
    assert site.send("POST", f"{path}/2", b'{"rows": "' + b" " * (9 << 20))[0] == 413
    for number in (rows and 10_000, 10**30):
        assert site.send("POST", f"{path}/{number}", {"rows": rows})[0] == 404
    assert site.send("POST", f"{path}/-1", {"rows": rows})[0] == 404
    assert site.send("POST", f"{path}/../2", {"rows": rows})[0] in (404, 405)
    assert site.send("POST", "/volumes/unknown/native/corrections/2", {"rows": rows})[0] == 404
    assert site.send("PUT", f"{path}/2", {"rows": rows})[0] == 405
    assert site.send("POST", f"{site.path}/layers", {"rows": rows})[0] == 405
    assert list(site.corrections.iterdir()) == []


def test_without_a_folder_nothing_can_be_written(site: Site) -> None:
    scans = open_scans(site.eyes.parent / "store", [str(site.eyes)])
    assert scans.about().corrections is False
    with served(scans, key=KEY) as url:
        other = Site(int(url.rpartition(":")[2]), site.volume_id, site.eyes, site.corrections)
        assert other.send("POST", f"{other.path}/corrections/2", {"rows": lines_of(site, 2)})[0] in (404, 405)
        assert other.send("GET", f"{other.path}/corrections")[0] == 404


def test_a_measurement_that_began_before_saving_is_not_used_afterwards(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = open_scans(site.eyes.parent / "store", [str(site.eyes)])
    scans.layers, scans.corrections = ScanLayers(FlatLayers()), Corrections(site.corrections)
    scans.layers.layers(scans.native(site.volume_id).volume)
    began, saved = threading.Event(), threading.Event()

    def measured_slowly(*arguments: Any) -> Measurement:
        began.set()
        assert saved.wait(60)
        return measured(*arguments)

    monkeypatch.setattr("octjepa.viewer.scans.measured", measured_slowly)
    with ThreadPoolExecutor(1) as other_request:
        before = other_request.submit(scans.etdrs, site.volume_id)
        assert began.wait(60)
        rows = scans.surface_lines(site.volume_id, "slice", 2)
        scans.correct(site.volume_id, 2, [*rows[:7], [row + 10 for row in rows[7] if row is not None]])
        saved.set()
    assert scans.etdrs(site.volume_id).sectors != before.result().sectors
    scans.correct(site.volume_id, 2, None)


def test_a_scan_that_cannot_be_corrected_is_shown_and_measured(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    scans = open_scans(site.eyes.parent / "store", [str(site.eyes)])
    scans.layers, scans.corrections = ScanLayers(FlatLayers()), Corrections(site.corrections)
    scan = scans.native(site.volume_id)
    turned = replace(scan, volume=replace(scan.volume, notes=(Note("depth_flipped"),)))
    monkeypatch.setattr(scans, "native", lambda volume_id: turned)
    scans.layers.layers(turned.volume)
    assert len(scans.surface_lines(site.volume_id, "slice", 2)) == 8
    assert scans.etdrs(site.volume_id).corrected == 0
    with pytest.raises(UsageError, match="turned, sorted or dropped"):
        scans.corrected(site.volume_id)
