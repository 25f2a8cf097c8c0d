// The state of an answer while its chunks arrive. Values only; no access to the page.

export function newAnswer(model, startedAt) {
  return {
    model,
    text: "",
    reasoning: "",
    tokens: [],
    // Joins the bytes of characters that consist of several tokens.
    decoder: new TextDecoder(),
    finishReason: null,
    usage: null,
    error: null,
    isStopped: false,
    startedAt,
    firstAt: null,
    endedAt: null,
  };
}

// Add a chunk of /v1/chat/completions or /v1/completions.
export function addChunk(answer, chunk, now) {
  if (chunk.usage) answer.usage = chunk.usage;
  for (const choice of chunk.choices ?? []) {
    if (choice.index) continue;
    const text = choice.delta?.content ?? choice.text ?? "";
    const reasoning = choice.delta?.reasoning_content ?? "";
    if (answer.firstAt === null && (text || reasoning)) answer.firstAt = now;
    answer.text += text;
    answer.reasoning += reasoning;
    answer.text += toolCallText(choice.delta?.tool_calls);
    answer.tokens.push(...readTokens(choice.logprobs, answer.decoder));
    if (choice.finish_reason) answer.finishReason = choice.finish_reason;
  }
}

function toolCallText(calls) {
  return (calls ?? [])
    .map((call) => (call.function?.name ? `\n${call.function.name}` : "") + (call.function?.arguments ?? ""))
    .join("");
}

// Tokens of the logprobs of either endpoint: {text, name, logprob, alternatives: [{name, logprob}]}.
// The texts together are the answer; the name of a token that is a part of a character is its bytes.
export function readTokens(logprobs, decoder) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((entry) => ({
      text: entry.bytes ? decoder.decode(Uint8Array.from(entry.bytes), { stream: true }) : entry.token,
      name: tokenName(entry),
      logprob: entry.logprob,
      alternatives: (entry.top_logprobs ?? []).map((each) => ({ name: tokenName(each), logprob: each.logprob })),
    }));
  }
  return (logprobs.tokens ?? []).map((text, index) => ({
    text,
    name: text,
    logprob: logprobs.token_logprobs[index],
    alternatives: Object.entries(logprobs.top_logprobs?.[index] ?? {})
      .map(([name, logprob]) => ({ name, logprob }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}

function tokenName({ token, bytes }) {
  if (!bytes || !token.includes("\ufffd")) return token;
  return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
}

// One line about an answer: why it ended, how many tokens, how fast.
export function describeAnswer(answer) {
  const parts = [];
  if (answer.isStopped) parts.push("stopped");
  else if (answer.finishReason === "length") parts.push("ended at the token limit");
  else if (answer.finishReason === "tool_calls") parts.push("ended with a tool call");
  if (answer.usage) {
    const cached = answer.usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${answer.usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}`);
    parts.push(`${answer.usage.completion_tokens} tokens`);
  }
  if (answer.firstAt !== null) parts.push(`first after ${seconds(answer.firstAt - answer.startedAt)}`);
  const generating = (answer.endedAt ?? 0) - (answer.firstAt ?? 0);
  const count = (answer.usage?.completion_tokens ?? 0) - 1;
  if (answer.endedAt !== null && answer.firstAt !== null && generating > 50 && count > 0) {
    parts.push(`${((1000 * count) / generating).toFixed(1)} tokens/s`);
  }
  return parts.join(" · ");
}

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
