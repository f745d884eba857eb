// Changes of the boundaries of a B-scan by hand. `lines` holds eight lists from above, a row for each column, null where
// there is none. Every function returns new lists and leaves its argument as it is. Boundaries never cross: a boundary
// that is pushed pushes its neighbours.

const REACH = 6; // columns, of a change by keyboard

const inside = (row, rows) => Math.max(0, Math.min(rows - 1, row));

function put(lines, boundary, column, row) {
  lines[boundary][column] = row;
  for (let above = boundary - 1; above >= 0; above -= 1) if (lines[above][column] > row && lines[above][column] !== null) lines[above][column] = row;
  for (let below = boundary + 1; below < lines.length; below += 1) if (lines[below][column] < row && lines[below][column] !== null) lines[below][column] = row;
}

const copied = (lines) => lines.map((line) => [...line]);

// A stroke of the pointer from one place {column, depth} to the next.
export function stroked(lines, boundary, from, to, rows) {
  const made = copied(lines);
  const [first, last] = from.column <= to.column ? [from, to] : [to, from];
  const columns = lines[boundary].length;
  for (let column = Math.max(0, Math.round(first.column)); column <= Math.min(columns - 1, Math.round(last.column)); column += 1) {
    const share = last.column > first.column ? (column - first.column) / (last.column - first.column) : 1;
    put(made, boundary, column, inside(first.depth + Math.max(0, Math.min(1, share)) * (last.depth - first.depth), rows));
  }
  return made;
}

// Moves a boundary by `by` rows at a column, and its neighbourhood less and less.
export function nudged(lines, boundary, column, by, rows) {
  const made = copied(lines);
  for (let index = Math.max(0, column - 3 * REACH); index <= Math.min(lines[boundary].length - 1, column + 3 * REACH); index += 1) {
    const row = lines[boundary][index];
    if (row !== null) put(made, boundary, index, inside(row + by * Math.exp(-0.5 * ((index - column) / REACH) ** 2), rows));
  }
  return made;
}

// The boundary that is nearest to a place; null if the column has none.
export function nearest(lines, { column, depth }) {
  let best = null;
  lines.forEach((line, number) => {
    const row = line[Math.max(0, Math.min(line.length - 1, Math.round(column)))];
    if (row !== null && (best === null || Math.abs(row - depth) < best.distance)) best = { number, distance: Math.abs(row - depth) };
  });
  return best && best.number;
}
