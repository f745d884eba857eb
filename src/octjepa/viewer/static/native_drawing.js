// Draws the planes of a scan as it came, with surfaces, calipers, cross-hairs and the ETDRS grid.
import { make, PLANES, plain, strokeLine } from "/parts.js";

// Drawing. Positions of pixels' centres are at whole numbers, so a picture begins at -0.5.
function sized(canvas, aspect, tallest = 1.2) {
  canvas.style.maxWidth = aspect > tallest ? `${(100 * tallest) / aspect}%` : ""; // narrower, so that proportions stay
  const width = Math.max(24, Math.round(canvas.clientWidth * Math.min(devicePixelRatio || 1, 2)));
  const height = Math.max(1, Math.round(width * aspect));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, width, height);
  return [pen, width, height];
}

// Draws what is there. Every picture is drawn with the index that it was requested for.
export function draw(pane) {
  if (!pane.facts || pane.body.hidden) return;
  const [slices, depth, columns] = pane.facts.shape;
  const [dz, dy, dx] = pane.facts.spacing_mm;
  const stretch = Number(pane.stretch.value);
  if (pane.held.bscan) drawScan(pane, depth, columns, dy * stretch, dx, stretch);
  if (pane.held.cross) drawCross(pane, slices, depth, dz, dy * stretch);
  if (pane.held.face) drawFace(pane, slices, columns, dz, dx);
}

function drawCross(pane, slices, depth, dz, dy) {
  const { picture, lines, column } = pane.held.cross;
  const [pen, width, height] = sized(pane.cross.canvas, (depth * dy) / (slices * dz), 0.8);
  pen.filter = `contrast(${pane.contrast.value})`;
  pen.drawImage(picture, 0, 0, width, height);
  pen.filter = "none";
  const [sx, sy] = [width / slices, height / depth];
  if (pane.surfaces.checked) strokeSurfaces(pane, pen, lines, (index) => (index + 0.5) * sx, (value) => (value + 0.5) * sy);
  crosshair(pen, (pane.place.slice + 0.5) * sx, (pane.place.depth + 0.5) * sy, width, height);
  pane.cross.caption.textContent = `Across the B-scans at column ${column + 1}; first B-scan on the left`;
}

function drawFace(pane, slices, columns, dz, dx) {
  const { picture, thick, kind, depth } = pane.held.face;
  if (kind === "localizer") {
    const [pen, width, height] = sized(pane.face.canvas, picture.height / picture.width);
    pen.drawImage(picture, 0, 0, width, height);
    pane.face.caption.textContent = "The picture of the fundus that the file holds";
    return;
  }
  const { etdrs } = pane.facts;
  const [pen, width, height] = sized(pane.face.canvas, (slices * dz) / (columns * dx));
  pen.save();
  if (pane.flipped) pen.transform(1, 0, 0, -1, 0, height);
  pen.drawImage(picture, 0, 0, width, height);
  if (thick) pen.drawImage(thick.picture, 0, 0, width, height);
  pen.restore();
  const [sx, sy] = [width / columns, height / slices];
  const toY = (index) => (pane.flipped ? height - (index + 0.5) * sy : (index + 0.5) * sy);
  if (pane.etdrs.checked && etdrs && kind !== "depth") {
    const { slice_mm: positions } = pane.facts;
    const centre = mmAt(positions, etdrs.centre[0]);
    const down = pane.flipped ? -1 : 1;
    drawEtdrs(pen, etdrs, sx / dx, (u) => (etdrs.centre[1] + u / dx + 0.5) * sx, (v) => toY(indexAt(positions, centre + down * v, dz)));
  }
  crosshair(pen, (pane.place.column + 0.5) * sx, toY(pane.place.slice), width, height);
  const range = thick ? ` Violet ${thick.low_um} µm, yellow ${thick.high_um} µm.` : "";
  const text = thick ? `thickness of ${thick.layer === "retina" ? "the retina" : plain(thick.layer)}` : PLANES.find(([name]) => name === kind)[1];
  const known = kind === "face" ? " Black where no tissue was found." : thick ? " Dark where it was not measured." : "";
  pane.face.caption.textContent = `${text[0].toUpperCase()}${text.slice(1)}${kind === "depth" ? ` (${depth + 1})` : ""}; first B-scan ${pane.flipped ? "at the bottom" : "on top"}.${range}${known}`;
}

