// The page of the viewer: the list of volumes, and what is opened from it. The address keeps volume, slice and overlay.
import { at, forgetPictures, json, make, plain, say, titleOf } from "/parts.js";
import { follow } from "/live.js";
import { misread, nearest } from "/cases.js";
import { NativePane } from "/native.js";
import { StoredView } from "/stored.js";

const PAGE = 200;
const NONE = "\0"; // the choice of volumes without a value
const state = { about: null, page: null, offset: 0, row: null };
let stored, native, beside, waiting;

const good = (row) => (row.quality === null ? "unknown" : row.quality.toFixed(2));

function fill(select, values) {
  select.append(new Option("all", ""), ...values.map((value) => new Option(plain(value), value || NONE)));
}

async function list(offset = 0, around = "") {
  const query = new URLSearchParams({ offset, limit: PAGE });
  for (const id of ["search", "device", "split", "order"]) query.set(id, at(id).value.trim() || at(id).value);
  if (around) query.set("around", around);
  const asked = (waiting = query.toString());
  const page = await json(`/volumes?${asked}`);
  if (asked !== waiting) return; // another was asked for meanwhile
  Object.assign(state, { page, offset: page.offset });
  at("list").replaceChildren(...page.volumes.map(entry));
  at("list").scrollTop = 0;
  const last = page.offset + page.volumes.length;
  const part = page.matching > page.volumes.length ? `, ${page.offset + 1} to ${last} listed` : "";
  at("count").textContent = `${page.matching} of ${page.total} volumes${part}`;
  at("before").disabled = page.offset === 0;
  at("after").disabled = last >= page.matching;
  at("pages").hidden = page.matching <= PAGE;
  mark();
}

function entry(row) {
  const button = make("button");
  button.type = "button";
  button.dataset.id = row.id;
  const marks = row.axes.some((axis) => axis.uncertain) ? " spacing uncertain" : "";
  button.append(make("b", titleOf(row)), make("span", marks, "mark"));
  const facts = [`quality ${good(row)}`, row.split, row.id, row.file.split("/").pop()];
  button.append(make("span", facts.filter(Boolean).join(" · "), "soft"));
  button.addEventListener("click", () => open(row));
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
  state.row = row;
  mark();
  at("title").textContent = titleOf(row);
  at("subtitle").textContent = `volume ${row.id} · ${row.file.split("/").pop()}`;
  facts(row);
  shut();
  if (state.about.neighbours) nearest(row, () => state.row === row, openById, async (id) => compare(await json(`/volumes/${id}`)));
  await native.begin(row); // before all else: the first B-scan
  if (state.row !== row) return;
  native.finish(row);
  stored.open(row);
  const others = await json(`/volumes/${row.id}/same_person`);
  if (state.row !== row) return;
  const select = at("compare");
  const label = (other) => `${titleOf(other)}, ${other.id}`;
  select.replaceChildren(new Option(others.length ? "nothing" : "no other volume of this person", ""), ...others.map((other) => new Option(label(other), other.id)));
  select.disabled = !others.length;
  select.onchange = () => (select.value ? compare(others.find((other) => other.id === select.value)) : shut());
}

const openById = async (id) => open(await json(`/volumes/${id}`));

function compare(row) {
  at("pane-b").hidden = false;
  at("panes").classList.add("two");
  beside ??= new NativePane(at("pane-b"), state.about, () => {});
  beside.open(row);
}

function shut() {
  at("pane-b").hidden = true;
  at("panes").classList.remove("two");
}

async function follows(pane, [slice, depth, column]) {
  const row = state.row;
  const { canonical } = await json(`/volumes/${row.id}/native/place/${slice}/${depth}/${column}`);
  const near = Math.round(canonical[0]);
  if (state.row === row && near !== stored.slice && near >= 0 && near < state.about.shape[0]) stored.go(near, false);
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
  more.append(make("caption", "What is known of it", "soft"));
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
    open(next);
    const button = at("list").querySelector(`[data-id="${next.id}"]`);
    if (button) button.scrollIntoView({ block: "nearest" });
  }
}

function key(event) {
  if (["INPUT", "SELECT"].includes(event.target.tagName) && event.target.type !== "checkbox") return;
  const acts = {
    ArrowLeft: () => turn(-1), ArrowRight: () => turn(1), j: () => step(1), k: () => step(-1),
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
  at("summary").textContent = `${about.volumes} volumes of ${about.shape.join(" x ")} voxels${about.encoder ? ` · encoder ${about.encoder}` : ""}`;
  for (const note of about.notes) at("summary").append(make("span", ` · ${note}`, "mark"));
  if (about.missing) at("summary").append(make("span", ` · without token maps: ${about.missing}`, "mark"));
}

async function newCheckpoint() {
  Object.assign(state.about, await json("/about"));
  forgetPictures();
  tell(state.about);
  stored.offer();
  open(state.row);
}

async function start() {
  const { about } = Object.assign(state, { about: await json("/about") });
  tell(about);
  fill(at("device"), about.device);
  fill(at("split"), about.split);
  const [id, slice, layer] = location.hash.slice(1).split("/");
  await list(0, id);
  stored = new StoredView(about, remember);
  native = new NativePane(at("pane-a"), about, (pane, place) => follows(pane, place).catch(() => {}));
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
