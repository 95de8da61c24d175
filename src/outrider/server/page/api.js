// The API as the page uses it: a chat stream as an async generator of chunks, the models, and the metrics as numbers.
// All addresses are relative, so the page also works under a path of a proxy.

export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
  static async from(response) {
    let message = `The server answered ${response.status}.`,
      code = null;
    try {
      ({ message, code } = (await response.json()).error);
    } catch {
      /* not our JSON: keep the status */
    }
    return new ApiError(response.status, message, code);
  }
  static headers() {
    const key = sessionStorage.getItem("outrider.key");
    return key ? { Authorization: `Bearer ${key}` } : {};
  }
}

async function get(path) {
  let response;
  try {
    response = await fetch(path, { headers: ApiError.headers() });
  } catch {
    throw new Error("The server can't be reached.");
  }
  if (!response.ok) throw await ApiError.from(response);
  return response;
}

export async function* streamChat(body, signal) {
  let response;
  try {
    response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...ApiError.headers() },
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server can't be reached.");
  }
  if (!response.ok) throw await ApiError.from(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection to the server was lost.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment that keeps the connection alive
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(500, chunk.error.message, chunk.error.code);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Error("The connection to the server was lost.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The server's modalities beyond text. Some servers do not report them.
export async function readProps() {
  try {
    return await (await get("props")).json();
  } catch {
    return {};
  }
}

export const readModels = async () => (await (await get("v1/models")).json()).data;

// Sums over all labels, without the prefix: { new_tokens: 12, ttft_seconds_sum: 0.4, ... }
export async function readMetrics() {
  const totals = {};
  for (const line of (await (await get("metrics")).text()).split("\n")) {
    const match = /^(?:outrider_)?(\w+?)(?:_total)?(?:\{[^}]*\})? ([0-9.eE+-]+)$/.exec(line);
    if (match) totals[match[1]] = (totals[match[1]] ?? 0) + Number(match[2]);
  }
  return totals;
}