// `dy` is that of the drawing, `stretch` times the scan's.
function drawScan(pane, depth, columns, dy, dx, stretch) {
  const [pen, width, height] = sized(pane.scan.canvas, (depth * dy) / (columns * dx));
  const { scale } = pane.zoom;
  const { picture, lines, slice } = pane.held.bscan;
  const { grid } = pane.held;
  const [sx, sy] = [(width / columns) * scale, (height / depth) * scale];
  pane.toX = (column) => (column + 0.5) * sx - pane.zoom.x * width * scale;
  pane.toY = (index) => (index + 0.5) * sy - pane.zoom.y * height * scale;
  const [left, top] = [pane.toX(-0.5), pane.toY(-0.5)];
  pen.filter = `contrast(${pane.contrast.value})`;
  pen.imageSmoothingEnabled = scale < 6;
  pen.drawImage(picture, left, top, columns * sx, depth * sy);
  pen.filter = "none";
  if (grid && grid.slice === slice) {
    pen.imageSmoothingEnabled = false;
    pen.drawImage(grid.picture, left, top, columns * sx, depth * sy);
  }
  const shown = pane.corrections?.lines ?? lines;
  if (pane.surfaces.checked) strokeSurfaces(pane, pen, shown, pane.toX, pane.toY);
  if (pane.corrections?.active) strokeChosen(pane, pen, shown);
  crosshair(pen, pane.toX(pane.place.column), pane.toY(pane.place.depth), width, height);
  pen.font = `${Math.round(Math.max(12, Math.min(width / 36, 26)))}px system-ui, sans-serif`;
  for (const { from, to, slice: drawnOn } of pane.calipers) {
    if (drawnOn !== slice) continue;
    const ends = [from, to].map(([column, index]) => [pane.toX(column), pane.toY(index)]);
    pen.fillStyle = "#ffe14d";
    for (const [colour, line] of [["rgb(0 0 0 / .6)", 5], ["#ffe14d", 2]]) {
      Object.assign(pen, { strokeStyle: colour, lineWidth: line });
      strokeLine(pen, ends);
    }
    const mm = Math.hypot((to[0] - from[0]) * dx, ((to[1] - from[1]) * dy) / stretch);
    Object.assign(pen, { strokeStyle: "#000", lineWidth: 3, lineJoin: "round" });
    for (const write of ["strokeText", "fillText"]) pen[write](`${mm.toFixed(3)} mm`, ends[1][0] + 6, ends[1][1] - 6);
  }
  const bar = 0.5; // mm
  pen.strokeStyle = "#fff";
  pen.lineWidth = 2;
  strokeLine(pen, [[12, height - 12 - ((bar * stretch) / dy) * sy], [12, height - 12], [12 + (bar / dx) * sx, height - 12]]);
  pane.scan.caption.textContent = `B-scan ${slice + 1}, ${stretch > 1 ? `depth drawn ${stretch} times` : "true proportions"}${scale > 1 ? `, ${scale.toFixed(1)} times as large` : ""}; bars ${bar} mm.`;
  for (const { name, colour } of pane.surfaces.checked && lines.length ? boundariesOf(pane, lines) : []) {
    const swatch = make("span", "", "swatch");
    swatch.style.background = colour;
    const entry = make("span", "", "line-name");
    entry.append(swatch, name);
    pane.scan.caption.append(entry);
  }
}

// Eight boundaries, or the first and the last one until all are found.
function strokeSurfaces(pane, pen, lines, toX, toY) {
  const drawn = boundariesOf(pane, lines);
  pen.lineWidth = 1.5;
  lines.forEach((values, number) => {
    pen.strokeStyle = drawn[number].colour;
    strokeLine(pen, values.map((value, index) => (value === null ? null : [toX(index), toY(value)])));
  });
}

