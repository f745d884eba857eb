// The volume as the store holds it: one slice with its band and an overlay, and the view from the front. A picture is
// kept with the number of its slice, so that band and overlay are never drawn on another slice.
import { at, make, strokeLine } from "/parts.js";

const SHOWN_ASPECT = 0.62; // height over width of a B-scan, unless true proportions are chosen
const SENTENCES = {
  tokens: "Three principal components of the tissue tokens as red, green and blue. Like colours are like features, in all volumes alike; the colours themselves mean nothing. Clear: no tissue, or not among the tokens that the encoder is given.",
  mask: "A sample of this mask family on the centred view:",
};

export class StoredView {
  // `shown` has the panels. `changed()` is called when slice or overlay were chosen.
  constructor(about, shown, changed) {
    Object.assign(this, { about, shown, changed, slice: null, scan: null, face: null, band: null, grid: null, linked: false, moved: false });
    const legend = at("legend");
    const box = make("div");
    legend.replaceWith(box);
    box.append(legend);
    this.panels = {
      scan: shown.panel("stored-scan", at("scan").parentElement, () => { Object.assign(this, { scan: null, band: null }); this.draw(); }),
      face: shown.panel("stored-face", at("face").parentElement, () => { this.face = null; this.draw(); }),
      overlay: shown.panel("stored-overlay", box, () => { this.grid = null; legend.replaceChildren(); this.draw(); }, "Overlay"),
    };
    at("slice").max = about.shape[0] - 1;
    at("slice").addEventListener("input", () => this.go(Number(at("slice").value)));
    for (const id of ["band", "contrast", "true"]) at(id).addEventListener("input", () => this.draw());
    at("layer").addEventListener("input", () => this.overlay());
    at("face").addEventListener("click", (event) => {
      const box = at("face").getBoundingClientRect();
      this.go(Math.floor(((event.clientY - box.top) / box.height) * about.shape[0]));
    });
    at("contrast").parentElement.hidden = !("filter" in CanvasRenderingContext2D.prototype);
    this.offer();
  }

  offer() {
    const [layer, chosen] = [at("layer"), at("layer").value];
    const names = this.about.layers.filter((name) => name !== "similarity");
    layer.replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name === "tokens" ? "token map" : `mask: ${name}`, name)));
    if (names.includes(chosen)) layer.value = chosen;
    layer.parentElement.hidden = !names.length;
  }

  // For a volume that `shown` has just opened.
  async open() {
    this.slice = Math.min(this.slice ?? Math.floor(this.about.shape[0] / 2), this.about.shape[0] - 1);
    this.panels.face.fill(async (read) => {
      const face = await read.picture("/en_face.png");
      return () => { this.face = face; this.draw(); };
    });
    await Promise.all([this.load(true), this.overlay()]);
  }

  go(slice, moved = true) {
    this.moved ||= moved;
    this.slice = Math.max(0, Math.min(this.about.shape[0] - 1, slice));
    this.changed();
    this.draw();
    this.load();
  }

  // The chosen slice. When a volume is opened, the slice may be one without tissue: then the central slice is shown.
  load(opening = false) {
    return this.panels.scan.fill(async (read) => {
      const [band, centre] = await Promise.all([this.band ?? read.json("/band"), opening ? read.json("/central") : null]);
      let { slice } = this;
      if (opening) {
        const blank = !band[0][slice].some((index) => index >= 0);
        if (!this.linked && (!this.moved || blank)) slice = centre;
        this.linked = false;
      }
      const picture = await read.picture(`/slices/${slice}.png`);
      return () => {
        Object.assign(this, { band, slice, scan: { picture, slice } });
        this.draw();
        if (opening) this.changed();
        const { reading } = this.shown;
        for (const near of [slice + 1, slice - 1]) if (near >= 0 && near < this.about.shape[0]) reading.picture(`/slices/${near}.png`).catch(() => {});
      };
    });
  }

  // The chosen layer over all slices of the volume.
  overlay() {
    const layer = at("layer").value;
    this.changed();
    if (!layer) return this.panels.overlay.empty("empty");
    return this.panels.overlay.fill(async (read) => {
      const grid = await read.picture(`/grid/${layer}.png`);
      return () => { this.grid = grid; this.legend(layer); this.draw(); };
    }, true);
  }

  legend(layer) {
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

  draw() {
    const { about, band, grid } = this;
    const scan = this.scan && this.scan.picture;
    const slice = this.scan ? this.scan.slice : this.slice; // what is drawn goes with the picture that is there
    const [depth, height, width] = about.shape;
    const [dz, dy, dx] = about.spacing_mm;
    at("slice").value = this.slice;
    at("number").textContent = this.slice === null ? "" : `${this.slice + 1} of ${depth}`;
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
      for (const edge of band) strokeLine(pen, edge[slice].map((index, column) => (index < 0 ? null : [(column + 0.5) * sx, (index + 0.5) * sy])));
    }
    at("scan-caption").textContent = !scan ? "" : at("true").checked
      ? "B-scan as stored: flattened along Bruch’s membrane."
      : `B-scan as stored: flattened along Bruch’s membrane, drawn ${(SHOWN_ASPECT / truly).toFixed(1)} times as high as it is.`;
    this.drawFace(depth, width, (depth * dz) / (width * dx));
  }

  drawFace(depth, width, aspect) {
    const canvas = at("face");
    canvas.width = 600;
    canvas.height = Math.round(600 * aspect);
    const pen = canvas.getContext("2d");
    if (!this.face) return;
    pen.drawImage(this.face, 0, 0, canvas.width, canvas.height);
    pen.strokeStyle = "#35d0a5";
    pen.lineWidth = 2;
    const y = ((this.slice + 0.5) / depth) * canvas.height;
    strokeLine(pen, [[0, y], [canvas.width, y]]);
  }
}
