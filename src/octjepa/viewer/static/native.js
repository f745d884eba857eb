// The scan in its own geometry: three orthogonal planes in true proportions with zoom, calipers, read-out, surfaces and
// overlays. `held` has what the panels draw: bscan, cross, face, grid, token, levels. Panels fill and clear it.
import { Corrections } from "/native_corrections.js";
import { draw } from "/native_drawing.js";
import { pointers, zoomBy } from "/native_pointers.js";
import { sectorTable } from "/native_sectors.js";
import { blank, make, plain, PLANES, titleOf } from "/parts.js";

const SENTENCES = {
  tokens: "Three principal components of the tissue tokens as red, green and blue. Like colours are like features.",
  mask: "Blue: seen. Orange: to be predicted. Grey: hidden, no target. Dark: left out.",
  pick: "Click on tissue in the B-scan: its token is compared with all others.",
};

export class NativePane {
  // `shown` has the panels. `moved(pane)` is called when the planes of a place are drawn.
  constructor(root, about, shown, moved) {
    Object.assign(this, { root, about, shown, moved, row: null, facts: null, held: {}, calipers: [], mode: "", zoom: { scale: 1, x: 0, y: 0 } });
    const file = make("div", undefined, "soft state");
    root.append(this.heading = make("h3"), file);
    file.append(this.status = make("p"));
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
    const [first, legend, sectors] = [make("div"), make("div"), make("div", undefined, "sectors")];
    legend.append(this.legend = make("p", "", "soft legend"));
    sectors.append(this.table = make("div"));
    first.append(this.scan.figure, this.readout, legend, sectors);
    planes.append(first, side);
    this.body.append(planes);
    this.panels = {
      file: shown.panel("file", file, () => { this.status.textContent = ""; this.facts = null; }),
      bscan: shown.panel("bscan", this.scan.figure, () => { this.clearPlane("bscan", this.scan); this.readout.textContent = ""; }),
      cross: shown.panel("cross", this.cross.figure, () => this.clearPlane("cross", this.cross)),
      face: shown.panel("face", this.face.figure, () => this.clearPlane("face", this.face)),
      overlay: shown.panel("overlay", legend, () => { this.legend.replaceChildren(); this.held.grid = null; draw(this); }, "Overlay"),
      sectors: shown.panel("sectors", sectors, () => this.table.replaceChildren(), "Thickness"),
    };
    this.corrections = about.corrections ? new Corrections(this, this.toolbox) : null;
    if (this.corrections) this.panels.corrections = shown.panel("corrections", this.corrections.box, () => { this.corrections.begin(); }, "Corrections");
    pointers(this);
    new ResizeObserver(() => draw(this)).observe(planes);
  }

  clearPlane(name, { canvas, caption }) {
    this.held[name] = null;
    blank(canvas);
    caption.textContent = "";
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
    field("plane", "select", "Map").addEventListener("input", () => this.load());
    field("thick", "select", "Thickness of").addEventListener("input", () => this.measureThickness(this.centred).then(() => this.load()));
    this.thick.append(...this.about.retinal_layers.map((name) => new Option(plain(name), name)));
    field("surfaces", "checkbox", "Layers", { checked: true }).addEventListener("input", () => draw(this));
    field("etdrs", "checkbox", "ETDRS grid", { checked: true }).addEventListener("input", () => draw(this));
    field("contrast", "range", "Contrast", { min: 0.5, max: 3, step: 0.1, value: 1 }).addEventListener("input", () => draw(this));
    this.stretch = field("stretch", "select", "Depth", {});
    this.stretch.append(...[1, 2, 3].map((times) => new Option(times === 1 ? "true" : `× ${times}`, times)));
    this.stretch.value = "2"; // layers are hard to see in true proportions
    this.stretch.addEventListener("input", () => draw(this));
    button("in", "Zoom in", () => zoomBy(this, 1.5, 0.5, 0.5));
    button("out", "Zoom out", () => zoomBy(this, 1 / 1.5, 0.5, 0.5));
    this.caliper = button("caliper", "Measure", () => this.choose("caliper"));
    this.centre = button("centre", "Centre ETDRS", () => this.choose("centre"));
    button("clear", "Clear", () => { this.calipers = []; this.choose(""); this.zoom = { scale: 1, x: 0, y: 0 }; draw(this); });
    this.toolbox = tools;
    this.body.append(tools);
  }