// The boundary that is corrected, thicker and on a dark edge, and its place at the chosen column.
function strokeChosen(pane, pen, lines) {
  const { boundary } = pane.corrections;
  const line = lines[boundary];
  const points = line.map((value, index) => (value === null ? null : [pane.toX(index), pane.toY(value)]));
  for (const [colour, width] of [["rgb(0 0 0 / .6)", 5], [pane.about.boundaries[boundary].colour, 3]]) {
    Object.assign(pen, { strokeStyle: colour, lineWidth: width });
    strokeLine(pen, points);
  }
  const at = points[pane.place.column];
  if (!at) return;
  Object.assign(pen, { fillStyle: "#fff", strokeStyle: "#000", lineWidth: 1.5 });
  pen.beginPath();
  pen.arc(at[0], at[1], 5, 0, 2 * Math.PI);
  pen.fill();
  pen.stroke();
}

function boundariesOf(pane, lines) {
  const { boundaries } = pane.about;
  return lines.length === boundaries.length ? boundaries : [boundaries[0], boundaries.at(-1)];
}

function crosshair(pen, x, y, width, height) {
  pen.strokeStyle = "rgb(255 255 255 / .45)";
  pen.lineWidth = 1;
  strokeLine(pen, [[0, y], [width, y]]);
  strokeLine(pen, [[x, 0], [x, height]]);
}

// Position in mm of a place between B-scans, by the `positions` of the B-scans.
function mmAt(positions, index) {
  const low = Math.floor(index);
  return positions[low] + (index - low) * ((positions[low + 1] ?? positions[low]) - positions[low]);
}

// The place between B-scans at `mm`; before the first and after the last one with the usual spacing `dz`.
function indexAt(positions, mm, dz) {
  const next = positions.findIndex((position) => position > mm);
  if (next < 0) return positions.length - 1 + (mm - positions.at(-1)) / dz;
  if (next === 0) return (mm - positions[0]) / dz;
  return next - 1 + (mm - positions[next - 1]) / (positions[next] - positions[next - 1]);
}

// `toX` and `toY` map mm from the centre to the picture. A row of it is a B-scan, so that a circle is drawn as it lies
// on the B-scans, which may be at uneven distances.
function drawEtdrs(pen, { nasal, has_rings: hasRings }, perMmX, toX, toY) {
  const place = (radius, angle) => [toX(radius * Math.cos(angle)), toY(radius * Math.sin(angle))];
  const share = (count) => Array.from({ length: count + 1 }, (_, number) => number / count);
  for (const [colour, width] of [["rgb(0 0 0 / .55)", 3.2], ["#fff", 1.2]]) { // dark below white: seen on any picture
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    for (const radius of hasRings ? [0.5, 1.5, 3] : [0.5]) strokeLine(pen, share(144).map((part) => place(radius, 2 * Math.PI * part)));
    for (const quarter of hasRings ? [1, 3, 5, 7] : []) strokeLine(pen, share(24).map((part) => place(0.5 + 2.5 * part, (quarter * Math.PI) / 4)));
  }
  if (!hasRings) return;
  const size = Math.round(Math.max(11, 0.5 * perMmX));
  const letters = [["S", 0, -1], ["I", 0, 1], ...(nasal ? [["N", nasal, 0], ["T", -nasal, 0]] : [])];
  Object.assign(pen, { font: `bold ${size}px system-ui, sans-serif`, textAlign: "center", textBaseline: "middle", fillStyle: "#fff", strokeStyle: "#000", lineWidth: 3, lineJoin: "round" });
  for (const [letter, u, v] of letters) {
    const at = [toX(2.25 * u), toY(2.25 * v)];
    pen.strokeText(letter, ...at);
    pen.fillText(letter, ...at);
  }
  Object.assign(pen, { textAlign: "left", textBaseline: "alphabetic" });
}
