"""The page while boundaries are corrected, run in node: what it draws and holds after a B-scan was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import node_page

pytestmark = pytest.mark.skipif(node_page.NODE is None, reason="no node on this machine")

# A pane without a document: eight boundaries of four columns in B-scan 3, a thickness map, and a server that counts its
# answers. A POST replaces the lines of the server once `answer()` is called; each picture is another object.
PAGE = """
globalThis.location = { search: "?key=k" };
const node = () => ({ dataset: {}, append() {}, textContent: "" });
globalThis.document = { createElement: node };
const { Corrections } = await import("./native_corrections.js");
const { NativePane } = await import("./native.js");
const { Shown } = await import("./shown.js");
const rows = (first) => Array.from({ length: 8 }, (_, number) => Array(4).fill(first + 5 * number));
let served = rows(10), answer, pictures = 0;
globalThis.createImageBitmap = async () => ({ picture: (pictures += 1) });
globalThis.fetch = async (url, { method = "GET", body } = {}) => {
  const reply = (found) => new Response(JSON.stringify(found), { headers: { "X-Octjepa-Volume": "eye" } });
  if (method === "GET") return reply(url.endsWith("etdrs") ? {} : served);
  await new Promise((done) => { answer = done; });
  served = method === "POST" ? JSON.parse(body).rows : rows(10);
  return reply({ slices: method === "POST" ? [3] : [] });
};
const shown = new Shown();
const panels = {};
for (const name of ["bscan", "cross", "face", "sectors"]) panels[name] = shown.panel(name, node(), () => {});
const pane = Object.assign(Object.create(NativePane.prototype), {
  about: { boundaries: rows(0) }, shown, panels, row: { id: "eye" }, body: { hidden: true }, mode: "correct",
  facts: { shape: [6, 60, 4], layers: [], etdrs: { sectors: {} } }, place: { slice: 3, depth: 0, column: 1 },
  plane: { value: "thickness" }, thick: { value: "retina" }, countSlices() {}, quiet: true, held: {},
});
pane.measureThickness = () => panels.sectors.fill(async (read) => {
  const found = await read.json("/native/etdrs");
  return () => { pane.facts.etdrs = found; };
}, true);
const corrections = Object.assign(Object.create(Corrections.prototype), {
  pane, boundary: 7, drafts: new Map(), saved: [], box: {}, state: {}, undoing: {}, discarding: {}, removing: {},
});
shown.open("eye");
await pane.load();
const draw = (depth, column) => corrections.stroke({ column, depth }, { column, depth }, true);
const later = () => new Promise((done) => { setTimeout(done); });
const answered = async () => { await later(); answer(); await later(); };
"""


def run_page(folder: Path, script: str) -> dict[str, Any]:
    """What `script` leaves in `made` after `PAGE`."""
    return node_page.run_page(folder, f"{PAGE}\n{script}")


def test_the_thickness_map_is_drawn_anew_after_saving(tmp_path: Path) -> None:
    made = run_page(
        tmp_path,
        """
made.before = pane.held.face.thick.picture.picture;
draw(50, 1);
const saving = corrections.save();
await answered();
await saving;
made.after = pane.held.face.thick.picture.picture;
""",
    )
    assert made["after"] > made["before"]


def test_what_is_drawn_after_saving_starts_from_the_saved_boundaries(tmp_path: Path) -> None:
    made = run_page(
        tmp_path,
        """
draw(50, 1);
pane.measureThickness = () => new Promise(() => {}); // it takes long
corrections.save();
await answered();
made.state = corrections.state.textContent;
draw(51, 2);
made.lines = corrections.lines[7];
""",
    )
    assert made["state"].startswith("Saved B-scans: 4.")
    assert made["lines"] == [45, 50, 51, 45]


def test_what_is_drawn_while_the_server_saves_is_not_lost(tmp_path: Path) -> None:
    made = run_page(
        tmp_path,
        """
draw(50, 1);
const saving = corrections.save();
draw(51, 2);
await answered();
await saving;
made.state = corrections.state.textContent;
made.lines = corrections.lines[7];
made.served = served[7];
""",
    )
    assert made["state"].startswith("Changed, not saved.")
    assert made["lines"] == [45, 50, 51, 45]
    assert made["served"] == [45, 50, 45, 45]


def test_removing_what_is_saved_keeps_what_is_not_saved_yet(tmp_path: Path) -> None:
    made = run_page(
        tmp_path,
        """
corrections.saved = [3];
draw(50, 1);
const removing = corrections.remove();
await answered();
await removing;
made.state = corrections.state.textContent;
made.lines = corrections.lines[7];
""",
    )
    assert made["state"].startswith("Changed, not saved. No B-scan is saved yet.")
    assert made["lines"] == [45, 50, 45, 45]
