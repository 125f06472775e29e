// Markdown of a model's answer as DOM nodes. The text is never parsed as HTML: tags in it are shown as they are written.
//
//   text -> parseBlocks -> blocks with their source -> nodes        (parsing runs without a browser too: see the tests)
//
// Links lead to http and https only and open in a new tab. Pictures are shown as links: an answer must not make the browser load anything.
import { copyButton, el } from "./dom.js";
import { say } from "./words.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ALIGNS = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;
const MOST_DEEP = 12, MOST_LABEL = 1000;

// ---- blocks
export const parseBlocks = (text, depth = 0) => {
  const lines = text.replace(/\r\n?/g, "\n").split("\n"), blocks = [];
  let at = 0, from = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { from += lines[at++].length + 1; continue; }
    const [block, next] = readBlock(lines, at, depth), raw = lines.slice(at, next).join("\n");
    blocks.push({ ...block, raw, from });
    from += raw.length + 1;
    at = next;
  }
  return blocks;
};

const readBlock = (lines, at, depth) => {
  const line = lines[at];
  let found;
  if ((found = FENCE.exec(line))) return readFence(lines, at, found);
  if ((found = HEADING.exec(line))) return [{ kind: "heading", level: found[1].length, text: found[2] }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (isTable(lines, at)) return readTable(lines, at);
  if (depth < MOST_DEEP && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MOST_DEEP && ITEM.test(line)) return readList(lines, at, depth);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !beginsBlock(lines, end, depth)) end++;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((one) => one.trimStart()).join("\n") }, end];
};

const beginsBlock = (lines, at, depth) => FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at]) || isTable(lines, at)
  || (depth < MOST_DEEP && (QUOTE.test(lines[at]) || /^ {0,3}([-*+]|1[.)]) +\S/.test(lines[at])));

const readFence = (lines, at, found) => {
  const close = new RegExp(`^ {0,3}${found[1][0]}{${found[1].length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end++;
  return [{ kind: "code", language: found[2], text: lines.slice(at + 1, end).join("\n"), isOpen: end === lines.length }, Math.min(end + 1, lines.length)];
};

const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && ALIGNS.test(lines[at + 1])
  && cells(lines[at]).length === cells(lines[at + 1]).length;

const cells = (line) => {
  const found = [];
  let cell = "", inCode = false;
  const whole = line.trim().replace(/^\|/, "");
  for (let at = 0; at < whole.length; at++) {
    if (whole[at] === "\\" && whole[at + 1] === "|") { cell += "|"; at++; continue; }
    if (whole[at] === "`") inCode = !inCode;
    if (whole[at] === "|" && !inCode) { found.push(cell.trim()); cell = ""; } else cell += whole[at];
  }
  if (cell.trim()) found.push(cell.trim());
  return found;
};

const readTable = (lines, at) => {
  const aligns = cells(lines[at + 1]).map((one) => (/^:.*:$/.test(one) ? "center" : /:$/.test(one) ? "right" : "left"));
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end++;
  return [{ kind: "table", aligns, head: cells(lines[at]), rows: lines.slice(at + 2, end).map(cells) }, end];
};

const readQuote = (lines, at, depth) => {
  const inner = [];
  let end = at;
  for (; end < lines.length && QUOTE.test(lines[end]); end++) inner.push(QUOTE.exec(lines[end])[1]);
  return [{ kind: "quote", blocks: parseBlocks(inner.join("\n"), depth + 1) }, end];
};

const readList = (lines, at, depth) => {
  const first = ITEM.exec(lines[at]), isOrdered = /\d/.test(first[2]), indent = first[1].length, items = [];
  let end = at, isLoose = false;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || /\d/.test(found[2]) !== isOrdered || found[1].length > indent + 1 || found[1].length < indent || RULE.test(lines[end])) break;
    const inside = found[1].length + found[2].length + 1, own = [found[4]];
    for (end++; end < lines.length; end++) {
      const blank = !lines[end].trim(), space = lines[end].length - lines[end].trimStart().length;
      if (blank) { if (!continues(lines, end, indent + 2)) break; own.push(""); continue; }
      if (space >= Math.min(inside, indent + 2)) { own.push(lines[end].slice(Math.min(space, inside))); continue; }
      if (ITEM.test(lines[end]) || beginsBlock(lines, end, depth) || !lines[end - 1].trim()) break;
      own.push(lines[end].trimStart());
    }
    items.push(item(own, depth));
    const next = nextText(lines, end);
    if (next > end && next < lines.length && isSibling(lines[next], isOrdered, indent)) { isLoose = true; end = next; }
  }
  return [{ kind: "list", isOrdered, start: isOrdered ? Number.parseInt(first[2], 10) : 1, isLoose, items }, end];
};

const nextText = (lines, at) => { while (at < lines.length && !lines[at].trim()) at++; return at; };

