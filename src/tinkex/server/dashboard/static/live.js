// Keep a page up to date: fetch it again and change only the nodes that differ, so that scroll
// position, focus, input and selected text are preserved. Elements with `data-own` belong to
// scripts and are left alone; `data-key` identifies an element among its siblings.

const SECONDS = 3;
const MAX_SECONDS = 30;
const main = document.getElementById("main");
const pulse = document.getElementById("pulse");
const policy = globalThis.trustedTypes?.createPolicy("page", {
  // DOMParser creates documents whose scripts do not run; nodes are compared, not inserted as text.
  createHTML: (text) => text,
}) ?? { createHTML: (text) => text };
let wait = SECONDS;

function syncAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !name.startsWith("aria-busy")) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

const keyOf = (node) => node.dataset?.key;
const isOwned = (node) => node.dataset?.own !== undefined;

function sync(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  // An open element stays open, and its content is not changed under the user's hands.
  if (isOwned(old) || (old.nodeName === "DETAILS" && old.open && !fresh.open)) {
    if (isOwned(old)) return;
    fresh.setAttribute("open", "");
  }
  syncAttributes(old, fresh);
  syncChildren(old, fresh);
}

function syncChildren(old, fresh) {
  const keyed = new Map([...old.children].filter(keyOf).map((node) => [keyOf(node), node]));
  let next = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = keyOf(wanted);
    const match = key === undefined ? next : keyed.get(key);
    if (match && isSameKind(match, wanted)) {
      if (match === next) next = next.nextSibling;
      else old.insertBefore(match, next);
      sync(match, wanted);
    } else {
      const copy = document.importNode(wanted, true);
      if (next && key === undefined && keyOf(next) === undefined) {
        const after = next.nextSibling;
        next.replaceWith(copy);
        next = after;
      } else old.insertBefore(copy, next);
    }
  }
  while (next) {
    const after = next.nextSibling;
    next.remove();
    next = after;
  }
}

function isSameKind(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);
}

function showStatus(state, text) {
  if (pulse.textContent === text) return;
  pulse.dataset.state = state;
  pulse.textContent = text;
}

/** Fetch the page again and update what has changed. */
export async function refresh() {
  const response = await fetch(location.href, { cache: "no-store", credentials: "same-origin" });
  if (response.status === 401 || response.status === 404) {
    // Show the login or error page.
    location.reload();
    return;
  }
  if (!response.ok) throw new Error(response.statusText);
  const html = policy.createHTML(await response.text());
  const page = new DOMParser().parseFromString(html, "text/html");
  const fresh = page.getElementById("main");
  if (!fresh) throw new Error("not a page of the server");
  if (!document.querySelector("dialog[open]")) sync(main, fresh);
  document.title = page.title;
  document.dispatchEvent(new CustomEvent("refresh"));
}

async function loop() {
  if (!document.hidden) {
    try {
      await refresh();
      wait = SECONDS;
      showStatus("live", "live");
    } catch {
      wait = Math.min(2 * wait, MAX_SECONDS);
      showStatus("lost", "the server does not respond");
    }
  }
  setTimeout(loop, 1000 * wait);
}

showStatus("live", "live");
setTimeout(loop, 1000 * wait);
