// Helpers for all parts of the page: elements, words and lines on a canvas.
export const at = (id) => document.getElementById(id);

export function make(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

export const plain = (text) => (text || "unknown").replaceAll("_", " ");
export const titleOf = (row) => `${plain(row.device)}, ${row.eye || "eye unknown"}`;

// Views that can be shown next to the B-scan.
export const PLANES = [["thickness", "thickness map"], ["face", "en face: lowest 0.25 mm of the tissue mask"], ["depth", "plane at the chosen depth"], ["localizer", "picture of the fundus in the file"]];

export function blank(canvas) {
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
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
