import { events, streamFitting } from "./api.js";
const stream = (chunks) => new ReadableStream({ start(one) { for (const chunk of chunks) one.enqueue(chunk); one.close(); } });
const bytes = new TextEncoder().encode('data: {"a":"你"}\n\n: comment\r\ndata: 1\r\ndata: 2\r\n\r\ndata: [DONE]\n\n');
const seen = { events: [], cuts: true };
for (let size = 1; size < 9; size++) {
  const chunks = [];
  for (let at = 0; at < bytes.length; at += size) chunks.push(bytes.slice(at, at + size));
  const found = [];
  for await (const one of events(stream(chunks))) found.push(one);
  if (size === 1) seen.events = found; else if (JSON.stringify(found) !== JSON.stringify(seen.events)) seen.cuts = false;
}
const asked = [];
globalThis.fetch = async (_, { body }) => {
  const left = JSON.parse(body).left;
  asked.push(left);
  if (left < 2) return new Response(JSON.stringify({ error: { message: "too long", code: "context_length_exceeded" } }), { status: 400 });
  return new Response('data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n');
};
const collect = async (turns) => { const found = []; try { for await (const one of streamFitting((left) => ({ left }), turns, 0)) found.push(one); } catch (problem) { found.push(problem.message); } return found; };
seen.fits = await collect(5);
seen.asked = [...asked];
seen.never = await collect(1);
globalThis.fetch = async () => new Response('data: {"choices":[{"delta":{"content":"hi"}}]}\n\n');
seen.cutOff = await collect(0);
globalThis.fetch = async () => { throw new TypeError("network"); };
seen.offline = await collect(0);
console.log(JSON.stringify(seen));
