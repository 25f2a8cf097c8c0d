// What the scripts of all pages share: requests to the server, notices, dialogs and elements.
// Texts of users become text nodes here and never markup.

const token = document.querySelector('meta[name="csrf-token"]')?.content ?? "";
const NOTICE_SECONDS = 8;

/** An answer of the server that is not a success; its message is for the user. */
export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Create an element. Attributes that start with `on` are listeners; null ones are left out. */
export function element(tag, attributes = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) created.addEventListener(name.slice(2), value);
    else created.setAttribute(name, value === true ? "" : value);
  }
  created.append(...children.filter((child) => child !== null && child !== undefined));
  return created;
}

/** Send a request as the visitor of the page; returns the response, whatever its status. */
export function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const options = { method, signal, cache: "no-store", credentials: "same-origin" };
  options.headers = { "X-CSRF-Token": token, Accept: "application/json", ...headers };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  return fetch(path, options);
}

/** Send a request and return the JSON of its answer; raises RequestError with the reason. */
export async function call(path, options = {}) {
  let response;
  try {
    response = await send(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server does not respond; try again.", 0);
  }
  const text = await response.text();
  let reply = null;
  try {
    reply = text ? JSON.parse(text) : null;
  } catch {
    // Not JSON: the status says what there is to say.
  }
  if (!response.ok) throw new RequestError(reasonOf(reply, response), response.status);
  return reply;
}

function reasonOf(reply, response) {
  const error = reply?.error ?? reply?.message ?? reply?.detail;
  const reason = typeof error === "string" ? error : error?.message;
  const text = reason || `The server answered ${response.status} ${response.statusText}`;
  return text[0].toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".");
}

/** Show a notice for some seconds; screen readers speak it. */
export function notify(text, tone = "good") {
  const close = () => notice.remove();
  const notice = element(
    "div",
    { class: `notice ${tone}`, role: tone === "bad" ? "alert" : null },
    element("span", {}, text),
    element("button", { type: "button", class: "icon", "aria-label": "Close", onclick: close }, "×"),
  );
  document.getElementById("notices").append(notice);
  // Errors stay until they are closed, so that they can be read and copied.
  if (tone !== "bad") setTimeout(close, 1000 * NOTICE_SECONDS);
}

/** Run an action; its button is busy meanwhile, and an error becomes a notice. */
export async function act(button, action) {
  if (button?.getAttribute("aria-busy") === "true") return undefined;
  button?.setAttribute("aria-busy", "true");
  try {
    return await action();
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    notify(error.message, "bad");
    return undefined;
  } finally {
    button?.removeAttribute("aria-busy");
  }
}

/** Ask in a dialog with fields; resolves to the form's data, or to null if it was cancelled. */
export function ask({ title, text, fields = [], action, tone = "" }) {
  return new Promise((resolve) => {
    const form = element(
      "form",
      { method: "dialog" },
      element("h2", { id: "dialog-title" }, title),
      text ? element("p", {}, text) : null,
      ...fields,
      element(
        "div",
        { class: "buttons" },
        element("button", { type: "button", class: "second", onclick: () => dialog.close() }, "Cancel"),
        element("button", { value: "yes", class: tone }, action),
      ),
    );
    const dialog = element("dialog", { "aria-labelledby": "dialog-title" }, form);
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes" ? new FormData(form) : null);
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Copy a text to the clipboard; without permission a hidden field does it. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", { class: "unseen", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  notify("Copied.");
}

/** Offer a file for download. */
export function saveFile(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
