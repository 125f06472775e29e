// A conversation as data: turns, versions of turns, alternative answers. No drawing, no network; the tests run it in node.
//
//   fork { turns, shown }          versions of one question, by the turns' ids; an edit adds one
//   turn { prompt, answers[lane][], shown[lane], next }
//   next: { "0": fork, "1,0": fork }   what follows, for each choice of shown answers: an earlier choice keeps its continuation
//
// Turns lie side by side in `conversation.turns`: nested in each other, a long conversation would be too deep for readers of JSON.
// A lane is a model: one, or two side by side. The path from the root over what is shown is the conversation a person sees.
export const DEFAULTS = { temperature: 0.7, top_p: null, top_k: null, max_tokens: null, seed: null };
export const RANGES = {
  temperature: { min: 0, max: 5, step: 0.05 }, top_p: { min: 0.01, max: 1, step: 0.01 }, top_k: { min: 1, max: 1000000, step: 1 },
  max_tokens: { min: 1, max: 10000000, step: 1 }, seed: { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
};
const MOST_TURNS = 100000;

export const newId = () => {
  const random = crypto.getRandomValues(new Uint8Array(9));
  return Array.from(random, (one) => one.toString(36).padStart(2, "0")).join("");
};

export const newConversation = (models, now = Date.now()) => ({
  id: newId(), title: "", created: now, updated: now, models: [...models], system: "", sampling: { ...DEFAULTS },
  root: newFork(), turns: {},
});

const newFork = () => ({ turns: [], shown: 0 });

const newTurn = (prompt, lanes) => ({ id: newId(), prompt, answers: Array.from({ length: lanes }, () => []), shown: Array(lanes).fill(0), next: {} });

export const newAnswer = (model) => ({ model, text: "", state: "running", finish: null, error: null, leftOut: 0, stats: {} });

const forkAfter = (turn) => turn.next[turn.shown.join(",")];

// The shown turns, each with the fork it is a version of.
export const pathOf = (conversation) => {
  const path = [], seen = new Set();
  let fork = conversation.root;
  while (fork && fork.turns.length) {
    const turn = conversation.turns[fork.turns[fork.shown]];
    if (!turn || seen.has(turn)) break; // a file may hold a circle
    seen.add(turn);
    path.push({ turn, fork });
    fork = forkAfter(turn);
  }
  return path;
};

const openFork = (conversation) => {
  const path = pathOf(conversation);
  if (!path.length) return conversation.root;
  const last = path[path.length - 1].turn;
  return (last.next[last.shown.join(",")] ??= newFork());
};

export const titleOf = (conversation) => {
  if (conversation.title) return conversation.title;
  const first = conversation.turns[conversation.root.turns[0]];
  return first ? (first.prompt.text.trim().split("\n")[0] || first.prompt.media[0]?.name || "").slice(0, 60) : "";
};

const addVersion = (conversation, fork, prompt) => {
  const turn = newTurn(prompt, conversation.models.length);
  conversation.turns[turn.id] = turn;
  fork.turns.push(turn.id);
  fork.shown = fork.turns.length - 1;
  return turn;
};

// A new question at the end.
export const addTurn = (conversation, prompt) => addVersion(conversation, openFork(conversation), prompt);

// Another version of a question; the earlier one keeps its answers and what followed.
export const editTurn = (conversation, fork, prompt) => addVersion(conversation, fork, prompt);

// Another answer in one lane.
export const addAnswer = (turn, lane, model) => {
  while (turn.answers.length <= lane) { turn.answers.push([]); turn.shown.push(0); }
  const answer = newAnswer(model);
  turn.answers[lane].push(answer);
  turn.shown[lane] = turn.answers[lane].length - 1;
  return answer;
};

export const shownAnswer = (turn, lane) => turn.answers[lane]?.[turn.shown[lane]];

export const step = (holder, key, by, count) => { holder[key] = Math.min(count - 1, Math.max(0, holder[key] + by)); };

const FORMATS = { mpeg: "mp3", mp3: "mp3", flac: "flac", "x-flac": "flac", ogg: "ogg", mp4: "m4a", "x-m4a": "m4a", m4a: "m4a" };

const formatOf = (url) => FORMATS[/^data:audio\/([\w.+-]+);/.exec(url)?.[1]] ?? "wav";

const contentOf = (prompt) => {
  if (!prompt.media.length) return prompt.text;
  const parts = prompt.media.map((one) => (one.kind === "image"
    ? { type: "image_url", image_url: { url: one.url } }
    : { type: "input_audio", input_audio: { data: one.url.slice(one.url.indexOf(",") + 1), format: formatOf(one.url) } }));
  return prompt.text ? [...parts, { type: "text", text: `\n${prompt.text}` }] : parts; // as in training: items, a new line, the question
};

// What is sent for an answer: the system message, the answered turns before it in a lane as pairs, and its question.
// A lane that is new takes the first's answers. A question without an answer is left out: templates refuse two user turns in a row.
export const promptParts = (conversation, turn, lane) => {
  const path = pathOf(conversation).map((one) => one.turn), pairs = [];
  for (const one of path.slice(0, path.indexOf(turn))) {
    const answer = shownAnswer(one, lane) ?? shownAnswer(one, 0);
    if (answer?.text) pairs.push([{ role: "user", content: contentOf(one.prompt) }, { role: "assistant", content: answer.text }]);
  }
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  return { system, pairs, last: { role: "user", content: contentOf(turn.prompt) } };
};

// The shown path in OpenAI's shape, the answers of the first lane: what `headway chat` loads and training reads.
export const plainMessages = (conversation) => {
  const last = pathOf(conversation).at(-1)?.turn;
  if (!last) return [];
  const parts = promptParts(conversation, last, 0), answer = shownAnswer(last, 0);
  return [...parts.system, ...parts.pairs.flat(), parts.last, ...(answer?.text ? [{ role: "assistant", content: answer.text }] : [])];
};

// ---- files and stored data are not trusted: everything is rebuilt from fields that are known
const text = (value, most = 10000000) => (typeof value === "string" ? value.slice(0, most) : "");
const number = (value, range) => (typeof value === "number" && Number.isFinite(value) && value >= range.min && value <= range.max ? value : null);
const list = (value) => (Array.isArray(value) ? value : []);
const index = (value, count) => (Number.isInteger(value) && value >= 0 && value < count ? value : Math.max(0, count - 1));
const KINDS = { image: /^data:image\/[\w.+-]+;base64,[A-Za-z0-9+/=]*$/, audio: /^data:audio\/[\w.+-]+;base64,[A-Za-z0-9+/=]*$/ };

export const isMedia = (one) => typeof one?.url === "string" && one.kind in KINDS && KINDS[one.kind].test(one.url);

const checkedAnswer = (value) => ({
  ...newAnswer(text(value?.model, 500)), text: text(value?.text), state: ["done", "error"].includes(value?.state) ? value.state : "stopped",
  finish: text(value?.finish, 40) || null, error: text(value?.error, 2000) || null, leftOut: Number.isInteger(value?.leftOut) ? value.leftOut : 0,
  stats: Object.fromEntries(["tokens", "rate", "first", "cached"].filter((key) => Number.isFinite(value?.stats?.[key])).map((key) => [key, value.stats[key]])),
});

const checkedFork = (value, turns) => {
  const known = list(value?.turns).filter((id) => typeof id === "string" && Object.hasOwn(turns, id));
  return { turns: known, shown: index(value?.shown, known.length) };
};

const checkedTurn = (id, value) => {
  const answers = list(value?.answers).slice(0, 2).map((lane) => list(lane).map(checkedAnswer));
  return {
    id, answers, shown: answers.map((lane, at) => index(value?.shown?.[at], lane.length)), next: {},
    prompt: { text: text(value?.prompt?.text), media: list(value?.prompt?.media).filter(isMedia).map((one) => ({ kind: one.kind, name: text(one.name, 200), url: one.url })) },
  };
};

const checkedTurns = (value) => {
  const given = Object.entries(value && typeof value === "object" ? value : {}).filter(([id]) => /^[a-z0-9]{1,40}$/.test(id)).slice(0, MOST_TURNS);
  const turns = Object.fromEntries(given.map(([id, one]) => [id, checkedTurn(id, one)]));
  for (const [id, one] of given) {
    for (const [key, fork] of Object.entries(one?.next && typeof one.next === "object" ? one.next : {})) {
      if (/^\d{1,6}(,\d{1,6})?$/.test(key)) turns[id].next[key] = checkedFork(fork, turns);
    }
  }
  return turns;
};

export const checkedConversation = (value) => {
  const made = newConversation(list(value?.models).map((one) => text(one, 500)).filter(Boolean).slice(0, 2));
  for (const key of ["created", "updated"]) if (Number.isFinite(value?.[key])) made[key] = value[key];
  made.title = text(value?.title, 200);
  made.system = text(value?.system);
  for (const key of Object.keys(DEFAULTS)) made.sampling[key] = value?.sampling && key in value.sampling ? number(value.sampling[key], RANGES[key]) : DEFAULTS[key];
  made.turns = checkedTurns(value?.turns);
  made.root = checkedFork(value?.root, made.turns);
  return made;
};

const partsOf = (content) => {
  if (typeof content === "string") return { text: content, media: [] };
  const media = [], words = [];
  for (const part of list(content)) {
    if (part?.type === "text") words.push(text(part.text));
    const sound = part?.input_audio, kind = part?.image_url ? "image" : "audio";
    const url = part?.image_url?.url ?? (sound ? `data:audio/${sound.format};base64,${sound.data}` : null);
    if (isMedia({ kind, url })) media.push({ kind, name: kind, url });
  }
  return { text: words.join("\n").replace(/^\n/, ""), media };
};

const fromMessages = (messages, models) => {
  const made = newConversation(models);
  for (const one of messages) {
    const content = partsOf(one?.content);
    if (one?.role === "system") made.system = made.system ? `${made.system}\n${content.text}` : content.text;
    else if (one?.role === "user") addTurn(made, content);
    else if (one?.role === "assistant") {
      const turn = pathOf(made).at(-1)?.turn;
      if (turn) Object.assign(addAnswer(turn, 0, ""), { text: content.text, state: "done" });
    }
  }
  return made;
};

// Conversations of a file: exported ones, or messages in OpenAI's shape. An empty list: it holds neither.
export const readFile = (value, models = []) => {
  if (Array.isArray(value?.conversations)) return value.conversations.map(checkedConversation);
  if (value?.conversation) return [checkedConversation(value.conversation)];
  const messages = Array.isArray(value) ? value : value?.messages;
  const made = fromMessages(list(messages), models);
  return made.root.turns.length ? [made] : [];
};
