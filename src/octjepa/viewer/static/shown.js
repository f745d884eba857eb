// Keeps what the page shows of a volume apart from every other volume. All requests of the page go through this file.
//
// A `Shown` is a part of the page that shows one volume at a time. `Shown.open` ends every request for the previous
// volume and clears all panels at once, before anything of the new volume is there. A `Reading` requests answers about
// one volume. It accepts an answer only if the server names that volume in it, and only as long as the volume is
// shown: otherwise the awaited answer throws, so no code after the `await` runs. A `Panel` is the only way to draw.
import { at, make } from "/parts.js";

const ANSWER_OF = "X-Octjepa-Volume"; // the header in which the server names the volume of an answer
const MOST_PICTURES = 120;
const pictures = new Map(); // url -> picture, the pictures used last

// Thrown when the page no longer needs the answer to a request. The page shows no message.
export class Superseded extends Error {}

// Tells an error of the page as a whole; `null` removes it.
export function say(error) {
  if (error instanceof Superseded) return;
  at("error").hidden = !error;
  at("error").textContent = error ? `${error.message || error}` : "";
}

export class Reading {
  #ending = new AbortController();
  #newest = new Map();

  // `volume` is the id of the volume that answers have to be about, "" for answers about no volume.
  constructor(volume = "") {
    this.volume = volume;
  }

  get current() {
    return !this.#ending.signal.aborted;
  }

  check() {
    if (!this.current) throw new Superseded();
  }

  end() {
    this.#ending.abort();
    for (const reading of this.#newest.values()) reading.end();
  }

  // A reading that ends the previous one of the same name, and ends with this one.
  newest(name, volume = this.volume) {
    this.check();
    this.#newest.get(name)?.end();
    const next = new Reading(volume);
    this.#newest.set(name, next);
    return next;
  }

  json(path) {
    return this.#answer(this.#url(path), (response) => response.json());
  }

  // Writes something of the volume; `key` is that of the address which the command printed. Returns the answer.
  write(path, method, key, body) {
    const headers = { "Content-Type": "application/json", "X-Octjepa-Key": key };
    return this.#answer(this.#url(path), (response) => response.json(), { method, headers, body: JSON.stringify(body ?? {}) });
  }

  async picture(path) {
    const url = this.#url(path);
    const found = pictures.get(url) ?? (await this.#answer(url, async (response) => createImageBitmap(await response.blob())));
    pictures.delete(url); // the picture used last goes last
    pictures.set(url, found);
    if (pictures.size > MOST_PICTURES) pictures.delete(pictures.keys().next().value);
    this.check();
    return found;
  }

  #url(path) {
    return this.volume ? `/volumes/${this.volume}${path}` : path;
  }

  async #answer(url, read, request = {}) {
    this.check();
    try {
      const response = await fetch(url, { ...request, signal: this.#ending.signal });
      if (!response.ok) throw new Error(await response.text());
      const volume = response.headers.get(ANSWER_OF) ?? "";
      if (volume !== this.volume) throw new Error(`the server answered about ${volume || "no volume"} instead of ${this.volume || "no volume"}`);
      const found = await read(response);
      this.check();
      return found;
    } catch (error) {
      this.check(); // an aborted request is superseded, whatever it throws
      throw error;
    }
  }
}

export const forgetPictures = () => pictures.clear();

export class Shown {
  constructor() {
    this.panels = [];
    this.reading = new Reading();
    this.reading.end(); // nothing is shown yet
  }

  // A panel in the element `node`. `clear()` removes everything that the functions given to `Panel.fill` draw. `title`
  // begins what the panel says of itself.
  panel(name, node, clear, title = "") {
    const panel = new Panel(this, name, node, clear, title);
    this.panels.push(panel);
    return panel;
  }

  // Shows another volume, or the same one anew: every panel is cleared and says that it is being read.
  open(volume) {
    this.reading.end();
    this.reading = new Reading(volume);
    for (const panel of this.panels) panel.empty("reading");
    return this.reading;
  }

  // Shows nothing.
  close() {
    this.reading.end();
    for (const panel of this.panels) panel.empty("empty");
  }
}

class Panel {
  constructor(shown, name, node, clear, title) {
    Object.assign(this, { shown, name, node, clear, title });
    node.dataset.panel = name;
    node.append(this.note = make("p", "", "note soft"));
    this.#enter("empty");
  }

  #enter(state, text = "") {
    this.node.dataset.state = state;
    this.node.dataset.volume = state === "shown" ? this.shown.reading.volume : "";
    this.note.textContent = text;
  }

  // Clears the panel and says why. Ends what is being read for it.
  empty(state, text = "") {
    if (this.shown.reading.current) this.shown.reading.newest(this.name);
    this.clear();
    const before = this.title && `${this.title}: `;
    if (state === "reading") this.#enter(state, before ? `${before}being read …` : "Being read …");
    else this.#enter(state, text && before + text);
  }

  // Tells more of a panel that is being read.
  tell(text) {
    if (this.node.dataset.state === "reading") this.note.textContent = text;
  }

  // Awaits `work(reading)` and runs the function that it returns, which draws the panel. If it returns nothing, the
  // panel is still being read. If it throws, the panel is cleared and tells the reason. Nothing happens if the panel is
  // filled again meanwhile, or another volume is opened. With `anew` the panel is cleared at once. Without, what the
  // panel shows of the same volume stays until then. Resolves to whether `work` was still wanted.
  async fill(work, anew = false) {
    if (!this.shown.reading.current) return false;
    if (anew || !["shown", "reading"].includes(this.node.dataset.state)) this.empty("reading");
    const reading = this.shown.reading.newest(this.name);
    try {
      const draw = await work(reading);
      reading.check();
      if (draw) {
        this.#enter("shown");
        draw();
      }
    } catch (error) {
      if (!reading.current || error instanceof Superseded) return false;
      this.empty("failed", error.message);
    }
    return true;
  }
}
