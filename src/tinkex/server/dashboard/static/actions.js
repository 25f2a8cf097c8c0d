// Actions on runs and checkpoints: a button with `data-action` and the names of what it acts on.
// One listener handles all of them, so that buttons of refreshed rows need none.
import { act, ask, call, copyText, element, notify } from "./page.js";
import { refresh } from "./live.js";

const segment = encodeURIComponent;
const runPath = ({ run }) => `/api/v1/training_runs/${segment(run)}`;
const checkpointPath = (data) => `${runPath(data)}/checkpoints/${data.checkpoint.split("/").map(segment).join("/")}`;

function field(label, attributes) {
  return element("label", {}, label, element("input", { name: "value", autofocus: true, autocomplete: "off", ...attributes }));
}

async function rename(data) {
  const form = await ask({
    title: "Rename the run",
    fields: [field("Name; empty removes it", { value: data.name, maxlength: 120 })],
    action: "Save",
  });
  if (!form) return;
  await call(`${runPath(data)}/name`, { method: "PUT", body: { name: form.get("value").trim() || null } });
  notify("The name was saved.");
}

async function setTags(data) {
  const form = await ask({
    title: "Tags of the run",
    fields: [field("Tags, separated by commas", { value: data.tags, maxlength: 700 })],
    action: "Save",
  });
  if (!form) return;
  const tags = form.get("value").split(",").map((tag) => tag.trim()).filter(Boolean);
  await call(`${runPath(data)}/tags`, { method: "PUT", body: { tags } });
  notify("The tags were saved.");
}

async function cancelRun(data) {
  const text = "Passes and samples that are waiting or running end with an error in the client. Steps that are done stay.";
  if (!(await ask({ title: "Cancel what runs?", text, action: "Cancel the jobs", tone: "danger" }))) return;
  const reply = await call(`/page/runs/${segment(data.run)}/cancel`, { method: "POST" });
  notify(`${reply.num_cancelled} of ${reply.num_open} unfinished jobs were cancelled.`);
}

async function publish(data) {
  const text = `Everybody with a key of this server can then read ${data.path}.`;
  if (!(await ask({ title: "Publish the checkpoint?", text, action: "Publish" }))) return;
  await call(`${checkpointPath(data)}/publish`, { method: "POST" });
  notify("The checkpoint is public.");
}

async function unpublish(data) {
  await call(`${checkpointPath(data)}/publish`, { method: "DELETE" });
  notify("The checkpoint is private.");
}

async function setTtl(data) {
  const choices = [["", "never"], ["3600", "in an hour"], ["86400", "in a day"], ["604800", "in a week"], ["2592000", "in 30 days"]];
  const options = choices.map(([value, text]) => element("option", { value }, text));
  const select = element("select", { name: "value", autofocus: true }, ...options);
  const form = await ask({ title: "When does the checkpoint expire?", text: data.path, fields: [element("label", {}, "Expires", select)], action: "Save" });
  if (!form) return;
  const seconds = form.get("value");
  await call(`${checkpointPath(data)}/ttl`, { method: "PUT", body: { ttl_seconds: seconds ? Number(seconds) : null } });
  notify("The expiry was saved.");
}

async function deleteCheckpoint(data) {
  const text = `${data.path} and its files are deleted. This cannot be undone.`;
  if (!(await ask({ title: "Delete the checkpoint?", text, action: "Delete", tone: "danger" }))) return;
  await call(checkpointPath(data), { method: "DELETE" });
  notify("The checkpoint was deleted.");
}

async function download(data) {
  const { url } = await call(`${checkpointPath(data)}/archive`);
  save(url, `${data.checkpoint.replaceAll("/", "-")}.tar`);
}

async function downloadTrace(data) {
  const { url } = await call(`/api/v1/sessions/${segment(data.session)}/trace_export`);
  save(url, `${data.session}.trace.json`);
}

/** Download a signed URL of this server, under the address that the page was opened with. */
function save(url, name) {
  const { pathname, search } = new URL(url);
  element("a", { href: pathname + search, download: name }).click();
}

const ACTIONS = {
  rename,
  tags: setTags,
  "cancel-run": cancelRun,
  publish,
  unpublish,
  ttl: setTtl,
  "delete-checkpoint": deleteCheckpoint,
  download,
  trace: downloadTrace,
  copy: ({ path }) => copyText(path),
};
const READ_ONLY = new Set(["copy", "download", "trace"]);

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  const action = ACTIONS[button?.dataset.action];
  if (!action) return;
  button.closest("details.menu")?.removeAttribute("open");
  act(button, async () => {
    await action({ ...button.dataset });
    if (!READ_ONLY.has(button.dataset.action)) await refresh();
  });
});
