// The scan as it came: three orthogonal planes in true proportions with zoom, calipers, read-out, surfaces and overlays.
import { json, make, picture, plain, strokeLine, titleOf } from "/parts.js";

const SURFACE_COLOURS = ["#35d0a5", "#ffb454", "#7fb6ff"];
const SENTENCES = {
  tokens: "Three principal components of the tissue tokens as red, green and blue. Like colours are like features.",
  tubes: "Blue: seen. Orange: to be predicted. Grey: hidden, no target. Dark: left out.",
  labels: "As the graders marked it.", segmentation: "As the segmentation head predicts it.",
};
const PLANES = [["face", "en face: lowest 0.25 mm of the tissue band"], ["thickness", "retinal thickness"], ["depth", "plane at the chosen depth"], ["localizer", "picture of the fundus in the file"]];
const NAMES = { central: "centre", inner: "inner ring", outer: "outer ring" };

export class NativePane {
  constructor(root, about, moved) {
    Object.assign(this, { root, about, moved, row: null, calipers: [], mode: "", zoom: { scale: 1, x: 0, y: 0 } });
    root.append(this.heading = make("h3"), this.status = make("p", "", "soft state"));
    this.body = make("div", undefined, "native-body");
    root.append(this.body);
    this.tools();
    this.scan = this.figure("bscan", "B-scan as it came");
    this.face = this.figure("face", "Scan from the front; a click chooses slice and column");
    this.cross = this.figure("cross", "Section across the B-scans; a click chooses slice and depth");
    const side = make("div", undefined, "side");
    side.append(this.face.figure, this.cross.figure);
    const planes = make("div", undefined, "planes");
    this.readout = make("output", "", "readout");
    const first = make("div");
    first.append(this.scan.figure, this.readout, this.legend = make("p", "", "soft legend"), this.sectors = make("div", undefined, "sectors"));
    planes.append(first, side);
    this.body.append(planes);
    this.pointers();
    new ResizeObserver(() => this.draw()).observe(planes);
  }

  tools() {
    const tools = make("div", undefined, "tools");
    const field = (name, type, label, settings) => {
      const box = make("label");
      this[name] = make(type === "select" ? "select" : "input", undefined, `native-${name}`);
      if (type !== "select") this[name].type = type;
      Object.assign(this[name], settings);
      box.append(...(type === "checkbox" ? [this[name], ` ${label}`] : [`${label} `, this[name]]));
      tools.append(box);
      return this[name];
    };
    const button = (name, text, act) => {
      const made = make("button", text, `native-${name}`);
      made.type = "button";
      made.addEventListener("click", act);
      tools.append(made);
      return made;
    };
    field("slider", "range", "B-scan", { min: 0, value: 0 }).addEventListener("input", () => this.go({ slice: Number(this.slider.value) }));
    this.slider.after(this.number = make("output", "", "number"));
    field("layer", "select", "Overlay").addEventListener("input", () => this.overlay());
    field("plane", "select", "Beside it").addEventListener("input", () => this.load());
    field("surfaces", "checkbox", "Layers", { checked: true }).addEventListener("input", () => this.draw());
    field("etdrs", "checkbox", "ETDRS grid", { checked: true }).addEventListener("input", () => this.draw());
    field("contrast", "range", "Contrast", { min: 0.5, max: 3, step: 0.1, value: 1 }).addEventListener("input", () => this.draw());
    button("in", "Zoom in", () => this.zoomBy(1.5, 0.5, 0.5));
    button("out", "Zoom out", () => this.zoomBy(1 / 1.5, 0.5, 0.5));
    this.caliper = button("caliper", "Measure", () => this.choose("caliper"));
    this.centre = button("centre", "Centre ETDRS", () => this.choose("centre"));
    button("clear", "Clear", () => { this.calipers = []; this.choose(""); this.zoom = { scale: 1, x: 0, y: 0 }; this.draw(); });
    this.body.append(tools);
  }

  choose(mode) {
    this.mode = this.mode === mode ? "" : mode;
    for (const name of ["caliper", "centre"]) this[name].setAttribute("aria-pressed", String(this.mode === name));
  }

  figure(name, label) {
    const figure = make("figure", undefined, `${name}-figure`);
    const canvas = make("canvas", undefined, name);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    const caption = make("figcaption", "", "soft");
    figure.append(canvas, caption);
    return { figure, canvas, caption };
  }

  // Whether higher B-scans are further up, as on the eye: superior is always drawn on top.
  get flipped() { return this.etdrsFacts.superior > 0; }

  get url() { return `/volumes/${this.row.id}/native`; }

