// Text tables that people open in a spreadsheet, written as `octjepa.tables.format_table` writes them.
//
// Ids and file names come from other people's files. A spreadsheet executes a cell that begins with =, +, - or @. Such
// a cell, and one that begins with a tab or a line end, gets an apostrophe. Numbers stay as they are.
const FORMULA = /^(\s*[=+\-@＝＋－＠]|[\t\r\n])/;
const NUMBER = /^\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*$/i;

function cell(value, delimiter) {
  const text = String(value ?? "").replaceAll("\r", "\n");
  const safe = FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text;
  return safe.includes(delimiter) || /["\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

// `rows` with the header first; a line for each.
export const tableText = (rows, delimiter) => rows.map((row) => `${row.map((value) => cell(value, delimiter)).join(delimiter)}\n`).join("");
