// A run while it trains: its curves, requested every few seconds.
import { at, make } from "/parts.js";
import { Reading } from "/shown.js";

const EVERY_MS = 5000;
const NAMESPACE = "http://www.w3.org/2000/svg";

export function follow(changed) {
  let checkpoint = null;
  let update = null;
  const reading = new Reading();
  const ask = async () => {
    try {
      const live = await reading.json("/live");
      show(live);
      update = live.update;
      if (checkpoint !== null && live.checkpoint !== checkpoint) changed();
      checkpoint = live.checkpoint;
      if (live.finished) return;
    } catch (error) {
      at("live-state").textContent = `The run cannot be followed now: ${error.message}.${update === null ? "" : ` The curves end at update ${update}.`}`;
    }
    setTimeout(ask, EVERY_MS);
  };
  at("live").hidden = false;
  ask();
}

function show(live) {
  const state = live.finished ? "finished" : "followed every 5 s";
  at("live-state").textContent = live.charts.length
    ? `Update ${live.update}, ${state}; newest checkpoint ${live.checkpoint || "none yet"}.`
    : `No update is in metrics.jsonl yet, ${state}.`;
  at("alarms").replaceChildren(...live.alarms.map(({ update, monitor, message }) => make("li", `update ${update}, ${monitor}: ${message}`)));
  at("charts").replaceChildren(...live.charts.map(drawn));
}

function drawn(chart) {
  const figure = make("figure");
  const [width, height, left, bottom] = [320, 150, 46, 18];
  const log = chart.logarithmic && chart.low.every((value) => value > 0);
  const scaled = (value) => (log ? Math.log10(value) : value);
  const all = [...chart.low, ...chart.high, ...chart.validation.y].filter((value) => !log || value > 0).map(scaled);
  let [low, high] = [Math.min(...all), Math.max(...all)];
  if (high - low < 1e-12) [low, high] = [low - 0.5, high + 0.5];
  const [first, last] = [0, Math.max(...chart.x, 1)];
  const x = (value) => left + ((value - first) / (last - first)) * (width - left - 6);
  const y = (value) => height - bottom - ((scaled(value) - low) / (high - low)) * (height - bottom - 8);
  const svg = document.createElementNS(NAMESPACE, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", chart.title);
  const add = (name, attributes, text) => {
    const node = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    svg.append(node);
  };
  const path = (xs, ys) => xs.map((value, number) => `${number ? "L" : "M"}${x(value).toFixed(1)} ${y(ys[number]).toFixed(1)}`).join("");
  add("path", { class: "axis", d: `M${left} 8V${height - bottom}H${width - 6}` });
  const back = [...chart.x].reverse();
  add("path", { class: "range", d: `${path(chart.x, chart.high)}${path(back, [...chart.low].reverse()).replace("M", "L")}Z` });
  add("path", { class: "curve", d: path(chart.x, chart.y) });
  chart.validation.x.forEach((value, number) => add("circle", { class: "validation", cx: x(value), cy: y(chart.validation.y[number]), r: 3 }));
  const text = (value) => Number((log ? 10 ** value : value).toPrecision(3)).toString();
  add("text", { x: left - 4, y: 16, "text-anchor": "end" }, text(high));
  add("text", { x: left - 4, y: height - bottom, "text-anchor": "end" }, text(low));
  add("text", { x: left, y: height - 4 }, "0");
  add("text", { x: width - 6, y: height - 4, "text-anchor": "end" }, `update ${last.toFixed(0)}`);
  const points = chart.validation.x.length ? " Points: held-out people." : "";
  figure.append(svg, make("figcaption", `${chart.title}. ${chart.caption}${points}`, "soft"));
  return figure;
}
