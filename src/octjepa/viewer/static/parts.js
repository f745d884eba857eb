// What all parts of the page use: elements, answers of the server, pictures.
export const at = (id) => document.getElementById(id);

export function make(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

export const plain = (text) => (text || "unknown").replaceAll("_", " ");
export const titleOf = (row) => `${plain(row.device)}, ${row.eye || "eye unknown"}`;

// What can be shown beside the B-scan.
export const PLANES = [["face", "en face: lowest 0.25 mm of the tissue band"], ["thickness", "retinal thickness"], ["depth", "plane at the chosen depth"], ["localizer", "picture of the fundus in the file"]];

const pictures = new Map(); // url -> promise of an image: the last ones requested

export function picture(url) {
  const before = pictures.get(url);
  if (before) {
    pictures.delete(url); // the one used last goes last
    pictures.set(url, before);
    return before;
  }
  const loading = (async () => createImageBitmap(await (await answer(url)).blob()))();
  loading.catch(() => pictures.delete(url)); // what failed is requested again
  pictures.set(url, loading);
  if (pictures.size > 120) pictures.delete(pictures.keys().next().value);
  return loading;
}

export const forgetPictures = () => pictures.clear();

async function answer(url) {
  const found = await fetch(url);
  if (!found.ok) throw new Error(await found.text());
  return found;
}

export const json = async (url) => (await answer(url)).json();

export function say(error) {
  at("error").hidden = !error;
  at("error").textContent = error ? `${error.message || error}` : "";
}

export function strokeLine(pen, points) {
  // Points [x, y], null where the line is interrupted.
  pen.beginPath();
  let drawing = false;
  for (const point of points) {
    if (!point) drawing = false;
    else if (drawing) pen.lineTo(point[0], point[1]);
    else {
      pen.moveTo(point[0], point[1]);
      drawing = true;
    }
  }
  pen.stroke();
}
