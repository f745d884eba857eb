// The page of the viewer: the list of volumes, and what is opened from it. The address keeps volume, slice and overlay.
import { Nearest, misread } from "/cases.js";
import { follow } from "/live.js";
import { NativePane } from "/native.js";
import { at, make, plain, titleOf } from "/parts.js";
import { forgetPictures, Reading, say, Shown } from "/shown.js";
import { StoredView } from "/stored.js";

const PAGE = 200;
const NONE = "\0"; // the choice of volumes without a value
const state = { about: null, page: null, offset: 0, row: null };
const page = new Reading(); // answers about no volume
const eye = new Shown(); // the volume that was opened
const other = new Shown(); // the volume side by side with it
let stored, native, beside, near, others;

const good = (row) => (row.quality === null ? "unknown" : row.quality.toFixed(2));

function fill(select, values) {
  select.append(new Option("all", ""), ...values.map((value) => new Option(plain(value), value || NONE)));
}

async function list(offset = 0, around = "") {
  const query = new URLSearchParams({ offset, limit: PAGE });
  for (const id of ["search", "device", "split", "order"]) query.set(id, at(id).value.trim() || at(id).value);
  if (around) query.set("around", around);
  at("count").textContent = "Searching …";
  const reading = page.newest("list");
  const found = await reading.json(`/volumes?${query}`).catch((error) => {
    if (reading.current) at("count").textContent = "";
    throw error;
  });
  Object.assign(state, { page: found, offset: found.offset });
  at("list").replaceChildren(...found.volumes.map(entry));
  at("list").scrollTop = 0;
  const last = found.offset + found.volumes.length;
  const part = found.matching > found.volumes.length ? `, ${found.offset + 1} to ${last} listed` : "";
  at("count").textContent = `${found.matching} of ${found.total} volume${found.total === 1 ? "" : "s"}${part}`;
  at("before").disabled = found.offset === 0;
  at("after").disabled = last >= found.matching;
  at("pages").hidden = found.matching <= PAGE;
  mark();
}

function entry(row) {
  const button = make("button");
  button.type = "button";
  button.dataset.id = row.id;
  const marks = row.axes.some((axis) => axis.uncertain) ? " spacing uncertain" : "";
  button.append(make("b", titleOf(row)), make("span", marks, "mark"));
  const facts = [`person ${row.person}`, `quality ${good(row)}`, row.split, row.id, row.file.split("/").pop()];
  button.append(make("span", facts.filter(Boolean).join(" · "), "soft"));
  button.addEventListener("click", () => open(row).catch(say));
  const item = make("li");
  item.append(button);
  return item;
}

function mark() {
  for (const button of at("list").querySelectorAll("button")) {
    button.setAttribute("aria-current", String(state.row !== null && button.dataset.id === state.row.id));
  }
}

async function open(row) {
  page.newest("open"); // no other volume is opened by an answer that is still awaited
  state.row = row;
  mark();
  say(null);
  at("title").textContent = titleOf(row);
  at("subtitle").textContent = `person ${row.person} · volume ${row.id} · ${row.file.split("/").pop()}`;
  facts(row);
  shut();
  const reading = eye.open(row.id);
  native.begin(row, stored.linked); // the slice that the address asks for stays
  near?.show();
  await native.first(); // before all else: the first B-scan
  if (!reading.current) return;
  native.finish();
  stored.open();
  others.show();
}

const factsOf = (reading, name, id) => reading.newest(name, id).json("");
const openById = async (id) => open(await factsOf(page, "open", id));
const compareById = async (id) => compare(await factsOf(eye.reading, "side by side", id));

// The choice of a volume of the same person to show side by side.
class Others {
  constructor(shown) {
    this.panel = shown.panel("compare", at("compare-box"), () => {
      at("compare").replaceChildren();
      at("compare").disabled = true;
    });
    at("compare").addEventListener("change", () => (at("compare").value ? compareById(at("compare").value).catch(say) : shut()));
  }

  show() {
    return this.panel.fill(async (read) => {
      const found = await read.json("/same_person");
      return () => {
        const label = (row) => `${titleOf(row)}, ${row.id}`;
        at("compare").replaceChildren(new Option(found.length ? "nothing" : "no other volume of this person", ""), ...found.map((row) => new Option(label(row), row.id)));
        at("compare").disabled = !found.length;
      };
    });
  }
}

async function compare(row) {
  at("pane-b").hidden = false;
  at("panes").classList.add("two");
  beside ??= new NativePane(at("pane-b"), state.about, other, () => {});
  const reading = other.open(row.id);
  beside.begin(row);
  await beside.first();
  if (reading.current) await beside.finish();
}

function shut() {
  other.close();
  at("pane-b").hidden = true;
  at("panes").classList.remove("two");
}

