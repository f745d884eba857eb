// The table of thickness in the ETDRS sectors: on the page, to copy, and as a CSV file.
import { make } from "/parts.js";

const QUARTERS = ["superior", "nasal", "inferior", "temporal"];
const RINGS = { inner: "inner ring, 1 to 3 mm", outer: "outer ring, 3 to 6 mm" };

// `found` is the server's answer, `row` the volume that it is about.
export function sectorTable(row, found) {
  const box = make("div");
  const table = make("table");
  const where = found.centre_from === "click" ? "about the place clicked" : "about the middle of the scan; “Centre ETDRS” moves it to the fovea";
  const order = found.vertical_known ? "" : "; which way is up is assumed";
  table.append(make("caption", `Mean thickness from ILM to Bruch’s membrane in µm, ${where}${order}. As ingest found the surfaces: not corrected by hand.`, "soft"));
  const head = make("tr");
  head.append(make("th", "µm"), ...QUARTERS.map((name) => make("th", name)));
  table.append(head);
  const cell = (value) => make("td", value === null ? "–" : value.toFixed(0));
  for (const [ring, text] of Object.entries(RINGS)) {
    const line = make("tr");
    line.append(make("th", text), ...QUARTERS.map((name) => cell(found.sectors[`${ring}_${name}`])));
    table.append(line);
  }
  const line = make("tr");
  line.append(make("th", "centre, 1 mm"), cell(found.sectors.central));
  table.append(line);
  box.append(table, ...found.notes.map((note) => make("p", note, "mark")));
  const act = (text, work) => {
    const button = make("button", text);
    button.type = "button";
    button.addEventListener("click", () => work(button).catch((error) => { button.textContent = error.message; }));
    return button;
  };
  const buttons = make("p", undefined, "tools");
  buttons.append(
    act("Copy table", async (button) => {
      await navigator.clipboard.writeText(sectorsCsv(row, found).replaceAll(",", "\t"));
      button.textContent = "Copied";
    }),
    act("Save as CSV", async () => save(`${row.file.split("/").pop().replace(/\.[^.]*$/, "")}_etdrs.csv`, sectorsCsv(row, found))),
  );
  box.append(buttons);
  return box;
}

// A line for each sector. No value can be taken for a formula by a spreadsheet.
export function sectorsCsv(row, found) {
  const lines = ["volume_id,eye,sector,thickness_um,share_measured,centre_slice,centre_column,centre_from"];
  const [slice, column] = found.centre.map((value) => (value + 1).toFixed(1));
  for (const [name, value] of Object.entries(found.sectors)) {
    lines.push([row.id, row.eye, name, value ?? "", found.measured[name], slice, column, found.centre_from].join(","));
  }
  return `${lines.join("\n")}\n`;
}

async function save(name, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
