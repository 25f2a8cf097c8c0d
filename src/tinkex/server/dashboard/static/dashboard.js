// Refresh the page: fetch it again and update only the nodes that differ, so that scroll position,
// focus and selected text are preserved.
"use strict";

const SECONDS = 3;
const MAX_SECONDS = 30;
const live = document.getElementById("live");
const pulse = document.getElementById("pulse");
let wait = SECONDS;

function syncAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

function sync(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(document.importNode(fresh, true));
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  syncAttributes(old, fresh);
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  before.slice(after.length).forEach((node) => node.remove());
  after.forEach((node, index) => {
    if (index < before.length) sync(before[index], node);
    else old.append(document.importNode(node, true));
  });
}

function showStatus(state, text) {
  pulse.dataset.state = state;
  pulse.textContent = text;
}

async function refresh() {
  const response = await fetch(location.href, { cache: "no-store", credentials: "same-origin" });
  if (response.status === 401 || response.status === 404) {
    // Show the login or error page.
    location.reload();
    return;
  }
  if (!response.ok) throw new Error(response.statusText);
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const fresh = page.getElementById("live");
  if (!fresh) throw new Error("not a dashboard page");
  sync(live, fresh);
  document.title = page.title;
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
