// Forms and buttons of the operator: create and revoke keys, set quotas, add models.

import { refresh } from "./live.js";
import { act, ask, call, copyText, element, notify } from "./page.js";

// The body of each form's request.
const BODIES = {
  "/page/keys": (form) => Object.fromEntries(form),
  "/page/quotas": (form) => {
    const { tenant, ...texts } = Object.fromEntries(form);
    const limits = Object.entries(texts).map(([name, text]) => [name, text === "" ? null : Number(text)]);
    return { tenant, limits: Object.fromEntries(limits) };
  },
  "/page/models": (form) => {
    const [name, location] = JSON.parse(form.get("candidate"));
    return { name, location };
  },
};

function showKey(created) {
  const close = () => dialog.close();
  const dialog = element(
    "dialog",
    { "aria-labelledby": "new-key-title" },
    element("h2", { id: "new-key-title" }, `Key of ${created.tenant}`),
    element("p", {}, "Save it now: it is not shown again."),
    element("pre", { tabindex: "0" }, element("code", { id: "new-key" }, created.key)),
    element(
      "div",
      { class: "buttons" },
      element("button", { type: "button", class: "second", onclick: () => copyText(created.key) }, "Copy"),
      element("button", { type: "button", onclick: close }, "I have saved it"),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

async function submit(form) {
  const path = form.dataset.action;
  const reply = await call(path, { method: "POST", body: BODIES[path](new FormData(form)) });
  if (path === "/page/keys") {
    form.reset();
    showKey(reply);
  } else {
    notify(form.dataset.done);
  }
  await refresh();
}

async function press(button) {
  const answer = await ask({
    title: button.dataset.title,
    text: button.dataset.confirm,
    action: button.textContent,
    tone: "danger",
  });
  if (answer === null) return;
  await call(button.dataset.action, { method: "POST", body: JSON.parse(button.dataset.body) });
  notify(button.dataset.done);
  await refresh();
}

// Listeners of the document, because refreshing may replace the elements.
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (!form.dataset.action) return;
  event.preventDefault();
  act(event.submitter, () => submit(form));
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (button) act(button, () => press(button));
});
