// The API as the page uses it: a chat stream as an async generator of chunks, and the metrics as numbers.

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
  static async from(response) {
    let message = `The server answered ${response.status}.`;
    try { message = (await response.json()).error.message; } catch { /* not our JSON: keep the status */ }
    return new ApiError(response.status, message);
  }
  static headers() {
    const key = sessionStorage.getItem("outrider.key");
    return key ? { Authorization: `Bearer ${key}` } : {};
  }
}

export async function* streamChat(body, signal) {
  let response;
  try {
    response = await fetch("/v1/chat/completions", {
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
        if (chunk.error) throw new ApiError(500, chunk.error.message);
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

export async function readMetrics() {
  const response = await fetch("/metrics", { headers: ApiError.headers() });
  if (!response.ok) throw await ApiError.from(response);
  const totals = {};
  for (const line of (await response.text()).split("\n")) {
    const match = /^outrider_(\w+?)(?:_total)?(?:\{[^}]*\})? ([0-9.eE+-]+)$/.exec(line);
    if (match) totals[match[1]] = (totals[match[1]] ?? 0) + Number(match[2]);
  }
  const pick = (name) => totals[name] ?? 0;
  return {
    new_tokens: pick("new_tokens"), cycles: pick("cycles"), drafted: pick("drafted"), accepted: pick("accepted"),
    in_flight: pick("sequences_in_flight"), finished: pick("finished"), cached_tokens: pick("cached_tokens"),
  };
}