  choose(mode) {
    this.mode = this.mode === mode ? "" : mode;
    const buttons = { caliper: this.caliper, centre: this.centre, ...(this.corrections && { correct: this.corrections.start }) };
    for (const [name, button] of Object.entries(buttons)) button.setAttribute("aria-pressed", String(this.mode === name));
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
  get flipped() { return (this.facts?.superior ?? 0) > 0; }

  // For a volume that `shown` has just opened. With `quiet`, `moved` is called only after the user moves.
  begin(row, quiet = false) {
    Object.assign(this, { row, quiet, facts: null, held: {}, calipers: [], centred: null, zoom: { scale: 1, x: 0, y: 0 }, begun: false });
    this.heading.textContent = `The scan as it came: ${titleOf(row)}`;
    this.number.textContent = "";
    this.body.hidden = false;
    for (const field of [this.slider, this.layer, this.plane, this.thick]) field.disabled = true;
  }

  // The B-scan that is available before the whole file is read and checked, if there is one.
  first() {
    return this.panels.bscan.fill(async (read) => {
      const { row } = this;
      try {
        const { slice } = await read.json("/native/first");
        if (slice === null) return null;
        const picture = await read.picture("/native/first.png");
        return () => {
          const shape = row.axes.map((axis) => axis.count);
          this.facts = { shape, spacing_mm: row.axes.map((axis) => axis.spacing_mm) };
          Object.assign(this, { begun: true, place: { slice, depth: Math.floor(shape[1] / 2), column: Math.floor(shape[2] / 2) } });
          this.countSlices();
          this.panels.file.tell("The first B-scan; the whole file is being read and checked …");
          Object.assign(this.held, { bscan: { picture, lines: [], slice }, levels: null });
          draw(this);
        };
      } catch {
        read.check();
        return null; // the whole file tells the reason
      }
    });
  }

  async finish() {
    const { file } = this.panels;
    const wanted = await file.fill(async (read) => {
      const facts = await read.json("/native").catch((error) => {
        read.check();
        return { reason: error.message };
      });
      if (facts.reason) throw new Error(`Not shown: ${facts.reason}`);
      return () => this.showFacts(facts);
    });
    if (!wanted) return;
    if (!this.facts?.layers) {
      for (const panel of Object.values(this.panels)) if (panel !== file) panel.empty("failed", "Not shown");
      this.body.hidden = true;
      return;
    }
    await this.load();
    if (!await this.measureThickness()) return;
    const correct = this.corrections && this.panels.corrections.fill((read) => this.corrections.offer(read));
    await Promise.all([this.load(true), this.overlay(), correct]); // now with all boundaries, the thickness map and fluid
  }

  showFacts(facts) {
    this.facts = facts;
    const [slices, depth, columns] = facts.shape;
    const [dz, dy, dx] = facts.spacing_mm.map((mm) => 1000 * mm);
    const unsure = facts.uncertain.length ? `; spacing uncertain: ${facts.uncertain.join(", ")}` : "";
    this.status.textContent = `${slices} B-scans of ${depth} x ${columns} samples, ${dz.toFixed(0)} x ${dy.toFixed(2)} x ${dx.toFixed(1)} µm${unsure}`;
    if (!this.begun) this.place = { slice: facts.opening_slice, depth: Math.floor(depth / 2), column: Math.floor(columns / 2) };
    this.countSlices();
    this.offer(this.layer, [...facts.layers.map((name) => [name, plain(name)]), ["", "none"]]);
    this.thick.disabled = false;
    this.offer(this.plane, PLANES.filter(([name]) => name !== "localizer" || facts.localizer));
  }

  // New choices of a field; what was chosen for the volume before stays chosen if this one has it.
  offer(select, choices) {
    const before = select.options.length ? select.value : null;
    select.replaceChildren(...choices.map(([name, text]) => new Option(text, name)));
    if (choices.some(([name]) => name === before)) select.value = before;
    select.disabled = false;
  }

  countSlices() {
    this.slider.max = this.facts.shape[0] - 1;
    this.slider.value = this.place.slice;
    this.slider.disabled = false;
    this.number.textContent = `${this.place.slice + 1} of ${this.facts.shape[0]}`;
  }

  go(place) {
    if (!this.facts) return;
    this.quiet = false;
    const limits = this.facts.shape;
    ["slice", "depth", "column"].forEach((axis, number) => {
      const value = place[axis] ?? this.place[axis];
      this.place[axis] = Math.max(0, Math.min(limits[number] - 1, Math.round(value)));
    });
    this.load();
    this.overlay(false);
  }

  // The three planes at the chosen place, the B-scan first. With `anew` also what is drawn already.
  async load(anew = false) {
    const { slice, depth, column } = this.place;
    this.countSlices();
    draw(this);
    const wanted = await this.panels.bscan.fill(async (read) => {
      const [picture, lines] = await Promise.all([read.picture(`/native/slice/${slice}.png`), read.json(`/native/surfaces/slice/${slice}`)]);
      return () => {
        Object.assign(this.held, { bscan: { picture, lines, slice }, levels: null });
        draw(this);
        this.corrections?.show();
      };
    });
    if (!wanted || !this.facts.layers) return; // the file is still being read
    const kind = this.plane.value || "face";
    const done = await Promise.all([this.loadCross(column, anew), this.loadFace(kind, depth, anew)]);
    if (!done.every(Boolean)) return;
    if (!this.quiet) this.moved(this);
    const { reading } = this.shown;
    for (const near of [slice + 1, slice - 1]) if (near >= 0 && near < this.facts.shape[0]) reading.picture(`/native/slice/${near}.png`).catch(() => {});
  }

  loadCross(column, anew) {
    if (this.held.cross?.column === column && !anew) return true;
    return this.panels.cross.fill(async (read) => {
      const [picture, lines] = await Promise.all([read.picture(`/native/column/${column}.png`), read.json(`/native/surfaces/column/${column}`)]);
      return () => { this.held.cross = { picture, lines, column }; draw(this); };
    });
  }

  // The map of thickness waits for the layers, and says so until they are found.
  loadFace(kind, depth, anew) {
    const { face } = this.held;
    const layer = this.thick.value;
    const mapped = kind === "thickness" ? this.facts.etdrs : null;
    if (kind === "thickness" && !mapped) return this.panels.sectors.node.dataset.state !== "failed" || this.withoutLayers() === undefined;
    if (!anew && face?.kind === kind && (kind !== "depth" || face.depth === depth) && (!mapped || face.thick.layer === layer)) return true;
    const path = { face: "face.png", thickness: "face.png", depth: `depth/${depth}.png`, localizer: "localizer.png" }[kind];
    return this.panels.face.fill(async (read) => {
      const [picture, thick] = await Promise.all([read.picture(`/native/${path}`), mapped ? read.picture(`/native/thickness.png?layer=${layer}`) : null]);
      return () => {
        this.held.face = { picture, thick: thick && { picture: thick, layer, low_um: mapped.low_um, high_um: mapped.high_um }, kind, depth };
        draw(this);
      };
    }, face?.kind !== kind);
  }

  // The chosen layer over the chosen B-scan. With `anew` what is drawn is cleared at once. With `pick` the token at the
  // chosen place is compared with the others.
  overlay(anew = true, pick = false) {
    const [layer, { slice, depth, column }] = [this.layer.value, this.place];
    if (!layer || !this.facts?.layers) return this.panels.overlay.empty("empty");
    if (layer === "fluid" && !this.facts.etdrs) return null; // its panel is being read until the layers are found
    return this.panels.overlay.fill(async (read) => {
      let { token } = this.held;
      if (layer === "similarity" && pick) {
        token = (await read.json(`/native/place/${slice}/${depth}/${column}`)).similarity;
        if (!token) return () => { this.held.token = null; this.legend.textContent = "There is no tissue token at this place."; };
      }
      if (layer === "similarity" && !token) return () => { this.legend.textContent = SENTENCES.pick; };
      const query = layer === "similarity" ? `?token=${token.token}` : "";
      const classes = this.about.voxel_layers.includes(layer);
      const [picture, legend] = await Promise.all([
        read.picture(`/native/overlay/${layer}/${slice}.png${query}`), classes ? read.json(`/native/classes/${layer}`) : null,
      ]);
      return () => {
        Object.assign(this.held, { grid: { picture, slice }, token });
        this.showLegend(layer, legend);
        draw(this);
      };
    }, anew || pick);
  }

  showLegend(layer, legend) {
    const { token } = this.held;
    const similar = token && `Cosine similarity to the token clicked: violet ${token.low}, yellow ${token.high}.`;
    this.legend.textContent = legend ? legend.caption : layer === "similarity" ? similar : SENTENCES[layer] || SENTENCES.mask;
    for (const { name, colour } of legend ? legend.classes : []) {
      const swatch = make("span", "", "swatch");
      swatch.style.background = `rgb(${colour.join(" ")})`;
      this.legend.append(swatch, plain(name));
    }
  }

  // Thickness in the ETDRS sectors about `centre` (slice, column), once the layers are found: until then the panel says
  // how far they are. Resolves to whether there is a result.
  async measureThickness(centre = null) {
    const { row } = this;
    this.centred = centre;
    const { sectors } = this.panels;
    const wanted = await sectors.fill(async (read) => {
      for (let state; (state = await read.json("/native/layers")).state !== "ready"; await new Promise((done) => { setTimeout(done, 400); })) {
        if (state.state === "failed") throw new Error(`not found: ${state.reason}`);
        sectors.tell(`Layers are being found: B-scan ${state.done} of ${state.total} …`);
      }
      const query = new URLSearchParams({ layer: this.thick.value, ...(centre && { slice_index: centre[0], column: centre[1] }) });
      const found = await read.json(`/native/etdrs?${query}`);
      return () => {
        this.facts.etdrs = found;
        this.table.replaceChildren(sectorTable(row, found, this.facts.vertical_known));
        draw(this);
      };
    }, true);
    if (wanted && !this.facts?.etdrs) this.withoutLayers();
    return wanted && Boolean(this.facts?.etdrs);
  }

  // The layers cannot be found: panels that wait for them say so.
  withoutLayers() {
    if (this.layer.value === "fluid") this.panels.overlay.empty("failed", "no layers and no fluid");
    if (this.plane.value === "thickness") this.panels.face.empty("failed", "No thickness map");
    this.panels.corrections?.empty("failed", "no layers");
  }
}