// The stored slice follows the place in the scan as it came.
async function follows({ place: { slice, depth, column } }) {
  const { canonical } = await eye.reading.newest("follow").json(`/native/place/${slice}/${depth}/${column}`);
  const nearest = Math.round(canonical[0]);
  if (nearest !== stored.slice && nearest >= 0 && nearest < state.about.shape[0]) stored.go(nearest, false);
}

function facts(row) {
  const table = make("table");
  table.append(make("caption", "Geometry of the file", "soft"));
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
  more.append(make("caption", "Facts about this volume", "soft"));
  const known = {
    protocol: row.protocol, pattern: row.pattern, region: row.region, site: row.site, split: row.split,
    quality: good(row), stored: row.mirrored ? "mirrored, as a right eye" : "as scanned",
    notes: row.notes.map(plain).join(", "), file: row.file,
  };
  for (const [name, value] of Object.entries(known)) {
    if (!value) continue;
    const line = make("tr");
    line.append(make("th", name), make("td", ["quality", "file"].includes(name) ? value : plain(value), name));
    more.append(line);
  }
  at("facts").replaceChildren(table, more);
}

function remember() {
  const layer = at("layer").value;
  if (state.row) history.replaceState(null, "", `#${[state.row.id, stored.slice + 1, ...(layer ? [layer] : [])].join("/")}`);
}

async function step(by) {
  let here = state.page.volumes.findIndex((row) => state.row && row.id === state.row.id) + by;
  if (here >= state.page.volumes.length && !at("after").disabled) {
    await list(state.offset + PAGE);
    here = 0;
  } else if (here < 0 && !at("before").disabled) {
    await list(state.offset - PAGE);
    here = state.page.volumes.length - 1;
  }
  const next = state.page.volumes[Math.max(0, Math.min(state.page.volumes.length - 1, here))];
  if (next && next.id !== state.row.id) {
    open(next).catch(say);
    const button = at("list").querySelector(`[data-id="${next.id}"]`);
    if (button) button.scrollIntoView({ block: "nearest" });
  }
}

function key(event) {
  if (["INPUT", "SELECT"].includes(event.target.tagName) && event.target.type !== "checkbox") return;
  const acts = {
    ArrowLeft: () => turn(-1), ArrowRight: () => turn(1), j: () => step(1).catch(say), k: () => step(-1).catch(say),
    b: () => { at("band").checked = !at("band").checked; stored.draw(); },
    o: () => { const layer = at("layer"); layer.selectedIndex = (layer.selectedIndex + 1) % layer.options.length; stored.overlay(); },
  };
  if (acts[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    acts[event.key]();
  }
}

function turn(by) {
  if (native.facts && !native.body.hidden) native.go({ slice: native.place.slice + by });
  else stored.go(stored.slice + by);
}

function tell(about) {
  at("summary").textContent = `${about.volumes} volume${about.volumes === 1 ? "" : "s"} of ${about.shape.join(" x ")} voxels${about.encoder ? ` · encoder ${about.encoder}` : ""}`;
  for (const note of about.notes) at("summary").append(make("span", ` · ${note}`, "mark"));
  if (about.missing) at("summary").append(make("span", ` · without token maps: ${about.missing}`, "mark"));
}

async function newCheckpoint() {
  shut();
  eye.open(state.row.id); // what is drawn of the encoder before goes at once
  forgetPictures();
  Object.assign(state.about, await page.newest("about").json("/about"));
  tell(state.about);
  stored.offer();
  await open(state.row);
}

async function start() {
  const { about } = Object.assign(state, { about: await page.json("/about") });
  tell(about);
  fill(at("device"), about.device);
  fill(at("split"), about.split);
  const [id, slice, layer] = location.hash.slice(1).split("/");
  await list(0, id);
  native = new NativePane(at("pane-a"), about, eye, (pane) => follows(pane).catch(() => {}));
  stored = new StoredView(about, eye, remember);
  others = new Others(eye);
  if (about.neighbours) near = new Nearest(eye, openById, compareById);
  for (const name of ["search", "device", "split", "order"]) at(name).addEventListener("input", () => list().catch(say));
  at("before").addEventListener("click", () => list(state.offset - PAGE).catch(say));
  at("after").addEventListener("click", () => list(state.offset + PAGE).catch(say));
  document.addEventListener("keydown", key);
  if (Number(slice) >= 1) Object.assign(stored, { slice: Math.floor(Number(slice)) - 1, linked: true, moved: true });
  if (about.layers.includes(layer)) at("layer").value = layer;
  if (about.predicted.length) misread(about.predicted, openById);
  if (about.live) follow(() => newCheckpoint().catch(say));
  await open(state.page.volumes.find((row) => row.id === id) || state.page.volumes[0]);
}

start().catch(say);
