// Tokens coloured by their probability. The list is one tab stop; arrow keys move within it, and the
// details of the current token are text, so that nothing depends on colour or on a pointer.

// The probabilities from which the levels 0 to 3 begin; the page has a legend of them.
const LEVELS = [0.9, 0.7, 0.4, 0.1];
// More tokens are not shown one by one: each is an element of the page.
const MAX_TOKENS = 4000;

export function createTokenView() {
  const element = document.createElement("div");
  element.className = "tokens";
  const list = document.createElement("div");
  list.className = "token-list";
  list.tabIndex = 0;
  list.setAttribute("role", "group");
  list.setAttribute("aria-label", "Tokens; arrow keys show the probabilities of each");
  const details = document.createElement("div");
  details.className = "token-details";
  details.setAttribute("role", "status");
  element.append(list, details);
  const view = { element, list, details, tokens: [], current: -1 };
  list.addEventListener("pointerover", (event) => selectTarget(view, event.target));
  list.addEventListener("click", (event) => selectTarget(view, event.target));
  list.addEventListener("keydown", (event) => onKey(view, event));
  return view;
}

// Append the tokens that the view does not show yet.
export function updateTokens(view, tokens) {
  for (const token of tokens.slice(view.tokens.length)) {
    view.tokens.push(token);
    if (view.tokens.length > MAX_TOKENS) continue;
    const element = document.createElement("span");
    element.className = `token ${levelClass(token.logprob)}`;
    element.textContent = visibleText(token.text);
    element.classList.toggle("partial", token.text === "");
    element.dataset.index = view.tokens.length - 1;
    view.list.append(element);
    if (token.text.endsWith("\n")) view.list.append(document.createElement("br"));
  }
}

export function levelClass(logprob) {
  if (typeof logprob !== "number") return "level-none";
  const level = LEVELS.findIndex((limit) => Math.exp(logprob) >= limit);
  return `level-${level < 0 ? LEVELS.length : level}`;
}

export function visibleText(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

export function formatProbability(logprob) {
  if (typeof logprob !== "number") return "no probability: it is the first token";
  const percent = 100 * Math.exp(logprob);
  return `${percent >= 0.01 ? percent.toFixed(2) : percent.toExponential(1)} %`;
}

function selectTarget(view, target) {
  const index = target.dataset?.index;
  if (index !== undefined) select(view, Number(index));
}

function onKey(view, event) {
  const last = Math.min(view.tokens.length, MAX_TOKENS) - 1;
  const moves = {
    ArrowRight: view.current + 1,
    ArrowLeft: view.current - 1,
    Home: 0,
    End: last,
  };
  if (!(event.key in moves) || last < 0) return;
  event.preventDefault();
  select(view, Math.max(0, Math.min(last, moves[event.key])));
}

function select(view, index) {
  if (index === view.current) return;
  view.list.querySelector(".token.current")?.classList.remove("current");
  view.current = index;
  view.list.querySelector(`[data-index="${index}"]`).classList.add("current");
  showDetails(view.details, view.tokens[index]);
}

function showDetails(details, token) {
  const title = document.createElement("p");
  const code = document.createElement("code");
  code.textContent = visibleText(token.name);
  const logprob = typeof token.logprob === "number" ? ` (log ${token.logprob.toFixed(4)})` : "";
  title.append(code, ` ${formatProbability(token.logprob)}${logprob}`);
  const alternatives = document.createElement("ol");
  for (const each of token.alternatives) {
    const row = document.createElement("li");
    const text = document.createElement("code");
    text.textContent = visibleText(each.name);
    const bar = document.createElement("meter");
    bar.value = Math.exp(each.logprob);
    bar.setAttribute("aria-hidden", "true");
    row.append(text, bar, ` ${formatProbability(each.logprob)}`);
    if (each.name === token.name) row.className = "chosen";
    alternatives.append(row);
  }
  details.replaceChildren(title, alternatives);
}
