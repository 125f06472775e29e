import { readFileSync } from "node:fs";
import { growBlocks, parseBlocks, parseInline, safeAddress, splitThoughts } from "./markdown.js";
const given = JSON.parse(readFileSync("given.json", "utf-8"));
const flat = (parts) => parts.map((one) => typeof one === "string" ? one : `<${one.kind}${one.href ? " " + one.href : ""}:${one.text ?? flat(one.parts ?? [])}>`).join("");
const seen = { inline: {}, blocks: {}, addresses: {} };
for (const text of given.inline) seen.inline[text] = flat(parseInline(text));
for (const text of given.blocks) seen.blocks[text] = parseBlocks(text).map((one) => [one.kind, one.text ?? one.items?.length ?? one.rows?.length ?? null]);
for (const text of given.addresses) seen.addresses[text] = safeAddress(text);
seen.thoughts = [splitThoughts("<think>a"), splitThoughts("<think>a</think>b"), splitThoughts("b <think>")];
const hard = ["*", "_", "`", "[", "![", "](", "**a ", "_a_b", "<http://", "> ", "- ", "|", "~~~", "https://a(", "\\", "a*b_c`d[e](f", "1. x\n   "];
const begun = performance.now();
for (const one of hard) { const text = one.repeat(40000 / one.length); parseBlocks(text); parseInline(text); }
seen.milliseconds = performance.now() - begun;
let text = "", random = 7;
const signs = ["*", "_", "`", "[", "]", "(", ")", "<", ">", "|", "-", "\n", " ", "#", "~", "1.", "a", "你", "\\", "!", "http://x", "```", ":"];
for (let at = 0; at < 300; at++) { // any text is parsed, none is lost
  text = "";
  for (let n = 0; n < 60; n++) { random = (random * 48271) % 2147483647; text += signs[random % signs.length]; }
  const blocks = parseBlocks(text);
  const lines = (one) => one.split("\n").filter((line) => line.trim());
  if (JSON.stringify(lines(blocks.map((one) => one.raw).join("\n"))) !== JSON.stringify(lines(text))) seen.lost = text;
  parseInline(text);
  let grown = [], before = "";
  for (let end = 1; end <= text.length; end += 1 + (random % 5)) { // piece by piece gives the blocks of the whole
    const now = text.slice(0, end);
    grown = growBlocks(grown, now, now.startsWith(before));
    before = now;
    if (JSON.stringify(grown) !== JSON.stringify(parseBlocks(now))) seen.grown = [text, end];
  }
}
console.log(JSON.stringify(seen));