  async open(row) {
    Object.assign(this, { row, facts: null, calipers: [], token: null, grid: null, classes: null, zoom: { scale: 1, x: 0, y: 0 } });
    this.heading.textContent = `The scan as it came: ${titleOf(row)}`;
    this.status.textContent = "Reading the file …";
    this.body.hidden = true;
    try {
      const facts = await json(this.url);
      if (this.row !== row) return;
      if (facts.reason) {
        this.status.textContent = `Not shown: ${facts.reason}`;
        return;
      }
      Object.assign(this, { facts, etdrsFacts: facts.etdrs });
    } catch (error) {
      if (this.row === row) this.status.textContent = `Not shown: ${error.message}`;
      return;
    }
    const [slices, depth, columns] = this.facts.shape;
    const [dz, dy, dx] = this.facts.spacing_mm.map((mm) => 1000 * mm);
    const unsure = this.facts.uncertain.length ? `; spacing uncertain: ${this.facts.uncertain.join(", ")}` : "";
    this.status.textContent = `${slices} B-scans of ${depth} x ${columns} samples, ${dz.toFixed(0)} x ${dy.toFixed(2)} x ${dx.toFixed(1)} µm${unsure}`;
    this.slider.max = slices - 1;
    this.place = { slice: this.facts.opening_slice, depth: Math.floor(depth / 2), column: Math.floor(columns / 2) };
    const chosen = this.layer.value;
    this.layer.replaceChildren(new Option("none", ""), ...this.facts.layers.map((name) => new Option(plain(name), name)));
    if (this.facts.layers.includes(chosen)) this.layer.value = chosen;
    const before = this.plane.value;
    this.plane.replaceChildren(...PLANES.filter(([name]) => name !== "localizer" || this.facts.localizer).map(([name, text]) => new Option(text, name)));
    if ([...this.plane.options].some((option) => option.value === before)) this.plane.value = before;
    this.body.hidden = false;
    await Promise.all([this.load(), this.overlay()]);
    await this.measureThickness();
  }

  go(place) {
    const limits = this.facts.shape;
    ["slice", "depth", "column"].forEach((axis, number) => {
      const value = place[axis] ?? this.place[axis];
      this.place[axis] = Math.max(0, Math.min(limits[number] - 1, Math.round(value)));
    });
    this.load();
    this.overlay(false);
  }

  async load() {
    const { row, url, place: { slice, depth, column } } = this;
    this.slider.value = slice;
    this.number.textContent = `${slice + 1} of ${this.facts.shape[0]}`;
    const kind = this.plane.value;
    const front = { face: "face.png", thickness: "face.png", depth: `depth/${depth}.png`, localizer: "localizer.png" }[kind];
    const current = () => this.row === row && this.place.slice === slice && this.place.depth === depth && this.place.column === column && this.plane.value === kind;
    try {
      const [scan, lines] = await Promise.all([picture(`${url}/slice/${slice}.png`), json(`${url}/surfaces/slice/${slice}`)]);
      if (!current()) return;
      this.shown = { scan, lines, slice };
      this.levels = null;
      this.draw();
      const [cross, crossLines, face, thick] = await Promise.all([
        picture(`${url}/column/${column}.png`), json(`${url}/surfaces/column/${column}`), picture(`${url}/${front}`),
        kind === "thickness" ? picture(`${url}/thickness.png`) : null,
      ]);
      if (!current()) return;
      Object.assign(this.shown, { cross, crossLines, face, thick, kind });
      this.draw();
      this.moved(this, [slice, depth, column]);
      for (const near of [slice + 1, slice - 1]) if (near >= 0 && near < this.facts.shape[0]) picture(`${url}/slice/${near}.png`).catch(() => {});
    } catch (error) {
      if (current()) this.status.textContent = error.message;
    }
  }

  async overlay(fresh = true) {
    const [row, layer, slice] = [this.row, this.layer.value, this.place.slice];
    const current = () => this.row === row && this.layer.value === layer && this.place.slice === slice;
    if (fresh) Object.assign(this, { grid: null, classes: null });
    this.legend.textContent = SENTENCES[layer] || (layer && layer !== "similarity" ? SENTENCES.tubes : "");
    if (!layer) return this.draw();
    try {
      if (layer === "similarity" && !this.token) {
        this.legend.textContent = "Click on tissue in the B-scan: its token is compared with all others.";
        return this.draw();
      }
      if (layer === "similarity") this.legend.textContent = `Cosine similarity to the token clicked: violet ${this.token.low}, yellow ${this.token.high}.`;
      const query = layer === "similarity" ? `?token=${this.token.token}` : "";
      const grid = await picture(`${this.url}/overlay/${layer}/${slice}.png${query}`);
      const classes = this.about.voxel_layers.includes(layer) ? await json(`${this.url}/classes/${layer}`) : null;
      if (!current()) return;
      this.grid = { picture: grid, slice };
      if (classes) this.showClasses(classes);
      this.draw();
    } catch (error) {
      if (current()) this.legend.textContent = `No overlay: ${error.message}`;
    }
  }

