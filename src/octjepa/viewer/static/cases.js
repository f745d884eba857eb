// Lists of scans to open: the test cases that a probe or a fine-tuned network misread, the nearest neighbours of an eye.
import { at, json, make, plain, say, titleOf } from "/parts.js";

export function misread(targets, open) {
  const select = at("misread-target");
  select.replaceChildren(...targets.map((name) => new Option(plain(name), name)));
  select.addEventListener("input", () => show(select.value, open).catch(say));
  at("misread").hidden = false;
  show(targets[0], open).catch(say);
}

async function show(target, open) {
  const found = await json(`/misread?${new URLSearchParams({ target })}`);
  if (at("misread-target").value !== target) return;
  const more = found.misread > found.volumes.length ? `, the first ${found.volumes.length} listed` : "";
  at("misread-state").textContent = found.classes
    ? `${found.misread} of ${found.cases} test cases, by the score of the predicted class${more}.`
    : `${found.cases} test cases, by the size of the error${more}.`;
  at("misread-list").replaceChildren(...found.volumes.map((one) => {
    const score = found.classes ? `score ${one.score.toFixed(2)}` : `error ${one.score}`;
    return entry(one, `true ${plain(one.true)}, predicted ${plain(one.predicted)}`, [score, one.eye, one.id], [["Open", open]]);
  }));
}

export async function nearest(row, current, open, compare) {
  at("near").hidden = false;
  at("near-list").replaceChildren();
  try {
    const found = await json(`/volumes/${row.id}/neighbours`);
    if (!current()) return;
    const own = found.own.filter((one) => one.eye && one.eye !== found.eye)[0];
    const rank = own ? ` ${own.nearer} of ${found.people} people have an eye that is nearer than this person’s own other eye (${own.cosine.toFixed(3)}).` : "";
    at("near-state").textContent = `Cosine of the ${plain(found.pool)} embeddings of ${found.encoder}, one eye a person.${rank}`;
    const listed = [...(own ? [{ ...own, own: true }] : []), ...found.others].sort((one, other) => other.cosine - one.cosine);
    at("near-list").replaceChildren(...listed.map((one) => entry(
      one, `${one.cosine.toFixed(3)} ${titleOf(one)}${one.own ? " (own other eye)" : ""}`, [one.id], [["Open", open], ["Side by side", compare]],
    )));
  } catch {
    if (current()) at("near-state").textContent = "The embedding table does not hold this volume.";
  }
}

function entry(one, title, facts, acts) {
  const item = make("li");
  item.append(make("b", title), make("span", [...facts, one.shown ? "" : "not in this store"].filter(Boolean).join(" · "), "soft"));
  for (const [name, act] of one.shown ? acts : []) {
    const button = make("button", name);
    button.type = "button";
    button.dataset.id = one.id;
    button.addEventListener("click", () => act(one.id).catch(say));
    item.append(button);
  }
  return item;
}
