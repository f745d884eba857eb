// The page of the viewer. State is one volume, one slice and one overlay; everything drawn follows from it. A picture is
// kept with the number of its slice, so that band and overlay are never drawn on another one. The address keeps it all.
"use strict";

const SHOWN_ASPECT = 0.62; // height over width of a B-scan, unless true proportions are chosen
const MOST_ROWS = 500;
const SENTENCES = {
  tokens: "Three principal components of the tissue tokens as red, green and blue. Like colours are like features, in all volumes alike; the colours themselves mean nothing. Clear: no tissue, or not among the tokens that the encoder is given.",
  mask: "The fixed validation sample under this mask family:",
};
const at = (id) => document.getElementById(id);
const state = { about: null, rows: [], shown: [], row: null, slice: null, scan: null, face: null, band: null, grid: null, linked: false, moved: false };
const pictures = new Map(); // url -> promise of an image: the last ones requested

function picture(url) {
  if (!pictures.has(url)) {
    const loading = (async () => {
      const answer = await fetch(url);
      if (!answer.ok) throw new Error(await answer.text());
      return createImageBitmap(await answer.blob());
    })();
    loading.catch(() => pictures.delete(url)); // what failed is requested again
    pictures.set(url, loading);
    if (pictures.size > 200) pictures.delete(pictures.keys().next().value);
  }
  return pictures.get(url);
}