  showClasses(classes) {
    for (const { name, colour } of classes) {
      const swatch = make("span", "", "swatch");
      swatch.style.background = `rgb(${colour.join(" ")})`;
      this.legend.append(swatch, plain(name));
    }
  }

  async pickToken() {
    const { row, place: { slice, depth, column } } = this;
    const found = await json(`${this.url}/place/${slice}/${depth}/${column}`);
    if (this.row !== row) return;
    if (!found.similarity) this.legend.textContent = "There is no tissue token at this place.";
    else {
      this.token = found.similarity;
      await this.overlay();
    }
  }

  async measureThickness(centre) {
    const row = this.row;
    try {
      const query = centre ? `?slice_index=${centre[0]}&column=${centre[1]}` : "";
      const found = await json(`${this.url}/etdrs${query}`);
      if (this.row !== row) return;
      this.etdrsFacts = found;
      const table = make("table");
      const where = found.centre_from === "click" ? "about the place clicked" : "about the middle of the scan; “Centre ETDRS” moves it to the fovea";
      const order = found.vertical_known ? "" : "; which way is up is assumed";
      table.append(make("caption", `Thickness from ILM to Bruch’s membrane, µm, ${where}${order}. As ingest found the surfaces: not corrected by hand.`, "soft"));
      const head = make("tr");
      head.append(make("th", ""), ...["superior", "nasal", "inferior", "temporal"].map((name) => make("th", name)));
      table.append(head);
      const cell = (value) => make("td", value === null ? "–" : value.toFixed(0));
      for (const ring of ["inner", "outer"]) {
        const line = make("tr");
        line.append(make("th", NAMES[ring]), ...["superior", "nasal", "inferior", "temporal"].map((name) => cell(found.sectors[`${ring}_${name}`])));
        table.append(line);
      }
      const line = make("tr");
      line.append(make("th", NAMES.central), cell(found.sectors.central));
      table.append(line);
      this.sectors.replaceChildren(table);
      this.draw();
    } catch (error) {
      if (this.row === row) this.sectors.replaceChildren(make("p", `No thickness: ${error.message}`, "soft"));
    }
  }

