// The server: what it has, how it is doing, and answers as they are made (server-sent events in OpenAI's shape).
import { say } from "./words.js";

const TOKEN = "headway-serve-token";
let token = "";
try { token = sessionStorage.getItem(TOKEN) || ""; } catch { /* storage may be off */ }

export const signIn = (value) => {
  token = value.trim();
  try { sessionStorage.setItem(TOKEN, token); } catch { /* storage may be off */ }
};

export class ApiError extends Error {
  constructor(message, status = 0, code = null) { super(message); this.status = status; this.code = code; }
}

const request = async (path, options = {}) => {
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}), ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let answer;
  try { answer = await fetch(path, { cache: "no-store", credentials: "same-origin", ...options, headers }); } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ApiError(say("offline"));
  }
  if (answer.ok) return answer;
  throw failed(await answer.text().catch(() => ""), answer.status, answer.headers.get("Retry-After"));
};

const failed = (body, status, wait) => {
  if (status === 401 || status === 403) return new ApiError(say(token ? "wrongToken" : "needToken"), 401);
  let found = null;
  try { found = JSON.parse(body); } catch { /* not JSON: a proxy's page */ }
  const error = found?.error ?? found, message = typeof error === "string" ? error : error?.message ?? found?.detail;
  const line = typeof message === "string" && message.trim() ? message.trim() : `HTTP ${status}`;
  return new ApiError(wait ? `${line} (${wait} s)` : line, status, error?.code ?? null);
};

const json = async (path) => (await request(path)).json();

// Models by name with what they take. Names come from /v1/models, which lists adapters too; abilities from /api/info.
export const readInfo = async () => {
  const [info, listed] = await Promise.all([json("api/info"), json("v1/models")]);
  const known = new Map((info.models ?? []).map((one) => [one.name, one]));
  const models = (listed.data ?? []).map((one) => ({ name: one.id, ...abilities(known.get(one.id) ?? baseOf(known, one)) }));
  return { version: info.version ?? "", models };
};

// An adapter has the abilities of its model.
const baseOf = (known, one) => [...known.values()].find((base) => base.name === one.root || base.name === one.parent || (base.adapters ?? []).includes(one.id)) ?? {};

const abilities = (one) => ({
  context: one.context_length ?? null, images: Boolean(one.images), audio: Boolean(one.audio), hasTemplate: one.has_template !== false, masks: Boolean(one.masks),
});

export const readLive = () => json("api/live");

const isTooLong = (problem) => problem.code === "context_length_exceeded";

// Pieces of an answer: { text } as they come, at the end { finish } and { usage }.
export async function* streamAnswer(body, signal) {
  const answer = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  let isComplete = false;
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") { isComplete = true; break; }
    let found;
    try { found = JSON.parse(data); } catch { throw new ApiError(say("cutOff")); }
    if (found.error) throw failed(JSON.stringify(found), found.error.status ?? 500);
    const choice = found.choices?.[0];
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) { isComplete = true; yield { finish: choice.finish_reason }; }
    if (found.usage) yield { usage: found.usage };
  }
  if (!isComplete) throw new ApiError(say("cutOff"));
}

// As `streamAnswer`. While the server says that the prompt is longer than the context, the oldest turns are left out.
export async function* streamFitting(makeBody, turns, skip, signal) {
  for (let left = skip; ; left++) {
    try {
      let isFirst = true;
      for await (const piece of streamAnswer(makeBody(left), signal)) {
        if (isFirst && left > 0) yield { leftOut: left };
        isFirst = false;
        yield piece;
      }
      return;
    } catch (problem) {
      if (!isTooLong(problem) || left >= turns) throw problem;
    }
  }
}

// The data of server-sent events.
export async function* events(stream) {
  const reader = stream.getReader(), decoder = new TextDecoder();
  let buffer = "", data = [];
  try {
    for (;;) {
      let part;
      try { part = await reader.read(); } catch (problem) {
        if (problem.name === "AbortError") throw problem;
        throw new ApiError(say("cutOff"));
      }
      buffer += part.done ? decoder.decode() : decoder.decode(part.value, { stream: true });
      const lines = buffer.split(/\r\n|\n|\r(?!$)/);
      buffer = part.done ? "" : lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) { yield data.join("\n"); data = []; }
      }
      if (part.done) return;
    }
  } finally { reader.cancel().catch(() => {}); }
}
