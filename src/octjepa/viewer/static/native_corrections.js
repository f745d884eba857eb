// Corrects the boundaries of the shown B-scan by hand and saves them as labels. Only with `octjepa view --corrections`.
//
// Pointer: drag to draw the chosen boundary, click to choose the nearest one. Keys on the B-scan: left and right move
// the column, up and down the boundary there, [ and ] choose a boundary, Enter saves, u undoes, Escape ends. What is not
// saved yet is held for each B-scan of each volume until the page is closed.
import { nearest, nudged, stroked } from "/boundary_edit.js";
import { draw } from "/native_drawing.js";
import { make } from "/parts.js";
import { forgetPictures } from "/shown.js";

const key = new URLSearchParams(location.search).get("key") ?? ""; // without it the server writes nothing
const MOST_UNDO = 100;

export class Corrections {
  constructor(pane, tools) {
    Object.assign(this, { pane, boundary: 0, drafts: new Map(), saved: [] });
    this.start = make("button", "Correct", "native-correct");
    this.start.type = "button";
    this.start.disabled = true;
    this.start.addEventListener("click", () => { pane.choose("correct"); this.show(); });
    this.box = make("div", undefined, "tools corrections");
    const label = make("label", "Boundary ");
    this.select = make("select", undefined, "native-boundary");
    this.select.append(...pane.about.boundaries.map(({ name }, number) => new Option(name, number)));
    this.select.addEventListener("input", () => this.choose(Number(this.select.value)));
    label.append(this.select);
    const button = (name, text, act) => {
      const made = make("button", text, `native-${name}`);
      made.type = "button";
      made.addEventListener("click", act);
      return made;
    };
    this.undoing = button("undo", "Undo", () => this.undo());
    this.discarding = button("discard", "Discard changes", () => this.discard());
    this.saving = button("save", "Save this B-scan", () => this.save());
    this.removing = button("remove", "Remove saved", () => this.remove());
    this.state = make("output", "", "corrections-state");
    this.box.append(label, this.undoing, this.discarding, this.saving, this.removing, this.state);
    this.box.hidden = true;
    tools.append(this.start);
    tools.after(this.box);
    const { canvas } = pane.scan ?? {};
    addEventListener("beforeunload", (event) => { if (this.drafts.size) event.preventDefault(); });
    if (canvas) this.listen(canvas);
  }

  listen(canvas) {
    canvas.tabIndex = 0;
    canvas.addEventListener("keydown", (event) => {
      if (!this.active || event.ctrlKey || event.metaKey || event.altKey) return;
      const far = event.shiftKey ? 10 : 1;
      const acts = {
        ArrowLeft: () => this.moveColumn(-far), ArrowRight: () => this.moveColumn(far),
        ArrowUp: () => this.nudge(-far / 2), ArrowDown: () => this.nudge(far / 2),
        "[": () => this.choose(this.boundary - 1), "]": () => this.choose(this.boundary + 1),
        Enter: () => this.save(), u: () => this.undo(), Escape: () => { this.pane.choose("correct"); this.show(); },
      };
      if (!acts[event.key]) return;
      event.preventDefault();
      event.stopPropagation(); // the page would turn to another B-scan
      acts[event.key]();
    });
  }

  get active() { return this.pane.mode === "correct" && this.lines !== null; }

  get draftName() { return `${this.pane.row.id}/${this.pane.held.bscan.slice}`; }

  // The boundaries that are drawn: those that the user changed, or those of the server. Null before all eight are found.
  get lines() {
    const { bscan } = this.pane.held;
    if (!bscan || bscan.lines.length !== this.pane.about.boundaries.length) return null;
    return this.drafts.get(this.draftName)?.lines ?? bscan.lines;
  }

  // For a volume that has just been opened: nothing is known of it.
  begin() {
    this.saved = [];
    this.start.disabled = true;
    if (this.pane.mode === "correct") this.pane.choose("correct");
    this.show();
  }

  // Once the layers are found.
  async offer(read) {
    const { slices } = await read.json("/native/corrections");
    return () => {
      this.saved = slices;
      this.start.disabled = false;
      this.show();
    };
  }

  show() {
    this.box.hidden = this.pane.mode !== "correct";
    if (this.box.hidden || !this.pane.held.bscan) return;
    const { slice } = this.pane.held.bscan;
    const draft = this.drafts.get(this.draftName);
    this.undoing.disabled = this.discarding.disabled = !draft;
    this.removing.disabled = !this.saved.includes(slice);
    const saved = this.saved.length ? `Saved B-scans: ${this.saved.map((number) => number + 1).join(", ")}.` : "No B-scan is saved yet.";
    this.state.textContent = `${draft ? "Changed, not saved. " : ""}${saved} Saving says that all eight boundaries are right.`;
    draw(this.pane);
  }

  choose(boundary) {
    this.boundary = Math.max(0, Math.min(this.pane.about.boundaries.length - 1, boundary));
    this.select.value = this.boundary;
    draw(this.pane);
  }

  change(lines, isNewStroke = true) {
    const draft = this.drafts.get(this.draftName) ?? { undo: [] };
    if (isNewStroke) draft.undo = [...draft.undo, this.lines].slice(-MOST_UNDO);
    draft.lines = lines;
    this.drafts.set(this.draftName, draft);
    this.show();
  }

  // The pointer goes from one place to the next. The first part of a stroke can be undone with all that follows.
  stroke(from, to, isNewStroke) {
    this.change(stroked(this.lines, this.boundary, from, to, this.pane.facts.shape[1]), isNewStroke);
  }

  click(place) {
    const chosen = nearest(this.lines, place);
    if (chosen !== null) this.choose(chosen);
    this.pane.scan.canvas.focus();
    this.moveColumn(Math.round(place.column) - this.pane.place.column);
  }

  moveColumn(by) {
    const { place, facts } = this.pane;
    place.column = Math.max(0, Math.min(facts.shape[2] - 1, place.column + by));
    draw(this.pane);
  }

  nudge(by) {
    this.change(nudged(this.lines, this.boundary, this.pane.place.column, by, this.pane.facts.shape[1]));
  }

  undo() {
    const draft = this.drafts.get(this.draftName);
    if (!draft) return;
    draft.lines = draft.undo.pop();
    if (!draft.undo.length) this.drafts.delete(this.draftName);
    this.show();
  }

  discard() {
    this.drafts.delete(this.draftName);
    this.show();
  }

  save() {
    return this.write("POST", { rows: this.lines.map((line) => line.map((row) => (row === null ? null : Math.round(100 * row) / 100))) });
  }

  remove() {
    return this.write("DELETE");
  }

  async write(method, body) {
    const { pane, draftName } = this;
    const { slice } = pane.held.bscan;
    const sent = body && this.lines;
    const reading = pane.shown.reading.newest("correction");
    this.state.textContent = "Saving …";
    try {
      const { slices } = await reading.write(`/native/corrections/${slice}`, method, key, body);
      this.saved = slices;
      // The next stroke starts from the saved rows. A stroke that was drawn while the server saved stays a draft.
      if (sent && pane.held.bscan?.slice === slice) pane.held.bscan.lines = body.rows;
      if (sent && this.drafts.get(draftName)?.lines === sent) this.drafts.delete(draftName);
      forgetPictures(); // thickness maps are of the boundaries before
      this.show();
      await pane.measureThickness(pane.centred);
      await pane.load(true);
      this.show();
    } catch (error) {
      if (reading.current) this.state.textContent = `Not saved: ${error.message}`;
    }
  }
}
