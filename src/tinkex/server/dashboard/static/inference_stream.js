// Requests to the OpenAI-compatible endpoints, and their streams of server-sent events.

import { RequestError, send } from "./page.js";

// An event is at most this long; the server sends far shorter ones.
const MAX_EVENT_CHARS = 4_000_000;


// Yield the chunks of an answer. Ends when the answer is complete, and throws RequestError with a
// sentence for the user if it is not. Aborting the signal cancels the request on the server.
export async function* streamAnswer(path, body, signal) {
  const headers = { Accept: "text/event-stream" };
  const response = await send(path, { method: "POST", body, headers, signal });
  if (!response.ok) throw new RequestError(await readError(response), response.status);
  if ((response.headers.get("content-type") || "").startsWith("application/json")) {
    yield wholeAnswerAsChunk(await response.json());
    return;
  }
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new RequestError(chunk.error.message, 0);
    yield chunk;
  }
  throw new RequestError("The connection ended before the answer was complete.", 0);
}

// Yield the data of each server-sent event; comments, which keep the connection open, are skipped.
export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? "" : value.replaceAll("\r\n", "\n");
      const events = rest.split("\n\n");
      rest = events.pop();
      if (rest.length > MAX_EVENT_CHARS) throw new RequestError("The server sent too long an event.", 0);
      for (const event of events) {
        const data = eventData(event);
        if (data) yield data;
      }
      if (done) return;
    }
  } finally {
    // Also when the caller stops early: the server then cancels what is still running.
    reader.cancel().catch(() => {});
  }
}

function eventData(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

async function readError(response) {
  try {
    const body = await response.json();
    const error = body.error ?? body.detail ?? body;
    return String(error.message ?? error);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// The chunk that a stream with the whole answer in one piece would have.
export function wholeAnswerAsChunk(answer) {
  const choices = answer.choices.map((choice) => ({ ...choice, delta: choice.message }));
  return { ...answer, choices };
}
