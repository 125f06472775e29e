import { readFileSync } from "node:fs";
import { growBlocks, parseBlocks, safeAddress, splitThoughts } from "./markdown.js";
const given = JSON.parse(readFileSync("given.json", "utf-8"));

// Tokens as nested nodes: { token, children }.
const nest = (tokens) => {
  const root = { token: null, children: [] }, open = [root];
  for (const token of tokens) {
    const node = { token, children: token.children ? nest(token.children) : [] };
    if (token.nesting < 0) { open.pop(); continue; }
    open.at(-1).children.push(node);
    if (token.nesting > 0) open.push(node);
  }
  return root.children;
};

// The text of a paragraph in the notation of the test: <kind address:text>.
const KINDS = { strong_open: "strong", em_open: "em", s_open: "del", link_open: "link", image: "link", softbreak: "break", hardbreak: "break", code_inline: "code" };
const flat = (nodes) => nodes.map(({ token, children }) => {
  if (token.type === "text") return token.content;
  if (token.type === "paragraph_open" || token.type === "inline") return flat(children);
  const kind = KINDS[token.type] ?? token.type;
  const address = token.attrGet("href") ?? token.attrGet("src");
  const inside = children.filter((one) => one.token.type !== "text" || one.token.content);
  if (kind === "em" && inside.length === 1 && inside[0].token.type === "strong_open") return `<both:${flat(inside[0].children)}>`;
  return `<${kind}${address ? " " + address : ""}:${kind === "code" ? token.content : flat(children)}>`;
}).join("");
const inline = (text) => parseBlocks(text).map((block) => flat(nest(block.tokens))).join("\n\n");

const BLOCKS = { heading_open: "heading", paragraph_open: "paragraph", hr: "rule", bullet_list_open: "list", ordered_list_open: "list", fence: "code", table_open: "table", blockquote_open: "quote" };
const describe = (block) => {
  const [{ token, children }] = nest(block.tokens), kind = BLOCKS[token.type];
  if (kind === "list") return [kind, children.length];
  if (kind === "table") return [kind, children.find((one) => one.token.type === "tbody_open").children.length];
  if (kind === "code") return [kind, token.content.replace(/\n$/, "")];
  return [kind, kind === "heading" || kind === "paragraph" ? children[0].token.content : null];
};

const seen = { inline: {}, blocks: {}, addresses: {} };
for (const text of given.inline) seen.inline[text] = inline(text);
for (const text of given.blocks) seen.blocks[text] = parseBlocks(text).map(describe);
for (const text of given.addresses) seen.addresses[text] = safeAddress(text);
seen.thoughts = [splitThoughts("<think>a"), splitThoughts("<think>a</think>b"), splitThoughts("b <think>")];
const hard = ["*", "_", "`", "[", "![", "](", "**a ", "_a_b", "<http://", "> ", "- ", "|", "~~~", "https://a(", "\\", "a*b_c`d[e](f", "1. x\n   "];
const begun = performance.now();
for (const one of hard) parseBlocks(one.repeat(40000 / one.length));
seen.milliseconds = performance.now() - begun;
const words = (one) => parseBlocks(one).flatMap((block) => block.tokens).some((token) => token.content.includes("end"));
seen.deep = [words("> ".repeat(500) + "end"), words("- ".repeat(500) + "end"), words("> - ".repeat(200) + "a\n\nend")];
let text = "", random = 7;
const signs = ["*", "_", "`", "[", "]", "(", ")", "<", ">", "|", "-", "\n", " ", "#", "~", "1.", "a", "你", "\\", "!", "http://x", "```", ":"];
for (let at = 0; at < 300; at++) { // any text is parsed, none is lost
  text = "";
  for (let n = 0; n < 60; n++) { random = (random * 48271) % 2147483647; text += signs[random % signs.length]; }
  const blocks = parseBlocks(text);
  const lines = (one) => one.split("\n").filter((line) => line.trim());
  if (JSON.stringify(lines(blocks.map((one) => one.raw).join("\n"))) !== JSON.stringify(lines(text))) seen.lost = text;
  let grown = [], before = "";
  const shown = (found) => JSON.stringify(found.map(({ raw, from, tokens }) => [raw, from, tokens.map((one) => [one.type, one.content])]));
  for (let end = 1; end <= text.length; end += 1 + (random % 5)) { // piece by piece gives the blocks of the whole
    const now = text.slice(0, end);
    grown = growBlocks(grown, now, now.startsWith(before));
    before = now;
    if (shown(grown) !== shown(parseBlocks(now))) seen.grown = [text, end];
  }
}
console.log(JSON.stringify(seen));
