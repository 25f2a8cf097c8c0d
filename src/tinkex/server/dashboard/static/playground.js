// The playground: chat with one model or two side by side, or complete a raw text.

import { addChunk, newAnswer } from "./answer_state.js";
import { streamAnswer } from "./inference_stream.js";
import { call, copyText, element } from "./page.js";
import { renderTurns } from "./playground_turns.js";
import { snippets } from "./request_snippets.js";

const NUM_ALTERNATIVES = 5;
// The message of the shown code while there is none.
const EXAMPLE = "Hello!";
const root = document.getElementById("playground");
const find = (name) => document.getElementById(`play-${name}`);
const turns = [];
let running = null;

// --- what the controls say ---------------------------------------------------------------------

function isChat() {
  return root.querySelector("input[name=mode]:checked").value === "chat";
}

function chosenModel(index) {
  const chosen = find(`model-${index}`).value;
  return chosen === "other" ? find(`path-${index}`).value.trim() : chosen;
}

// The text of a listed model, which is shorter than the path of a checkpoint.
function labelOf(model) {
  return [...find("model-0").options].find((option) => option.value === model)?.text ?? model;
}

function chosenModels() {
  return find("compare").checked ? [chosenModel(0), chosenModel(1)] : [chosenModel(0)];
}

function readNumber(name) {
  const text = find(name).value.trim();
  return text === "" ? undefined : Number(text);
}

function samplingFields() {
  const stop = find("stop").value.split("\n").filter((line) => line);
  const fields = {
    max_tokens: readNumber("max-tokens"),
    temperature: readNumber("temperature"),
    top_p: readNumber("top-p"),
    top_k: readNumber("top-k"),
    seed: readNumber("seed"),
    stop: stop.length ? stop.map((line) => line.replaceAll("\\n", "\n")) : undefined,
  };
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
}

// --- requests ------------------------------------------------------------------------------------

function chatRequest(model, pane, conversation) {
  const messages = [];
  const system = find("system").value;
  if (system.trim()) messages.push({ role: "system", content: system });
  conversation.forEach((turn, index) => {
    messages.push({ role: "user", content: turn.prompt });
    const answer = turn.answers[pane];
    if (index < conversation.length - 1 && answer) messages.push({ role: "assistant", content: answer.text });
  });
  const probabilities = find("probabilities").checked ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : {};
  return { path: "/v1/chat/completions", body: { model, messages, ...samplingFields(), ...probabilities } };
}

function completionRequest(model, prompt) {
  const probabilities = find("probabilities").checked ? { logprobs: NUM_ALTERNATIVES } : {};
  const echo = find("echo").checked ? { echo: true } : {};
  return { path: "/v1/completions", body: { model, prompt, ...samplingFields(), ...probabilities, ...echo } };
}

// The request that answers the last of some turns.
function requestOf(conversation, model, pane) {
  const last = conversation.at(-1);
  return last.isChat ? chatRequest(model, pane, conversation) : completionRequest(model, last.prompt);
}

async function generate(turn, pane, model, signal) {
  const answer = newAnswer(model, performance.now());
  answer.label = labelOf(model);
  turn.answers[pane] = answer;
  const { path, body } = requestOf(turns.slice(0, turns.indexOf(turn) + 1), model, pane);
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  try {
    for await (const chunk of streamAnswer(path, streamed, signal)) {
      addChunk(answer, chunk, performance.now());
      schedulePaint();
    }
  } catch (error) {
    if (signal.aborted) answer.isStopped = true;
    else answer.error = error instanceof TypeError ? "The server does not respond." : error.message;
  }
  answer.endedAt = performance.now();
  schedulePaint();
}

// Answer a turn with the chosen models, or only in one pane.
async function answerTurn(turn, panes) {
  const controller = new AbortController();
  running = controller;
  const models = chosenModels();
  turn.answers.length = Math.min(turn.answers.length, models.length);
  showRunning(true);
  const answers = models.map((model, pane) =>
    panes.includes(pane) ? generate(turn, pane, model, controller.signal) : null,
  );
  // The previous answer disappears before the first token comes.
  paint();
  await Promise.all(answers);
  running = null;
  showRunning(false);
  paint();
}

// --- actions of the user ---------------------------------------------------------------------------

function send() {
  const prompt = find("prompt").value;
  if (running || !prompt.trim()) return;
  const missing = chosenModels().findIndex((model) => !model);
  if (missing >= 0) {
    find(`path-${missing}`).focus();
    return;
  }
  if (!isChat()) turns.length = 0;
  else if (turns.length && !turns[0].isChat) turns.length = 0;
  const turn = { prompt, isChat: isChat(), answers: [] };
  turns.push(turn);
  if (isChat()) find("prompt").value = "";
  answerTurn(turn, [0, 1]);
}

