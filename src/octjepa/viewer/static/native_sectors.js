// The table of thickness in the ETDRS sectors: on the page, to copy, and as a CSV file.
import { tableText } from "/csv.js";
import { make, plain } from "/parts.js";

const QUARTERS = ["superior", "nasal", "inferior", "temporal"];
const RINGS = { inner: "1 to 3 mm", outer: "3 to 6 mm" };

const CENTRES = {
  fovea: (found) => `about the fovea that was found (certainty ${found.certainty.toFixed(2)})`,
  scan: () => "about the middle of the scan, because no fovea was found; “Centre ETDRS” moves it",
  chosen: () => "about the place clicked",
};

// `found` is the server's answer, `row` the volume that it is about.
export function sectorTable(row, found, verticalKnown) {
  const box = make("div");
  const table = make("table");
  const what = found.layer === "retina" ? "ILM to Bruch’s membrane" : plain(found.layer);
  const order = verticalKnown ? "" : "; which way is up is assumed";
  table.append(make("caption", `Mean thickness in µm, ${what}, ${CENTRES[found.centre_from](found)}${order}. ${found.corrected ? `${found.corrected} B-scans are corrected by hand.` : "Not corrected by hand."}`, "soft"));
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
  line.append(make("th", "centre 1 mm"), cell(found.sectors.central));
  table.append(line);
  box.append(...(found.has_area ? [table, fluidTable(found)] : []), notesOf(found));
  const act = (text, work) => {
    const button = make("button", text);
    button.type = "button";
    button.addEventListener("click", () => work(button).catch((error) => { button.textContent = error.message; }));
    return button;
  };
  const buttons = make("p", undefined, "tools");
  buttons.append(
    act("Copy table", async (button) => {
      await navigator.clipboard.writeText(tableText(sectorRows(row, found), "\t"));
      button.textContent = "Copied";
    }),
    act("Save as CSV", async () => save(`${row.file.split("/").pop().replace(/\.[^.]*$/, "")}_etdrs.csv`, tableText(sectorRows(row, found), ","))),
  );
  box.append(buttons);
  return box;
}

function fluidTable(found) {
  const table = make("table");
  table.append(make("caption", "Volume in the whole field, mm³", "soft"));
  for (const [name, volume] of Object.entries(found.fluid_mm3)) {
    const line = make("tr");
    line.append(make("th", plain(name).replace("rpe", "RPE")), make("td", volume === null ? "–" : volume.toFixed(3)));
    table.append(line);
  }
  return table;
}

// Why the result should not be trusted, and why a sector has no value or one of a part of it.
function notesOf(found) {
  const list = make("ul", undefined, "mark trust");
  const parts = new Map();
  for (const [sector, note] of Object.entries(found.sector_notes)) if (note) parts.set(note, [...(parts.get(note) ?? []), plain(sector)]);
  const sectors = found.has_area ? [...parts].map(([note, names]) => `${names.join(", ")}: ${note}`) : [];
  list.append(...[...found.notes, ...sectors].map((note) => make("li", note)));
  return list;
}

// The header and a row for each sector.
export function sectorRows(row, found) {
  const [slice, column] = found.centre.map((value) => (value + 1).toFixed(1));
  return [
    ["volume_id", "eye", "layer", "sector", "thickness_um", "share_measured", "centre_slice", "centre_column", "centre_from"],
    ...Object.entries(found.sectors).map(([name, value]) => [row.id, row.eye, found.layer, name, value, found.measured[name], slice, column, found.centre_from]),
  ];
}

async function save(name, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
