// Lists of scans to open: the test cases with a wrong prediction, and the nearest neighbours of an eye.
import { at, make, plain, titleOf } from "/parts.js";
import { say, Shown } from "/shown.js";

export function misread(targets, open) {
  const select = at("misread-target");
  select.replaceChildren(...targets.map((name) => new Option(plain(name), name)));
  const shown = new Shown();
  const box = at("misread-box");
  const panel = shown.panel("misread", box, () => { at("misread-state").textContent = ""; at("misread-list").replaceChildren(); });
  const show = () => {
    shown.open("");
    panel.fill(async (read) => {
      const found = await read.json(`/misread?${new URLSearchParams({ target: select.value })}`);
      return () => listMisread(found, open);
    });
  };
  select.addEventListener("input", show);
  at("misread").hidden = false;
  show();
}

function listMisread(found, open) {
  const more = found.misread > found.volumes.length ? `, the first ${found.volumes.length} listed` : "";
  at("misread-state").textContent = found.classes
    ? `${found.misread} of ${found.cases} test cases, highest score of the predicted class first${more}.`
    : `${found.cases} test cases, largest error first${more}.`;
  at("misread-list").replaceChildren(...found.volumes.map((one) => {
    const score = found.classes ? `score ${one.score.toFixed(2)}` : `error ${one.score}`;
    return entry(one, `true ${plain(one.true)}, predicted ${plain(one.predicted)}`, [score, one.eye, one.id], [["Open", open]]);
  }));
}

// The panel of the nearest eyes; `open` and `compare` take the id of a volume.
export class Nearest {
  constructor(shown, open, compare) {
    Object.assign(this, { open, compare });
    at("near").hidden = false;
    this.panel = shown.panel("near", at("near-box"), () => { at("near-state").textContent = ""; at("near-list").replaceChildren(); });
  }

  show() {
    return this.panel.fill(async (read) => {
      const found = await read.json("/neighbours").catch(() => {
        read.check();
        throw new Error("The embedding table does not hold this volume.");
      });
      return () => this.list(found);
    });
  }

  list(found) {
    const own = found.own.filter((one) => found.eye && one.eye && one.eye !== found.eye)[0];
    const rank = own ? ` ${own.nearer} of ${found.people} people have an eye that is nearer than this person’s own other eye (${own.cosine.toFixed(3)}).` : "";
    at("near-state").textContent = `Cosine of the ${plain(found.pool)} embeddings of ${found.encoder}, one eye per person.${rank}`;
    const listed = [...(own ? [{ ...own, own: true }] : []), ...found.others].sort((one, other) => other.cosine - one.cosine);
    at("near-list").replaceChildren(...listed.map((one) => entry(
      one, `${one.cosine.toFixed(3)} ${titleOf(one)}${one.own ? " (own other eye)" : ""}`, [one.id], [["Open", this.open], ["Side by side", this.compare]],
    )));
  }
}

function entry(one, title, facts, acts) {
  const item = make("li");
  item.append(make("b", title), make("span", [one.person ? `person ${one.person}` : "", ...facts, one.shown ? "" : "not in this store"].filter(Boolean).join(" · "), "soft"));
  for (const [name, act] of one.shown ? acts : []) {
    const button = make("button", name);
    button.type = "button";
    button.dataset.id = one.id;
    button.addEventListener("click", () => act(one.id).catch(say));
    item.append(button);
  }
  return item;
}