const actions = {
  regenerate(turn, pane) {
    if (running) return;
    turns.length = turns.indexOf(turn) + 1;
    answerTurn(turn, [pane]);
  },
  editPrompt(turn, text) {
    if (running || !text.trim()) return;
    turn.prompt = text;
    turn.answers.length = 0;
    turns.length = turns.indexOf(turn) + 1;
    answerTurn(turn, [0, 1]);
  },
  editAnswer(turn, pane, text) {
    const before = turn.answers[pane];
    const answer = newAnswer(before.model, 0);
    answer.label = before.label;
    answer.text = text;
    answer.isEdited = true;
    turn.answers[pane] = answer;
    paint();
  },
};

function stop() {
  running?.abort();
}

function clear() {
  stop();
  turns.length = 0;
  paint();
  find("prompt").focus();
}

// --- code ------------------------------------------------------------------------------------------

function sourceOf(model) {
  const option = [...find("model-0").options].find((each) => each.value === model);
  const path = option?.dataset.path || (model.startsWith("tinker://") ? model : model.split(";")[1]);
  return path ? { modelPath: path } : { baseModel: model };
}

function showCode() {
  const draft = find("prompt").value.trim();
  const earlier = turns.filter((turn) => turn.isChat === isChat());
  const drafted = { prompt: draft || EXAMPLE, isChat: isChat(), answers: [] };
  const conversation = draft || !earlier.length ? [...earlier, drafted] : earlier;
  const model = chosenModel(0);
  const code = snippets(location.origin, requestOf(conversation, model, 0), sourceOf(model));
  find("code").textContent = code[find("language").value];
}

// --- the page ----------------------------------------------------------------------------------------

let isPaintPending = false;

function schedulePaint() {
  if (isPaintPending) return;
  isPaintPending = true;
  requestAnimationFrame(paint);
}

function paint() {
  isPaintPending = false;
  const log = find("log");
  const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
  renderTurns(log, turns, { isRunning: running !== null, numPanes: chosenModels().length }, actions);
  root.classList.toggle("is-empty", turns.length === 0);
  if (isAtEnd && running) scrollTo(0, document.documentElement.scrollHeight);
}

function showRunning(isRunning) {
  find("log").setAttribute("aria-busy", String(isRunning));
  find("send").hidden = isRunning;
  find("stop-button").hidden = !isRunning;
  find("status").textContent = isRunning ? "Answering…" : endMessage();
}

function endMessage() {
  const answers = turns.at(-1)?.answers ?? [];
  if (answers.some((answer) => answer?.error)) return "The request failed.";
  return answers.some((answer) => answer?.isStopped) ? "Stopped." : "The answer is complete.";
}

function showControls() {
  root.classList.toggle("is-chat", isChat());
  root.classList.toggle("is-comparing", find("compare").checked);
  for (const index of [0, 1]) {
    const isOther = find(`model-${index}`).value === "other";
    find(`path-${index}`).hidden = !isOther;
  }
  find("echo-field").hidden = isChat();
  find("system-field").hidden = !isChat();
  find("legend").hidden = !find("probabilities").checked;
  find("second-model").hidden = !find("compare").checked;
  const purpose = isChat() ? "Message" : "Text to continue";
  find("prompt-label").textContent = purpose;
  find("prompt").placeholder = isChat() ? purpose : `${purpose}; Ctrl+Enter sends it`;
}

function onPromptKey(event) {
  const isSend = event.key === "Enter" && !event.shiftKey && (isChat() || event.ctrlKey || event.metaKey);
  if (isSend && !event.isComposing) {
    event.preventDefault();
    find("form").requestSubmit();
  }
}

// Aliases come from the list of models, in which they have the path of their checkpoint.
async function addAliases() {
  const { data } = await call("/v1/models?limit=1000");
  const aliases = data.filter(({ id, root, parent }) => parent && root && root !== id);
  if (!aliases.length) return;
  for (const index of [0, 1]) {
    const options = aliases.map(({ id, root }) => element("option", { value: id, "data-path": root }, id));
    const group = element("optgroup", { label: "Aliases" }, ...options);
    find(`model-${index}`).firstElementChild.after(group);
  }
  selectFromAddress();
  showControls();
}

function selectFromAddress() {
  const model = new URLSearchParams(location.search).get("model");
  if (!model) return;
  const select = find("model-0");
  const isListed = [...select.options].some((option) => option.value === model);
  select.value = isListed ? model : "other";
  if (!isListed) find("path-0").value = model;
}

selectFromAddress();
find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("form").addEventListener("change", showControls);
// A field can only say what is wrong with it while it is visible.
find("settings").addEventListener("invalid", () => (find("settings").open = true), true);
find("prompt").addEventListener("keydown", onPromptKey);
find("stop-button").addEventListener("click", stop);
find("clear").addEventListener("click", clear);
find("code-panel").addEventListener("toggle", showCode);
find("language").addEventListener("change", showCode);
find("copy").addEventListener("click", () => copyText(find("code").textContent));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) stop();
});
if (matchMedia("(max-width: 800px)").matches) find("settings").open = false;
showControls();
paint();
// Without them, aliases can still be typed.
addAliases().catch(() => {});
