// The pointer on the planes of a scan as it came: zoom, pan, calipers, clicks and the read-out under the cursor.
import { draw } from "/native_drawing.js";

export function zoomBy(pane, factor, u, v) {
  const { scale, x, y } = pane.zoom;
  const next = Math.max(1, Math.min(12, scale * factor));
  const kept = (start, share) => Math.max(0, Math.min(1 - 1 / next, start + share / scale - share / next));
  pane.zoom = { scale: next, x: kept(x, u), y: kept(y, v) };
  draw(pane);
}

// The place in the picture under the pointer: share of the canvas, column and depth index.
function under(pane, event) {
  const box = pane.scan.canvas.getBoundingClientRect();
  const [u, v] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  const [, depth, columns] = pane.facts.shape;
  const { scale, x, y } = pane.zoom;
  return { u, v, column: (x + u / scale) * columns - 0.5, depth: (y + v / scale) * depth - 0.5 };
}

export function pointers(pane) {
  const canvas = pane.scan.canvas;
  let start = null;
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && pane.zoom.scale === 1 && event.deltaY > 0) return; // the page scrolls
    event.preventDefault();
    const { u, v } = under(pane, event);
    zoomBy(pane, event.deltaY < 0 ? 1.2 : 1 / 1.2, u, v);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (!pane.held.bscan) return;
    canvas.setPointerCapture(event.pointerId);
    start = { ...under(pane, event), zoom: { ...pane.zoom }, moved: false };
    if (pane.corrections?.active) return;
    if (pane.mode === "caliper") pane.calipers.push({ from: [start.column, start.depth], to: [start.column, start.depth], slice: pane.held.bscan.slice });
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pane.held.bscan) return;
    const now = under(pane, event);
    tell(pane, now);
    if (!start) return;
    const hadMoved = start.moved;
    start.moved ||= Math.hypot(now.u - start.u, now.v - start.v) > 0.008;
    if (pane.corrections?.active) {
      if (start.moved) pane.corrections.stroke(start.last ?? start, now, !hadMoved);
      start.last = start.moved ? now : undefined;
      return;
    }
    const line = pane.calipers.at(-1);
    if (pane.mode === "caliper" && line) line.to = [now.column, now.depth];
    else if (start.moved && pane.zoom.scale > 1) {
      const room = 1 - 1 / pane.zoom.scale;
      const held = (value) => Math.max(0, Math.min(room, value));
      Object.assign(pane.zoom, { x: held(start.zoom.x - (now.u - start.u) / pane.zoom.scale), y: held(start.zoom.y - (now.v - start.v) / pane.zoom.scale) });
    }
    draw(pane);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (pane.corrections?.active) {
      if (start && !start.moved) pane.corrections.click(under(pane, event));
      start = null;
      return;
    }
    if (start && pane.held.bscan && !start.moved && pane.mode !== "caliper") {
      const { column, depth } = under(pane, event);
      pane.go({ column, depth });
      if (pane.layer.value === "similarity") pane.overlay(true, true);
    } else if (start && !start.moved) pane.calipers.pop();
    start = null;
    draw(pane);
  });
  const clicked = (name, part, act) => part.canvas.addEventListener("click", (event) => {
    const box = part.canvas.getBoundingClientRect();
    if (pane.facts && pane.held[name]) act((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height, pane.facts.shape);
  });
  clicked("cross", pane.cross, (u, v, [slices, depth]) => pane.go({ slice: u * slices - 0.5, depth: v * depth - 0.5 }));
  clicked("face", pane.face, (u, v, [slices, , columns]) => {
    if (pane.held.face.kind === "localizer") return;
    const place = [(pane.flipped ? 1 - v : v) * slices - 0.5, u * columns - 0.5];
    if (pane.mode === "centre") {
      pane.choose("centre");
      pane.measureThickness(place.map((value) => Math.max(0, value)));
    } else pane.go({ slice: place[0], column: place[1] });
  });
}

function tell(pane, { column, depth }) {
  const [, rows, columns] = pane.facts.shape;
  const [, dy, dx] = pane.facts.spacing_mm;
  const [c, d, s] = [Math.round(column), Math.round(depth), pane.held.bscan.slice];
  if (c < 0 || d < 0 || c >= columns || d >= rows) return;
  if (!pane.held.levels) {
    const copy = new OffscreenCanvas(columns, rows).getContext("2d", { willReadFrequently: true });
    copy.drawImage(pane.held.bscan.picture, 0, 0);
    pane.held.levels = copy.getImageData(0, 0, columns, rows).data;
  }
  const across = pane.facts.slice_mm?.[s]; // known once the whole file is read
  const mm = [across, d * dy, c * dx].map((value) => value?.toFixed(2) ?? "–").join(", ");
  pane.readout.textContent = `slice ${s + 1}, depth ${d + 1}, column ${c + 1} · ${mm} mm · intensity ${pane.held.levels[4 * (d * columns + c)]}`;
}
