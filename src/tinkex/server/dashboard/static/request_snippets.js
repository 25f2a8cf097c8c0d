// The same request as code: with tinkex, with the openai package, and with curl.

const KEY_PLACEHOLDER = "tml-...";

// `request` is {path, body} as the page sends it; `source` is {baseModel} or {modelPath} for tinkex.
export function snippets(baseUrl, request, source) {
  const { stream, stream_options: _, ...body } = request.body;
  return {
    python: tinkexSnippet(baseUrl, body, source),
    openai: openaiSnippet(baseUrl, request.path, body),
    curl: curlSnippet(baseUrl, request.path, body),
  };
}

// A value as a Python expression. JSON texts are valid Python texts, but not its other words.
export function toPython(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((each) => inner + toPython(each, inner))
    : Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${toPython(each, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length ? `${open}\n${items.join(",\n")},\n${indent}${close}` : open + close;
}

function tinkexSnippet(baseUrl, body, source) {
  const target = source.modelPath
    ? `model_path=${JSON.stringify(source.modelPath)}`
    : `base_model=${JSON.stringify(source.baseModel)}`;
  const names = ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop"];
  const params = names
    .filter((name) => body[name] !== undefined)
    .map((name) => `    ${name}=${toPython(body[name], "    ")},`);
  const prompt = body.messages
    ? `messages = ${toPython(body.messages)}
tokens = tinkex.text.render_chat(tokenizer, messages, add_generation_prompt=True)`
    : `tokens = tinkex.text.encode(tokenizer, ${JSON.stringify(body.prompt)})`;
  return `import tinkex
import tinkex.text

service = tinkex.ServiceClient(base_url=${JSON.stringify(baseUrl)}, api_key="${KEY_PLACEHOLDER}")
sampling = service.create_sampling_client(${target})
tokenizer = sampling.get_tokenizer()
${prompt}
params = tinkex.SamplingParams(
${params.join("\n")}
)
prompt = tinkex.ModelInput.from_ints(tokens)
result = sampling.sample(prompt, num_samples=1, sampling_params=params).result()
print(tokenizer.decode(result.sequences[0].tokens))
`;
}

function openaiSnippet(baseUrl, path, body) {
  const standard = { ...body };
  const extra = {};
  if ("top_k" in standard) {
    extra.top_k = standard.top_k;
    delete standard.top_k;
  }
  if (Object.keys(extra).length) standard.extra_body = extra;
  const method = path.endsWith("/chat/completions") ? "chat.completions" : "completions";
  const text = method === "completions" ? "text" : "message.content";
  const fields = Object.entries(standard).map(([name, value]) => `    ${name}=${toPython(value, "    ")},`);
  return `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${baseUrl}/v1`)}, api_key="${KEY_PLACEHOLDER}")
answer = client.${method}.create(
${fields.join("\n")}
)
print(answer.choices[0].${text})
`;
}

function curlSnippet(baseUrl, path, body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${quoteShell(baseUrl + path)} \\
  -H 'Authorization: Bearer ${KEY_PLACEHOLDER}' \\
  -H 'Content-Type: application/json' \\
  -d '${json}'
`;
}

function quoteShell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
