// Keeps the page current: asks for the same page again and changes only what is different, so that
// scrolling, focus and selected text stay as they are.
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

function say(state, text) {
  pulse.dataset.state = state;
  pulse.textContent = text;
}

async function refresh() {
  const answer = await fetch(location.href, { cache: "no-store", credentials: "same-origin" });
  if (answer.status === 401 || answer.status === 404) {
    // The page itself says what to do.
    location.reload();
    return;
  }
  if (!answer.ok) throw new Error(answer.statusText);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live");
  if (!fresh) throw new Error("not our page");
  sync(live, fresh);
  document.title = page.title;
}

async function loop() {
  if (!document.hidden) {
    try {
      await refresh();
      wait = SECONDS;
      say("live", "live");
    } catch {
      wait = Math.min(2 * wait, MAX_SECONDS);
      say("lost", "the server does not answer");
    }
  }
  setTimeout(loop, 1000 * wait);
}

say("live", "live");
setTimeout(loop, 1000 * wait);
