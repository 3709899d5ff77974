// The server's API: errors as exceptions, a stream as an async iterator of its events.

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.param = error.param;
    this.code = error.code;
  }
}

const KEY = "pagemill.key";

/** The key that was typed in, in this tab alone; the pages share it. */
export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key) {
  sessionStorage.setItem(KEY, key);
}

export async function listModels(key) {
  return (await (await get("/v1/models", key)).json()).data;
}

/** The OpenAPI document, as text. */
export async function apiDocument(key) {
  return (await get("/openapi.json", key)).text();
}

async function get(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The events of a chat completion; aborting `signal` closes the connection, which ends the request on the server. */
export async function* streamChat(body, key, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  let done = false;
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") {
      done = true;
      continue;
    }
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(response.status, event.error);
    yield event;
  }
  if (!done) throw new Error("the connection ended before the answer was complete");
}

async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) yield event.replace(/^data: /, "");
    }
  } finally {
    reader.cancel().catch(() => {}); // it has failed or ended already
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function errorOf(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // a proxy's page, not ours: the status is all there is
  }
  return new ApiError(response.status, body?.error ?? { message: `HTTP ${response.status} ${response.statusText}` });
}