  // Drawing. Positions of pixels' centres are at whole numbers, so a picture begins at -0.5.
  sized(canvas, aspect, tallest = 2) {
    const width = Math.max(200, Math.round(canvas.clientWidth * Math.min(devicePixelRatio || 1, 2)));
    const height = Math.round(width * Math.min(aspect, tallest));
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, width, height);
    return [pen, width, height];
  }

  draw() {
    if (!this.facts || !this.shown || this.body.hidden) return;
    const [slices, depth, columns] = this.facts.shape;
    const [dz, dy, dx] = this.facts.spacing_mm;
    this.drawScan(depth, columns, dy, dx);
    const { cross, crossLines, face, thick, kind, slice } = this.shown;
    if (!cross) return;
    let [pen, width, height] = this.sized(this.cross.canvas, (depth * dy) / (slices * dz));
    pen.filter = `contrast(${this.contrast.value})`;
    pen.drawImage(cross, 0, 0, width, height);
    pen.filter = "none";
    let [sx, sy] = [width / slices, height / depth];
    if (this.surfaces.checked) this.strokeSurfaces(pen, crossLines, (index) => (index + 0.5) * sx, (value) => (value + 0.5) * sy);
    this.crosshair(pen, (slice + 0.5) * sx, (this.place.depth + 0.5) * sy, width, height);
    this.cross.caption.textContent = `Across the B-scans at column ${this.place.column + 1}; first B-scan on the left`;
    if (kind === "localizer") {
      [pen, width, height] = this.sized(this.face.canvas, face.height / face.width);
      pen.drawImage(face, 0, 0, width, height);
      this.face.caption.textContent = "The picture of the fundus that the file holds";
      return;
    }
    [pen, width, height] = this.sized(this.face.canvas, (slices * dz) / (columns * dx));
    pen.save();
    if (this.flipped) pen.transform(1, 0, 0, -1, 0, height);
    pen.drawImage(face, 0, 0, width, height);
    if (thick) pen.drawImage(thick, 0, 0, width, height);
    pen.restore();
    [sx, sy] = [width / columns, height / slices];
    const toY = (index) => (this.flipped ? height - (index + 0.5) * sy : (index + 0.5) * sy);
    if (this.etdrs.checked && this.etdrsFacts && kind !== "depth") this.drawEtdrs(pen, sx / dx, sy / dz, (this.etdrsFacts.centre[1] + 0.5) * sx, toY(this.etdrsFacts.centre[0]));
    this.crosshair(pen, (this.place.column + 0.5) * sx, toY(slice), width, height);
    const range = thick && this.etdrsFacts.low_um !== undefined ? ` Violet ${this.etdrsFacts.low_um} µm, yellow ${this.etdrsFacts.high_um} µm.` : "";
    this.face.caption.textContent = `${PLANES.find(([name]) => name === kind)[1]}${kind === "depth" ? ` (${this.place.depth + 1})` : ""}; first B-scan ${this.flipped ? "at the bottom" : "on top"}.${range}`;
  }

  drawScan(depth, columns, dy, dx) {
    const [pen, width, height] = this.sized(this.scan.canvas, (depth * dy) / (columns * dx));
    const { scale } = this.zoom;
    const [sx, sy] = [(width / columns) * scale, (height / depth) * scale];
    this.toX = (column) => (column + 0.5) * sx - this.zoom.x * width * scale;
    this.toY = (index) => (index + 0.5) * sy - this.zoom.y * height * scale;
    const [left, top] = [this.toX(-0.5), this.toY(-0.5)];
    pen.filter = `contrast(${this.contrast.value})`;
    pen.imageSmoothingEnabled = scale < 6;
    pen.drawImage(this.shown.scan, left, top, columns * sx, depth * sy);
    pen.filter = "none";
    if (this.grid && this.grid.slice === this.shown.slice) {
      pen.imageSmoothingEnabled = false;
      pen.drawImage(this.grid.picture, left, top, columns * sx, depth * sy);
    }
    if (this.surfaces.checked) this.strokeSurfaces(pen, this.shown.lines, this.toX, this.toY);
    this.crosshair(pen, this.toX(this.place.column), this.toY(this.place.depth), width, height);
    pen.font = `${Math.round(height / 24 + 8)}px system-ui, sans-serif`;
    for (const { from, to, slice } of this.calipers) {
      if (slice !== this.shown.slice) continue;
      const ends = [from, to].map(([column, index]) => [this.toX(column), this.toY(index)]);
      pen.strokeStyle = pen.fillStyle = "#ffe14d";
      pen.lineWidth = 2;
      strokeLine(pen, ends);
      const mm = Math.hypot((to[0] - from[0]) * dx, (to[1] - from[1]) * dy);
      pen.fillText(`${mm.toFixed(3)} mm`, ends[1][0] + 6, ends[1][1] - 6);
    }
    const bar = 0.5; // mm, both ways alike
    pen.strokeStyle = "#fff";
    pen.lineWidth = 2;
    strokeLine(pen, [[12, height - 12], [12 + (bar / dx) * sx, height - 12]]);
    this.scan.caption.textContent = `B-scan ${this.shown.slice + 1}, true proportions${scale > 1 ? `, ${scale.toFixed(1)} times as large` : ""}; bar ${bar} mm.${this.surfaces.checked ? " Green ILM, orange Bruch’s membrane, blue lower edge of the tissue band." : ""}`;
  }

  strokeSurfaces(pen, lines, toX, toY) {
    pen.lineWidth = 1.5;
    lines.forEach((values, number) => {
      pen.strokeStyle = SURFACE_COLOURS[number];
      strokeLine(pen, values.map((value, index) => (value === null ? null : [toX(index), toY(value)])));
    });
  }

  crosshair(pen, x, y, width, height) {
    pen.strokeStyle = "rgb(255 255 255 / .45)";
    pen.lineWidth = 1;
    strokeLine(pen, [[0, y], [width, y]]);
    strokeLine(pen, [[x, 0], [x, height]]);
  }

  drawEtdrs(pen, perMmX, perMmY, x, y) {
    const { nasal } = this.etdrsFacts;
    pen.strokeStyle = "#fff";
    pen.lineWidth = 1.2;
    for (const radius of [0.5, 1.5, 3]) {
      pen.beginPath();
      pen.ellipse(x, y, radius * perMmX, radius * perMmY, 0, 0, 2 * Math.PI);
      pen.stroke();
    }
    const ends = [0.5 / Math.SQRT2, 3 / Math.SQRT2];
    for (const [u, v] of [[1, 1], [1, -1], [-1, 1], [-1, -1]]) strokeLine(pen, ends.map((mm) => [x + u * mm * perMmX, y + v * mm * perMmY]));
    pen.fillStyle = "#fff";
    pen.font = "bold 13px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillText("S", x, y - 2.6 * perMmY);
    pen.fillText("I", x, y + 2.6 * perMmY);
    if (nasal) {
      pen.fillText("N", x + nasal * 2.6 * perMmX, y);
      pen.fillText("T", x - nasal * 2.6 * perMmX, y);
    }
    pen.textAlign = "left";
  }

  zoomBy(factor, u, v) {
    const { scale, x, y } = this.zoom;
    const next = Math.max(1, Math.min(12, scale * factor));
    const kept = (start, share) => Math.max(0, Math.min(1 - 1 / next, start + share / scale - share / next));
    this.zoom = { scale: next, x: kept(x, u), y: kept(y, v) };
    this.draw();
  }

  // The place in the picture under the pointer: share of the canvas, column and depth index.
  under(event) {
    const box = this.scan.canvas.getBoundingClientRect();
    const [u, v] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const [, depth, columns] = this.facts.shape;
    const { scale, x, y } = this.zoom;
    return { u, v, column: (x + u / scale) * columns - 0.5, depth: (y + v / scale) * depth - 0.5 };
  }

  pointers() {
    const canvas = this.scan.canvas;
    let start = null;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey && this.zoom.scale === 1 && event.deltaY > 0) return; // the page scrolls
      event.preventDefault();
      const { u, v } = this.under(event);
      this.zoomBy(event.deltaY < 0 ? 1.2 : 1 / 1.2, u, v);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (!this.shown) return;
      canvas.setPointerCapture(event.pointerId);
      start = { ...this.under(event), zoom: { ...this.zoom }, moved: false };
      if (this.mode === "caliper") this.calipers.push({ from: [start.column, start.depth], to: [start.column, start.depth], slice: this.shown.slice });
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.shown) return;
      const now = this.under(event);
      this.tell(now);
      if (!start) return;
      start.moved ||= Math.hypot(now.u - start.u, now.v - start.v) > 0.008;
      if (this.mode === "caliper") this.calipers.at(-1).to = [now.column, now.depth];
      else if (start.moved && this.zoom.scale > 1) {
        const room = 1 - 1 / this.zoom.scale;
        const held = (value) => Math.max(0, Math.min(room, value));
        Object.assign(this.zoom, { x: held(start.zoom.x - (now.u - start.u) / this.zoom.scale), y: held(start.zoom.y - (now.v - start.v) / this.zoom.scale) });
      }
      this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (start && !start.moved && this.mode !== "caliper") {
        const { column, depth } = this.under(event);
        this.go({ column, depth });
        if (this.layer.value === "similarity") this.pickToken().catch(() => {});
      } else if (start && !start.moved) this.calipers.pop();
      start = null;
      this.draw();
    });
    const clicked = (part, act) => part.canvas.addEventListener("click", (event) => {
      const box = part.canvas.getBoundingClientRect();
      if (this.facts) act((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height, this.facts.shape);
    });
    clicked(this.cross, (u, v, [slices, depth]) => this.go({ slice: u * slices - 0.5, depth: v * depth - 0.5 }));
    clicked(this.face, (u, v, [slices, , columns]) => {
      if (this.plane.value === "localizer") return;
      const place = [(this.flipped ? 1 - v : v) * slices - 0.5, u * columns - 0.5];
      if (this.mode === "centre") {
        this.choose("centre");
        this.measureThickness(place.map((value) => Math.max(0, value)));
      } else this.go({ slice: place[0], column: place[1] });
    });
  }

  tell({ column, depth }) {
    const [, rows, columns] = this.facts.shape;
    const [dz, dy, dx] = this.facts.spacing_mm;
    const [c, d, s] = [Math.round(column), Math.round(depth), this.shown.slice];
    if (c < 0 || d < 0 || c >= columns || d >= rows) return;
    if (!this.levels) {
      const copy = new OffscreenCanvas(columns, rows).getContext("2d", { willReadFrequently: true });
      copy.drawImage(this.shown.scan, 0, 0);
      this.levels = copy.getImageData(0, 0, columns, rows).data;
    }
    const mm = [s * dz, d * dy, c * dx].map((value) => value.toFixed(2)).join(", ");
    this.readout.textContent = `slice ${s + 1}, depth ${d + 1}, column ${c + 1} · ${mm} mm · intensity ${this.levels[4 * (d * columns + c)]}`;
  }
}