async function json(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function say(error) {
  at("error").hidden = !error;
  at("error").textContent = error ? `${error.message || error}` : "";
}

const make = (name, text, className) => {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
};
const plain = (text) => (text || "unknown").replaceAll("_", " ");
const good = (row) => (row.quality === null ? "unknown" : row.quality.toFixed(2));
const doubts = (row) => row.notes.length + 100 * row.axes.filter((axis) => axis.uncertain).length;

function fill(select, values, first) {
  select.append(new Option(first, ""));
  for (const value of [...new Set(values)].sort()) select.append(new Option(plain(value), value || "\0"));
}

function filter() {
  const query = at("search").value.trim().toLowerCase();
  const is = (id, value) => !at(id).value || at(id).value === (value || "\0");
  state.shown = state.rows.filter((row) => is("device", row.device) && is("split", row.split)
    && (!query || [row.id, row.file, row.device, row.site, row.protocol, ...row.notes].join(" ").toLowerCase().includes(query)));
  const orders = {
    worst: (a, b) => (a.quality ?? 0) - (b.quality ?? 0), doubt: (a, b) => doubts(b) - doubts(a) || (a.quality ?? 0) - (b.quality ?? 0),
  };
  if (orders[at("order").value]) state.shown.sort(orders[at("order").value]);
  const list = at("list");
  list.replaceChildren();
  for (const row of state.shown.slice(0, MOST_ROWS)) {
    const button = make("button");
    button.type = "button";
    button.dataset.id = row.id;
    const marks = row.axes.some((axis) => axis.uncertain) ? " spacing uncertain" : "";
    button.append(make("b", `${plain(row.device)}, ${row.eye || "eye unknown"}`), make("span", marks, "mark"));
    const facts = [`quality ${good(row)}`, row.split, row.id, row.file.split("/").pop()];
    button.append(make("span", facts.filter(Boolean).join(" · "), "soft"));
    button.addEventListener("click", () => open(row));
    const item = make("li");
    item.append(button);
    list.append(item);
  }
  const cut = state.shown.length > MOST_ROWS ? `, the first ${MOST_ROWS} listed` : "";
  at("count").textContent = `${state.shown.length} of ${state.rows.length} volumes${cut}`;
  mark();
}

function mark() {
  for (const button of at("list").querySelectorAll("button")) {
    button.setAttribute("aria-current", String(state.row !== null && button.dataset.id === state.row.id));
  }
}

async function open(row) {
  state.row = row;
  state.slice = Math.min(state.slice ?? Math.floor(state.about.shape[0] / 2), state.about.shape[0] - 1);
  Object.assign(state, { scan: null, face: null, band: null, grid: null });
  mark();
  at("title").textContent = `${plain(row.device)}, ${row.eye || "eye unknown"}`;
  at("subtitle").textContent = `volume ${row.id} · ${row.file}`;
  facts(row);
  draw();
  try {
    const volume = `/volumes/${row.id}`;
    const [band, face, centre] = await Promise.all([
      json(`${volume}/band`), picture(`${volume}/en_face.png`), json(`${volume}/central`),
    ]);
    if (state.row !== row) return;
    Object.assign(state, { band, face });
    const empty = !band[0][state.slice].some((index) => index >= 0);
    if (!state.linked && (!state.moved || empty)) state.slice = centre;
    state.linked = false;
    say(null);
    await Promise.all([load(), overlay()]);
  } catch (error) {
    if (state.row === row) say(error);
  }
}

async function load() {
  const [row, slice] = [state.row, state.slice];
  try {
    const scan = await picture(`/volumes/${row.id}/slices/${slice}.png`);
    if (state.row !== row || state.slice !== slice) return;
    state.scan = { picture: scan, slice };
    say(null);
    draw();
    for (const near of [slice + 1, slice - 1]) {
      if (near >= 0 && near < state.about.shape[0]) picture(`/volumes/${row.id}/slices/${near}.png`).catch(() => {});
    }
  } catch (error) {
    if (state.row === row && state.slice === slice) say(error);
  }
}

async function overlay() {
  const [row, layer] = [state.row, at("layer").value];
  const current = () => state.row === row && at("layer").value === layer;
  state.grid = null;
  remember();
  legend(layer);
  if (layer) {
    try {
      const grid = await picture(`/volumes/${row.id}/grid/${layer}.png`);
      if (!current()) return;
      state.grid = grid;
      say(null);
    } catch (error) {
      if (current()) say(error);
    }
  }
  draw();
}

function remember() {
  const layer = at("layer").value;
  history.replaceState(null, "", `#${[state.row.id, state.slice + 1, ...(layer ? [layer] : [])].join("/")}`);
}

function legend(layer) {
  const node = at("legend");
  node.replaceChildren();
  if (layer === "tokens") node.textContent = SENTENCES.tokens;
  else if (layer) {
    node.append(SENTENCES.mask);
    for (const [name, label] of [["seen", "seen"], ["target", "to be predicted"], ["hidden", "hidden, no target"], ["out", "left out"]]) {
      node.append(make("span", "", `swatch ${name}`), label);
    }
  }
}

function draw() {
  const { about, face, band, grid } = state;
  const scan = state.scan && state.scan.picture;
  const slice = state.scan ? state.scan.slice : state.slice; // what is drawn goes with the picture that is there
  const [depth, height, width] = about.shape;
  const [dz, dy, dx] = about.spacing_mm;
  at("slice").value = state.slice;
  at("number").textContent = `${state.slice + 1} of ${depth}`;
  const truly = (height * dy) / (width * dx);
  const aspect = at("true").checked ? truly : SHOWN_ASPECT;
  const canvas = at("scan");
  const across = 2 * Math.max(width, 360);
  canvas.width = across;
  canvas.height = Math.round(across * aspect);
  const [sx, sy] = [canvas.width / width, canvas.height / height];
  const pen = canvas.getContext("2d");
  pen.filter = `contrast(${at("contrast").value})`;
  if (scan) pen.drawImage(scan, 0, 0, canvas.width, canvas.height);
  pen.filter = "none";
  if (grid && scan) {
    const [[thick, high, wide], [rows, columns], [z, y, x]] = [about.patch, about.grid.slice(1), about.corner];
    const slab = Math.floor((slice - z) / thick);
    if (slab >= 0 && slab < about.grid[0]) {
      pen.imageSmoothingEnabled = false;
      pen.drawImage(grid, 0, slab * rows, columns, rows, x * sx, y * sy, columns * wide * sx, rows * high * sy);
    }
  }
  if (band && scan && at("band").checked) {
    pen.lineWidth = 2;
    pen.strokeStyle = "#35d0a5";
    for (const edge of band) line(pen, edge[slice], sx, sy);
  }
  at("scan-caption").textContent = at("true").checked
    ? "B-scan as stored: flattened along Bruch’s membrane."
    : `B-scan as stored: flattened along Bruch’s membrane, drawn ${(SHOWN_ASPECT / truly).toFixed(1)} times as high as it is.`;
  drawFace(face, depth, width, (depth * dz) / (width * dx));
}

function line(pen, rows, sx, sy) {
  pen.beginPath();
  let drawing = false;
  rows.forEach((row, column) => {
    if (row < 0) drawing = false;
    else if (drawing) pen.lineTo((column + 0.5) * sx, (row + 0.5) * sy);
    else {
      pen.moveTo((column + 0.5) * sx, (row + 0.5) * sy);
      drawing = true;
    }
  });
  pen.stroke();
}

function drawFace(face, depth, width, aspect) {
  const canvas = at("face");
  canvas.width = 600;
  canvas.height = Math.round(600 * aspect);
  const pen = canvas.getContext("2d");
  if (!face) return;
  pen.drawImage(face, 0, 0, canvas.width, canvas.height);
  pen.strokeStyle = "#35d0a5";
  pen.lineWidth = 2;
  const y = ((state.slice + 0.5) / depth) * canvas.height;
  pen.beginPath();
  pen.moveTo(0, y);
  pen.lineTo(canvas.width, y);
  pen.stroke();
}

function facts(row) {
  const table = make("table");
  table.append(make("caption", "The scan as it came", "soft"));
  const head = make("tr");
  for (const name of ["axis", "samples", "spacing, mm", "field, mm", "spacing from"]) head.append(make("th", name));
  table.append(head);
  for (const axis of row.axes) {
    const line = make("tr");
    for (const cell of [axis.axis, axis.count, axis.spacing_mm, axis.extent_mm]) line.append(make("td", String(cell)));
    line.append(make("td", plain(axis.from) + (axis.uncertain ? ", uncertain" : ""), axis.uncertain ? "mark" : ""));
    table.append(line);
  }
  const more = make("table");
  more.append(make("caption", "What is known of it", "soft"));
  const known = {
    protocol: row.protocol, pattern: row.pattern, region: row.region, site: row.site, split: row.split,
    quality: good(row), shown: row.mirrored ? "mirrored, as a right eye" : "as scanned",
    notes: row.notes.map(plain).join(", "),
  };
  for (const [name, value] of Object.entries(known)) {
    if (!value) continue;
    const line = make("tr");
    line.append(make("th", name), make("td", name === "quality" ? value : plain(value)));
    more.append(line);
  }
  at("facts").replaceChildren(table, more);
}

function go(slice) {
  state.moved = true;
  state.slice = Math.max(0, Math.min(state.about.shape[0] - 1, slice));
  remember();
  draw();
  load();
}

function step(by) {
  const here = state.shown.findIndex((row) => state.row && row.id === state.row.id);
  const next = state.shown[Math.max(0, Math.min(state.shown.length - 1, here + by))];
  if (next && next !== state.row) {
    open(next);
    const button = at("list").querySelector(`[data-id="${next.id}"]`);
    if (button) button.scrollIntoView({ block: "nearest" });
  }
}

function key(event) {
  if (["INPUT", "SELECT"].includes(event.target.tagName) && event.target.type !== "checkbox") return;
  const acts = {
    ArrowLeft: () => go(state.slice - 1), ArrowRight: () => go(state.slice + 1), j: () => step(1), k: () => step(-1),
    b: () => { at("band").checked = !at("band").checked; draw(); },
    o: () => { const layer = at("layer"); layer.selectedIndex = (layer.selectedIndex + 1) % layer.options.length; overlay(); },
  };
  if (acts[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    acts[event.key]();
  }
}

async function start() {
  [state.about, state.rows] = await Promise.all([json("/about"), json("/volumes")]);
  const { about } = state;
  at("summary").textContent = `${about.volumes} volumes of ${about.shape.join(" x ")} voxels${about.encoder ? ` · encoder ${about.encoder}` : ""}`;
  if (about.missing) at("summary").append(make("span", ` · without token maps and masks: ${about.missing}`, "mark"));
  at("slice").max = about.shape[0] - 1;
  fill(at("device"), state.rows.map((row) => row.device), "all");
  fill(at("split"), state.rows.map((row) => row.split), "all");
  for (const layer of about.layers) at("layer").append(new Option(layer === "tokens" ? "token map" : `mask: ${layer}`, layer));
  at("layer").parentElement.hidden = !about.layers.length;
  for (const id of ["search", "device", "split", "order"]) at(id).addEventListener("input", filter);
  at("slice").addEventListener("input", () => go(Number(at("slice").value)));
  for (const id of ["band", "contrast", "true"]) at(id).addEventListener("input", draw);
  at("layer").addEventListener("input", overlay);
  at("face").addEventListener("click", (event) => {
    const box = at("face").getBoundingClientRect();
    go(Math.floor(((event.clientY - box.top) / box.height) * about.shape[0]));
  });
  document.addEventListener("keydown", key);
  at("contrast").parentElement.hidden = !("filter" in CanvasRenderingContext2D.prototype);
  filter();
  const [id, slice, layer] = location.hash.slice(1).split("/");
  if (Number(slice) >= 1) Object.assign(state, { slice: Math.floor(Number(slice)) - 1, linked: true, moved: true });
  if (about.layers.includes(layer)) at("layer").value = layer;
  open(state.rows.find((row) => row.id === id) || state.shown[0]);
}

start().catch(say);
