// The volume as the store holds it: one slice with its band and an overlay, and the view from the front. A picture is
// kept with the number of its slice, so that band and overlay are never drawn on another one.
import { at, json, make, picture, say, strokeLine } from "/parts.js";

const SHOWN_ASPECT = 0.62; // height over width of a B-scan, unless true proportions are chosen
const SENTENCES = {
  tokens: "Three principal components of the tissue tokens as red, green and blue. Like colours are like features, in all volumes alike; the colours themselves mean nothing. Clear: no tissue, or not among the tokens that the encoder is given.",
  mask: "The fixed validation sample under this mask family:",
};

export class StoredView {
  constructor(about, changed) {
    Object.assign(this, { about, changed, row: null, slice: null, scan: null, face: null, band: null, grid: null, linked: false, moved: false });
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

  async open(row) {
    this.row = row;
    this.slice = Math.min(this.slice ?? Math.floor(this.about.shape[0] / 2), this.about.shape[0] - 1);
    Object.assign(this, { scan: null, face: null, band: null, grid: null });
    this.draw();
    try {
      const volume = `/volumes/${row.id}`;
      const [band, face, centre] = await Promise.all([
        json(`${volume}/band`), picture(`${volume}/en_face.png`), json(`${volume}/central`),
      ]);
      if (this.row !== row) return;
      Object.assign(this, { band, face });
      const empty = !band[0][this.slice].some((index) => index >= 0);
      if (!this.linked && (!this.moved || empty)) this.slice = centre;
      this.linked = false;
      say(null);
      await Promise.all([this.load(), this.overlay()]);
    } catch (error) {
      if (this.row === row) say(error);
    }
  }

  go(slice, moved = true) {
    this.moved ||= moved;
    this.slice = Math.max(0, Math.min(this.about.shape[0] - 1, slice));
    this.changed();
    this.draw();
    this.load();
  }

  async load() {
    const [row, slice] = [this.row, this.slice];
    try {
      const scan = await picture(`/volumes/${row.id}/slices/${slice}.png`);
      if (this.row !== row || this.slice !== slice) return;
      this.scan = { picture: scan, slice };
      say(null);
      this.draw();
      for (const near of [slice + 1, slice - 1]) {
        if (near >= 0 && near < this.about.shape[0]) picture(`/volumes/${row.id}/slices/${near}.png`).catch(() => {});
      }
    } catch (error) {
      if (this.row === row && this.slice === slice) say(error);
    }
  }

  async overlay() {
    const [row, layer] = [this.row, at("layer").value];
    const current = () => this.row === row && at("layer").value === layer;
    this.grid = null;
    this.changed();
    this.legend(layer);
    if (layer) {
      try {
        const grid = await picture(`/volumes/${row.id}/grid/${layer}.png`);
        if (!current()) return;
        this.grid = grid;
        say(null);
      } catch (error) {
        if (current()) say(error);
      }
    }
    this.draw();
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
    at("number").textContent = `${this.slice + 1} of ${depth}`;
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
    at("scan-caption").textContent = at("true").checked
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