const continues = (lines, at, indent) => { const next = nextText(lines, at); return next < lines.length && lines[next].length - lines[next].trimStart().length >= indent; };

const isSibling = (line, isOrdered, indent) => { const found = ITEM.exec(line); return found && /\d/.test(found[2]) === isOrdered && found[1].length <= indent + 1 && found[1].length >= indent; };

const item = (own, depth) => {
  const task = /^\[([ xX])\]\s+/.exec(own[0]);
  if (task) own[0] = own[0].slice(task[0].length);
  return { task: task ? task[1] !== " " : null, blocks: parseBlocks(own.join("\n"), depth + 1) };
};

// ---- text inside a block
const PAIRS = [["***", "both"], ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const isWord = (char) => char !== undefined && /[\p{L}\p{N}]/u.test(char);
const ADDRESS = /^https?:\/\/[^\s<>"'`\\^{}|]+/i;

// The parts of a text: strings, and { kind, ... } with parts of their own. Each kind of mark that has no end is looked for only once.
export const parseInline = (text, depth = 0) => {
  const parts = [], dead = new Set();
  let plain = "", at = 0;
  const flush = () => { if (plain) parts.push(plain); plain = ""; };
  while (at < text.length) {
    const found = depth < MOST_DEEP ? readMark(text, at, depth, dead) : null;
    if (!found) { plain += text[at++]; continue; }
    if (typeof found[0] === "string") plain += found[0];
    else { flush(); parts.push(found[0]); }
    at = found[1];
  }
  flush();
  return parts;
};

const readMark = (text, at, depth, dead) => {
  const char = text[at];
  if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return [text[at + 1], at + 2];
  if (char === "\n") return [{ kind: "break" }, at + 1];
  if (char === "`") return readCode(text, at, dead);
  if (char === "[" || (char === "!" && text[at + 1] === "[")) return readLink(text, at, depth);
  if (char === "<") {
    const end = text.slice(at + 1, at + 2100).match(/^(https?:\/\/[^\s<>]+)>/i);
    return end ? [{ kind: "link", href: end[1], parts: [end[1]] }, at + 1 + end[0].length] : null;
  }
  if ((char === "h" || char === "H") && !isWord(text[at - 1])) return readAddress(text, at);
  if (char === "*" || char === "_" || char === "~") return readPair(text, at, depth, dead);
  return null;
};

const readCode = (text, at, dead) => {
  const run = /^`+/.exec(text.slice(at, at + 100))[0];
  if (dead.has(run)) return [run, at + run.length];
  for (let end = text.indexOf(run, at + run.length); end >= 0; end = text.indexOf(run, end)) {
    let after = end;
    while (text[after] === "`") after++;
    if (after - end === run.length) return [{ kind: "code", text: text.slice(at + run.length, end).replace(/\n/g, " ").replace(/^ (.*\S.*) $/, "$1") }, after];
    end = after;
  }
  dead.add(run);
  return [run, at + run.length];
};

const readLink = (text, at, depth) => {
  const open = text[at] === "!" ? at + 1 : at, size = text.slice(open, open + MOST_LABEL).indexOf("](");
  if (size < 0) return null;
  const middle = open + size, label = text.slice(open + 1, middle);
  if (label.includes("[")) return null;
  const rest = /^\s*<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s+["'(][^"')]{0,500}["')])?\s*\)/.exec(text.slice(middle + 2, middle + 3000));
  if (!rest) return null;
  const href = safeAddress(rest[1]), end = middle + 2 + rest[0].length;
  if (!href) return [text.slice(at, end), end];
  return [{ kind: "link", href, parts: label.trim() ? parseInline(label, MOST_DEEP - 1 > depth ? depth + 1 : MOST_DEEP) : [href] }, end];
};

const readAddress = (text, at) => {
  const found = ADDRESS.exec(text.slice(at, at + 2048));
  if (!found) return null;
  let address = found[0].replace(/[.,;:!?*_~'"，。；：！？）】》」]+$/u, "");
  while (address.endsWith(")") && address.split(")").length > address.split("(").length) address = address.slice(0, -1);
  return safeAddress(address) ? [{ kind: "link", href: safeAddress(address), parts: [address] }, at + address.length] : null;
};

const readPair = (text, at, depth, dead) => {
  for (const [mark, kind] of PAIRS) {
    if (!text.startsWith(mark, at) || dead.has(mark)) continue;
    const inside = at + mark.length;
    if (text[inside] === undefined || /\s/.test(text[inside])) continue;
    if (mark[0] === "_" && isWord(text[at - 1])) continue;
    const end = closing(text, inside, mark);
    if (end < 0) { dead.add(mark); continue; }
    return [{ kind, parts: parseInline(text.slice(inside, end), depth + 1) }, end + mark.length];
  }
  return null;
};

const closing = (text, from, mark) => {
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (end === from || /\s/.test(text[end - 1]) || text[end - 1] === "\\") continue;
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) { if (text[end + 1] === mark) end++; continue; }
    if (mark[0] === "_" && isWord(text[end + mark.length])) continue;
    return end;
  }
  return -1;
};

