// Answers that are being made: starts them, follows their streams, measures them, stops them. Drawing is left to who listens.
import { streamFitting } from "./api.js";
import { addAnswer, newAnswer, pathOf, promptParts, shownAnswer } from "./conversation.js";
import { choose, readChoices } from "./store.js";

const SAVE_EVERY = 1500;

export class Session {
  // `listener` gets "text" (an answer has grown), "state" (one began or ended) and "denied" (a token is needed), with the conversation and the answer.
  constructor(store, listener) {
    this.store = store;
    this.listener = listener;
    this.running = new Map();
    this.saved = new WeakMap();
    this.forgotten = new WeakSet();
  }

  isRunning(conversation) { return [...this.running.values()].some((one) => one.conversation === conversation); }

  // A conversation is deleted: its answers end, and it is not written again.
  forget(conversation) { this.forgotten.add(conversation); this.stop(conversation); }

  stop(conversation) { for (const one of this.running.values()) if (one.conversation === conversation) one.controller.abort(); }

  // Answer a turn in every lane, or in one.
  answer(conversation, turn, lanes = conversation.models.map((_, at) => at)) {
    const begun = lanes.map((lane) => [lane, addAnswer(turn, lane, conversation.models[lane] ?? conversation.models[0])]);
    return Promise.all(begun.map(([lane, answer]) => this.run(conversation, turn, lane, answer)));
  }

  // The same answer once more, after it failed.
  retry(conversation, turn, lane, answer) {
    Object.assign(answer, newAnswer(conversation.models[lane] ?? answer.model));
    return this.run(conversation, turn, lane, answer);
  }

  async run(conversation, turn, lane, answer) {
    const controller = new AbortController(), parts = promptParts(conversation, turn, lane), watch = new Watch(answer);
    const before = pathOf(conversation).map((one) => shownAnswer(one.turn, lane)?.leftOut ?? 0);
    const skip = Math.min(parts.pairs.length, Math.max(0, ...before));
    const chosen = Object.fromEntries(Object.entries(conversation.sampling).filter(([, value]) => value !== null));
    const body = (left) => ({
      model: answer.model, messages: [...parts.system, ...parts.pairs.slice(left).flat(), parts.last], ...chosen, stream: true, stream_options: { include_usage: true },
    });
    this.running.set(answer, { conversation, controller, turn, lane });
    conversation.updated = Date.now();
    this.save(conversation, true);
    this.listener("state", conversation, answer);
    try {
      for await (const piece of streamFitting(body, parts.pairs.length, skip, controller.signal)) {
        watch.add(piece);
        this.listener("text", conversation, answer);
        this.save(conversation);
      }
      answer.state = "done";
    } catch (problem) {
      answer.state = problem.name === "AbortError" ? "stopped" : "error";
      answer.error = answer.state === "error" ? problem.message : null;
      if (problem.status === 401) this.listener("denied", conversation, answer);
    } finally {
      watch.end();
      this.running.delete(answer);
      this.save(conversation, true);
      this.listener("state", conversation, answer);
    }
  }

  // The page goes away in the middle of answers: a database may not finish any more, a short note does. `recover` reads it.
  leaveNote() {
    const notes = [...this.running].map(([answer, one]) => ({ id: one.conversation.id, turn: one.turn.id, lane: one.lane, at: one.turn.answers[one.lane].indexOf(answer), text: answer.text }));
    if (notes.length) choose({ notes });
  }

  async recover() {
    const { notes } = readChoices();
    if (!Array.isArray(notes)) return;
    choose({ notes: undefined });
    for (const one of notes) {
      const found = await this.store.read(String(one?.id)), answer = found?.turns[one.turn]?.answers[one.lane]?.[one.at];
      if (!answer || typeof one.text !== "string" || one.text.length <= answer.text.length) continue;
      answer.text = one.text;
      await this.store.write(found);
    }
  }

  // Written at once, or every now and then while an answer grows, so that a refresh loses little.
  save(conversation, isNow = false) {
    if (this.forgotten.has(conversation)) return;
    if (!isNow && Date.now() - (this.saved.get(conversation) ?? 0) < SAVE_EVERY) return;
    this.saved.set(conversation, Date.now());
    this.store.write(conversation).catch((problem) => this.listener("unsaved", conversation, problem));
  }
}

// Time to the first token and tokens per second. Pieces stand for tokens until the server says how many there were.
class Watch {
  constructor(answer) { this.answer = answer; this.begun = performance.now(); this.first = 0; this.last = 0; this.pieces = 0; }

  add(piece) {
    const { answer } = this;
    if (piece.leftOut) answer.leftOut = piece.leftOut;
    if (piece.finish) answer.finish = piece.finish;
    if (piece.text) {
      this.last = performance.now();
      if (!this.first) { this.first = this.last; answer.stats.first = (this.first - this.begun) / 1000; }
      this.pieces++;
      answer.text += piece.text;
      answer.stats.tokens = this.pieces;
      this.measure();
    }
    if (piece.usage) {
      answer.stats.tokens = piece.usage.completion_tokens ?? answer.stats.tokens;
      answer.stats.cached = piece.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
  }

  measure() {
    const spent = (this.last - this.first) / 1000;
    if (spent > 0.05 && this.answer.stats.tokens > 1) this.answer.stats.rate = (this.answer.stats.tokens - 1) / spent;
  }

  end() { if (this.first) this.measure(); }
}
