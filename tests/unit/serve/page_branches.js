import * as c from "./conversation.js";
const made = c.newConversation(["cat"]);
const say = (turn, lane, text) => Object.assign(c.addAnswer(turn, lane, "cat"), { text, state: "done" });
const ask = (text) => c.addTurn(made, { text, media: [] });
const shown = () => c.plainMessages(made).map((one) => one.content).join("|");
const seen = {};
const one = ask("q1"); say(one, 0, "a1");
const two = ask("q2"); say(two, 0, "a2");
seen.plain = shown();
say(one, 0, "a1b");
seen.regenerated = shown();
c.step(one.shown, 0, -1, 2);
seen.back = shown();
const other = c.editTurn(made, c.pathOf(made)[1].fork, { text: "q2b", media: [] }); say(other, 0, "a2b");
seen.edited = shown();
const fork = c.pathOf(made)[1].fork;
c.step(fork, "shown", -1, 2);
seen.unedited = shown();
made.system = "Be brief.";
made.models = ["cat", "dog"];
const three = ask("q3"); say(three, 0, "cat 3"); Object.assign(c.addAnswer(three, 1, "dog"), { text: "dog 3" });
const four = ask("q4");
const parts = c.promptParts(made, four, 1);
seen.dog = [...parts.system, ...parts.pairs.flat(), parts.last].map((one) => one.content).join("|");
const copy = c.checkedConversation(JSON.parse(JSON.stringify(made)));
seen.copied = JSON.stringify(c.plainMessages(copy)) === JSON.stringify(c.plainMessages(made));
const read = c.readFile({ messages: c.plainMessages(made) }, ["cat"])[0];
seen.read = JSON.stringify(c.plainMessages(read)) === JSON.stringify(c.plainMessages(made));
const hostile = [null, 7, "x", [], {}, { conversations: [null, 3, { root: 5, turns: [], models: {} }] }, { messages: "no" }, { conversation: {
  title: {}, models: ["a", 5, {}], sampling: { temperature: "hot", top_k: -3, seed: 1e400 }, root: { turns: ["t", "t", "gone", "__proto__"], shown: 99 },
  turns: { t: { prompt: { text: 5, media: [{ kind: "image", url: "javascript:alert(1)" }, { kind: "image", url: "data:text/html;base64,AA" }] },
    answers: "x", next: { "0": { turns: ["t"] }, "": { turns: ["t"] }, constructor: {} } }, "<b>": {} } } }];
seen.hostile = hostile.map((one) => c.readFile(one, []).map((found) => { c.plainMessages(found); return c.pathOf(found).length; }));
const [last] = c.readFile(hostile.at(-1), []);
seen.kept = [last.sampling.temperature, last.sampling.top_k, last.sampling.seed, last.models, last.turns.t.prompt.media.length, Object.keys(last.turns)];
const circle = c.checkedConversation({ root: { turns: ["t"] }, turns: { t: { answers: [[{ text: "a" }]], next: { "0": { turns: ["t"] } } } } });
seen.circle = c.pathOf(circle).length;
const media = c.newConversation(["cat"]);
media.turns = {};
c.addTurn(media, { text: "hi", media: [{ kind: "image", name: "p", url: "data:image/png;base64,AA==" }, { kind: "audio", name: "s", url: "data:audio/mpeg;base64,BB==" }] });
seen.media = c.plainMessages(media)[0].content;
seen.mediaRead = c.readFile({ messages: c.plainMessages(media) }, [])[0].root.turns.length;
const long = c.newConversation(["cat"]);
for (let at = 0; at < 1500; at++) say(c.addTurn(long, { text: `q${at}`, media: [] }), 0, "a");
let depth = 0, most = 0;
for (const char of JSON.stringify(long)) { if ("[{".includes(char)) most = Math.max(most, ++depth); if ("]}".includes(char)) depth--; }
seen.deep = [c.pathOf(c.checkedConversation(JSON.parse(JSON.stringify(long)))).length, most];
console.log(JSON.stringify(seen));