// The address if it leads to http or https, else null.
export const safeAddress = (href) => {
  if (!/^https?:\/\//i.test(href)) return null;
  try { const url = new URL(href); return url.protocol === "http:" || url.protocol === "https:" ? url.href : null; } catch { return null; }
};

// ---- nodes
const inline = (parts) => parts.map((part) => {
  if (typeof part === "string") return part;
  if (part.kind === "break") return el("br");
  if (part.kind === "code") return el("code", {}, part.text);
  if (part.kind === "link") return el("a", { href: part.href, target: "_blank", rel: "noopener noreferrer nofollow" }, inline(part.parts));
  if (part.kind === "both") return el("strong", {}, el("em", {}, inline(part.parts)));
  return el(part.kind, {}, inline(part.parts));
});

const rich = (text) => inline(parseInline(text));

const node = (block) => {
  if (block.kind === "heading") return el(`h${Math.min(6, block.level + 2)}`, {}, rich(block.text));
  if (block.kind === "rule") return el("hr");
  if (block.kind === "code") return codeNode(block);
  if (block.kind === "quote") return el("blockquote", {}, block.blocks.map(node));
  if (block.kind === "table") return tableNode(block);
  if (block.kind === "list") return el(block.isOrdered ? "ol" : "ul", { start: block.isOrdered && block.start !== 1 ? block.start : null }, block.items.map((one) => itemNode(one, block.isLoose)));
  return el("p", {}, rich(block.text));
};

const itemNode = (one, isLoose) => el("li", { class: one.task === null ? null : "task" },
  one.task === null ? null : el("input", { type: "checkbox", checked: one.task, disabled: true }),
  one.blocks.map((block) => (block.kind === "paragraph" && !isLoose ? rich(block.text) : node(block))));

const codeNode = (block) => el("div", { class: "codebox" },
  el("div", { class: "codehead" }, el("span", {}, block.language || say("code")), copyButton(say("copy"), say("copied"), () => block.text, say("copy"))),
  el("pre", { tabindex: 0 }, el("code", {}, block.text)));

const tableNode = (block) => el("div", { class: "tablebox", tabindex: 0 }, el("table", {},
  el("thead", {}, el("tr", {}, block.head.map((cell, at) => el("th", { class: `to-${block.aligns[at]}` }, rich(cell))))),
  el("tbody", {}, block.rows.map((row) => el("tr", {}, block.head.map((_, at) => el("td", { class: `to-${block.aligns[at]}` }, rich(row[at] ?? ""))))))));

// Thoughts before an answer, where a model writes them between <think> and </think>.
export const splitThoughts = (text) => {
  const found = /^\s*<think>/.exec(text);
  if (!found) return { thoughts: null, rest: text, isThinking: false };
  const end = text.indexOf("</think>");
  return end < 0
    ? { thoughts: text.slice(found[0].length), rest: "", isThinking: true }
    : { thoughts: text.slice(found[0].length, end), rest: text.slice(end + 8), isThinking: false };
};

// The blocks of a text that has grown, given those it had before. All but the last two are final, so that each piece costs the same.
export const growBlocks = (before, text, isLonger) => {
  const kept = isLonger ? Math.max(0, before.length - 2) : 0, from = kept ? before[kept].from : 0;
  return [...before.slice(0, kept), ...parseBlocks(text.slice(from)).map((block) => ({ ...block, from: block.from + from }))];
};

// Draws a text that grows into a node: only blocks that changed are made again, so a long answer stays cheap and selected text stays selected.
export const makeRenderer = (target) => {
  let drawn = [], thoughts = null, last = "";
  return (text) => {
    const parts = splitThoughts(text);
    if (parts.thoughts !== null && thoughts === null) {
      thoughts = el("details", { class: "thoughts" }, el("summary", {}, say("thinking")), el("div", { class: "pre" }));
      target.prepend(thoughts);
    }
    if (thoughts) thoughts.lastChild.textContent = (parts.thoughts ?? "").trim();
    const rest = parts.rest.replace(/\r\n?/g, "\n"), blocks = growBlocks(drawn, rest, rest.startsWith(last));
    last = rest;
    let same = 0;
    while (same < blocks.length && same < drawn.length && blocks[same].raw === drawn[same].raw) same++;
    for (const old of drawn.slice(same)) old.node.remove();
    drawn = [...drawn.slice(0, same), ...blocks.slice(same).map((block) => ({ raw: block.raw, from: block.from, node: node(block) }))];
    target.append(...drawn.slice(same).map((one) => one.node));
  };
};
