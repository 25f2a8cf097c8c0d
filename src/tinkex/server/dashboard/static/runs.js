// The list of runs: select some to compare their curves. The selection is a part of the address.
import "./actions.js";
import { CurveGrid } from "./charts.js";
import { notify } from "./page.js";

const MAX_RUNS = 12;
const section = document.getElementById("compare");
const count = document.getElementById("selected");
const clear = document.getElementById("clear");
const selected = new Map(
  (new URLSearchParams(location.search).get("compare") ?? "").split(",").filter(Boolean).slice(0, MAX_RUNS).map((id) => [id, id]),
);
let grid = null;

function boxes() {
  return [...document.querySelectorAll("input[data-select]")];
}

function update() {
  for (const box of boxes()) {
    box.checked = selected.has(box.value);
    if (box.checked) selected.set(box.value, box.dataset.name);
  }
  section.hidden = selected.size === 0;
  count.textContent = selected.size === 1 ? "1 run selected" : `${selected.size} runs selected`;
  const query = new URLSearchParams(location.search);
  if (selected.size) query.set("compare", [...selected.keys()].join(","));
  else query.delete("compare");
  const address = query.toString() ? `?${query}` : location.pathname;
  if (address !== location.search) history.replaceState(null, "", address);
  if (!selected.size) return;
  grid ??= new CurveGrid(document.getElementById("curves"));
  grid.show([...selected].map(([id, name]) => ({ id, name })));
}

document.addEventListener("change", (event) => {
  if (!event.target.matches("input[data-select]")) return;
  const { value, checked, dataset } = event.target;
  if (checked && selected.size >= MAX_RUNS) {
    notify(`At most ${MAX_RUNS} runs can be compared.`, "bad");
    event.target.checked = false;
    return;
  }
  if (checked) selected.set(value, dataset.name);
  else selected.delete(value);
  update();
});
clear?.addEventListener("click", () => {
  selected.clear();
  update();
});
document.addEventListener("refresh", update);
if (section) update();
