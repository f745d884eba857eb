// The scan as it came: three orthogonal planes in true proportions with zoom, calipers, read-out, surfaces and overlays.
import { draw } from "/native_drawing.js";
import { pointers, zoomBy } from "/native_pointers.js";
import { json, make, picture, plain, PLANES, titleOf } from "/parts.js";

const SENTENCES = {
  tokens: "Three principal components of the tissue tokens as red, green and blue. Like colours are like features.",
  tubes: "Blue: seen. Orange: to be predicted. Grey: hidden, no target. Dark: left out.",
  labels: "As the graders marked it.", segmentation: "As the segmentation head predicts it.",
};
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
    pointers(this);
    new ResizeObserver(() => draw(this)).observe(planes);
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
    field("surfaces", "checkbox", "Layers", { checked: true }).addEventListener("input", () => draw(this));
    field("etdrs", "checkbox", "ETDRS grid", { checked: true }).addEventListener("input", () => draw(this));
    field("contrast", "range", "Contrast", { min: 0.5, max: 3, step: 0.1, value: 1 }).addEventListener("input", () => draw(this));
    this.stretch = field("stretch", "select", "Depth", {});
    this.stretch.append(...[1, 2, 3].map((times) => new Option(times === 1 ? "true" : `× ${times}`, times)));
    this.stretch.addEventListener("input", () => draw(this));
    button("in", "Zoom in", () => zoomBy(this, 1.5, 0.5, 0.5));
    button("out", "Zoom out", () => zoomBy(this, 1 / 1.5, 0.5, 0.5));
    this.caliper = button("caliper", "Measure", () => this.choose("caliper"));
    this.centre = button("centre", "Centre ETDRS", () => this.choose("centre"));
    button("clear", "Clear", () => { this.calipers = []; this.choose(""); this.zoom = { scale: 1, x: 0, y: 0 }; draw(this); });
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
  get flipped() { return (this.etdrsFacts?.superior ?? 0) > 0; }

  get url() { return `/volumes/${this.row.id}/native`; }

  // The B-scan that can be had before the whole file is read and checked, if there is one.
  async begin(row) {
    const zoom = { scale: 1, x: 0, y: 0 };
    Object.assign(this, { row, facts: null, etdrsFacts: null, shown: null, calipers: [], token: null, grid: null, classes: null, zoom, begun: false });
    this.heading.textContent = `The scan as it came: ${titleOf(row)}`;
    this.status.textContent = "Reading the file …";
    this.body.hidden = true;
    try {
      const { slice } = await json(`${this.url}/first`);
      if (slice === null || this.row !== row) return;
      const [scan, lines] = await Promise.all([picture(`${this.url}/first.png`), json(`${this.url}/surfaces/slice/${slice}`)]);
      if (this.row !== row) return;
      const shape = row.axes.map((axis) => axis.count);
      Object.assign(this, { facts: { shape, spacing_mm: row.axes.map((axis) => axis.spacing_mm) }, begun: true });
      this.place = { slice, depth: Math.floor(shape[1] / 2), column: Math.floor(shape[2] / 2) };
      this.slider.max = shape[0] - 1;
      this.slider.value = slice;
      this.number.textContent = `${slice + 1} of ${shape[0]}`;
      this.shown = { scan, lines, slice };
      this.levels = null;
      this.status.textContent = "The first B-scan; the whole file is being read and checked …";
      this.body.hidden = false;
      draw(this);
    } catch {
      if (this.row === row) this.begun = false; // the whole file tells the reason
    }
  }

  async open(row) {
    await this.begin(row);
    if (this.row === row) await this.finish(row);
  }

  async finish(row) {
    try {
      const facts = await json(this.url);
      if (this.row !== row) return;
      if (facts.reason) throw new Error(facts.reason);
      Object.assign(this, { facts, etdrsFacts: facts.etdrs });
    } catch (error) {
      if (this.row !== row) return;
      this.status.textContent = `Not shown: ${error.message}`;
      this.body.hidden = true;
      return;
    }
    const [slices, depth, columns] = this.facts.shape;
    const [dz, dy, dx] = this.facts.spacing_mm.map((mm) => 1000 * mm);
    const unsure = this.facts.uncertain.length ? `; spacing uncertain: ${this.facts.uncertain.join(", ")}` : "";
    this.status.textContent = `${slices} B-scans of ${depth} x ${columns} samples, ${dz.toFixed(0)} x ${dy.toFixed(2)} x ${dx.toFixed(1)} µm${unsure}`;
    this.slider.max = slices - 1;
    if (!this.begun) this.place = { slice: this.facts.opening_slice, depth: Math.floor(depth / 2), column: Math.floor(columns / 2) };
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
      draw(this);
      const [cross, crossLines, face, thick] = await Promise.all([
        picture(`${url}/column/${column}.png`), json(`${url}/surfaces/column/${column}`), picture(`${url}/${front}`),
        kind === "thickness" ? picture(`${url}/thickness.png`) : null,
      ]);
      if (!current()) return;
      Object.assign(this.shown, { cross, crossLines, face, thick, kind });
      draw(this);
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
    if (!layer) return draw(this);
    try {
      if (layer === "similarity" && !this.token) {
        this.legend.textContent = "Click on tissue in the B-scan: its token is compared with all others.";
        return draw(this);
      }
      if (layer === "similarity") this.legend.textContent = `Cosine similarity to the token clicked: violet ${this.token.low}, yellow ${this.token.high}.`;
      const query = layer === "similarity" ? `?token=${this.token.token}` : "";
      const grid = await picture(`${this.url}/overlay/${layer}/${slice}.png${query}`);
      const classes = this.about.voxel_layers.includes(layer) ? await json(`${this.url}/classes/${layer}`) : null;
      if (!current()) return;
      this.grid = { picture: grid, slice };
      if (classes) this.showClasses(classes);
      draw(this);
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
      draw(this);
    } catch (error) {
      if (this.row === row) this.sectors.replaceChildren(make("p", `No thickness: ${error.message}`, "soft"));
    }
  }
}
