// The conversation as elements of the page. Elements are kept between updates, so that focus, selected
// text and opened editors survive while tokens arrive.

import { describeAnswer } from "./answer_state.js";
import { copyText } from "./page.js";
import { createTokenView, updateTokens } from "./token_view.js";

const views = new WeakMap();

export function renderTurns(log, turns, state, actions) {
  const wanted = turns.map((turn) => turnView(turn).element);
  [...log.children].filter((child) => !wanted.includes(child)).forEach((child) => child.remove());
  wanted.forEach((element, index) => {
    if (log.children[index] !== element) log.insertBefore(element, log.children[index] ?? null);
  });
  turns.forEach((turn) => updateTurn(turn, state, actions));
}

function turnView(turn) {
  if (!views.has(turn)) {
    const element = create("section", "turn");
    const prompt = create("article", "message user");
    prompt.setAttribute("aria-label", turn.isChat ? "You" : "Text");
    const answers = create("div", "answers");
    element.append(prompt, answers);
    views.set(turn, { element, prompt, answers, shownPrompt: null, panes: [] });
  }
  return views.get(turn);
}

function updateTurn(turn, state, actions) {
  const view = turnView(turn);
  if (view.shownPrompt !== turn.prompt) {
    view.shownPrompt = turn.prompt;
    showPrompt(view.prompt, turn, actions);
  }
  view.answers.dataset.panes = Math.max(turn.answers.length, 1);
  turn.answers.forEach((answer, pane) => {
    if (answer) updateAnswer(view, turn, answer, pane, state, actions);
  });
  view.panes.splice(turn.answers.length).forEach((each) => each.element.remove());
}

function showPrompt(element, turn, actions) {
  const text = create("div", "text", turn.prompt);
  const head = heading(turn.isChat ? "You" : "Text");
  element.replaceChildren(head, text);
  if (!turn.isChat) return;
  const edit = button("Edit", () =>
    openEditor(element, turn.prompt, "Send again", (changed) => {
      // Shown again even if the text is the same.
      views.get(turn).shownPrompt = null;
      actions.editPrompt(turn, changed);
    }, () => showPrompt(element, turn, actions)),
  );
  head.append(toolbar(edit));
}

function updateAnswer(view, turn, answer, pane, state, actions) {
  let shown = view.panes[pane];
  if (!shown || shown.answer !== answer) {
    const fresh = answerView(turn, answer, pane, actions);
    if (shown) shown.element.replaceWith(fresh.element);
    else view.answers.append(fresh.element);
    view.panes[pane] = shown = fresh;
  }
  appendText(shown.reasoning, answer.reasoning);
  shown.reasoningBox.hidden = !answer.reasoning;
  appendText(shown.text, answer.text);
  updateTokens(shown.tokens, answer.tokens);
  const hasTokens = answer.tokens.length > 0;
  shown.tokens.element.hidden = !hasTokens;
  shown.text.hidden = hasTokens;
  shown.error.textContent = answer.error ?? "";
  shown.error.hidden = !answer.error;
  const isOpen = answer.endedAt === null && !answer.isEdited;
  shown.element.classList.toggle("is-open", isOpen);
  shown.note.textContent = answer.isEdited ? "edited" : describeAnswer(answer);
  shown.tools.hidden = state.isRunning || isOpen;
}

function answerView(turn, answer, pane, actions) {
  const element = create("article", "message assistant");
  element.setAttribute("aria-label", `Answer of ${answer.model}`);
  const reasoningBox = create("details", "reasoning");
  const reasoning = create("div", "text");
  reasoningBox.append(create("summary", "", "Reasoning"), reasoning);
  const text = create("div", "text");
  const tokens = createTokenView();
  const error = create("p", "bad");
  error.setAttribute("role", "alert");
  const note = create("p", "note");
  const body = create("div", "body");
  body.append(reasoningBox, text, tokens.element, error);
  const tools = toolbar(
    button("Regenerate", () => actions.regenerate(turn, pane)),
    button("Copy", () => copyText(answer.text)),
  );
  if (turn.isChat) {
    const edit = button("Edit", () =>
      openEditor(body, answer.text, "Save", (changed) => actions.editAnswer(turn, pane, changed), () =>
        body.replaceChildren(reasoningBox, text, tokens.element, error),
      ),
    );
    tools.append(edit);
  }
  const head = heading(answer.label ?? answer.model);
  head.title = answer.model;
  head.append(tools);
  element.append(head, body, note);
  return { answer, element, reasoningBox, reasoning, text, tokens, error, note, tools };
}

// Append what is new, so that the text that is already shown stays selected.
function appendText(element, text) {
  const length = Number(element.dataset.length ?? 0);
  if (text.length > length) element.append(text.slice(length));
  element.dataset.length = text.length;
}

function openEditor(element, text, label, onSave, onCancel) {
  const area = create("textarea", "editor");
  area.value = text;
  area.rows = Math.min(12, text.split("\n").length + 1);
  area.setAttribute("aria-label", "Edit");
  const save = button(label, () => onSave(area.value));
  const cancel = button("Cancel", onCancel);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      onCancel();
    }
  });
  element.replaceChildren(area, toolbar(save, cancel));
  area.focus();
}

function heading(text) {
  const element = create("div", "head");
  const title = create("h3");
  const name = document.createElement("bdi");
  name.textContent = text;
  title.append(name);
  element.append(title);
  return element;
}

function toolbar(...buttons) {
  const element = create("div", "tools");
  element.append(...buttons);
  return element;
}

function button(label, onClick) {
  const element = create("button", "plain", label);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}

function create(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
