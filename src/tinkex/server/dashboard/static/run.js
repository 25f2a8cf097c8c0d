// The page of a run: its curves and actions.
import "./actions.js";
import { CurveGrid } from "./charts.js";

const container = document.getElementById("curves");
new CurveGrid(container).show([{ id: container.dataset.run, name: container.dataset.name }]);
