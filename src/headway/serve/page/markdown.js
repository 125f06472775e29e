// Markdown of a model's answer as DOM nodes: markdown-it reads it, DOMPurify lets known elements through.
//
//   text -> parseBlocks -> blocks with their source -> HTML -> DOMPurify -> nodes
//
// Parsing runs without a browser too: see the tests. HTML in an answer is shown as it is written.
// Links lead to http and https only and open in a new tab. Pictures are shown as links: an answer must
// not make the browser load anything.
import "./markdown-it.umd.min.js";
import "./purify.min.js";
import { copyButton, el } from "./dom.js";
import { say } from "./words.js";

const { DOMPurify, markdownit } = globalThis;

// The address if it leads to http or https, else null.
export const safeAddress = (href) => {
  if (!/^https?:\/\//i.test(href)) return null;
  try {
    return new URL(href).href;
  } catch {
    return null;
  }
};

const reader = markdownit({ html: false, linkify: true, breaks: true });
// Each of these makes a block depend on text that follows it or that is far away. An answer is drawn
// while it arrives: a line must not turn into a heading because the next one begins with a dash.
reader.disable(["lheading", "reference", "code"]);
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
reader.validateLink = (href) => safeAddress(href) !== null;

// markdown-it leaves out what lies deeper than its limit; before that, any line is a paragraph.
const MOST_DEEP = 40;
const paragraph = reader.block.ruler.getRules("").at(-1);
reader.block.ruler.before("table", "deep", (state, start, end) => state.level >= MOST_DEEP && paragraph(state, start, end));

const TASK = /^\[([ xX])\]\s+/;

// What the page has beyond Markdown: boxes of task lists, smaller headings, classes for the columns of a
// table (the page's policy forbids the style attributes that markdown-it writes).
reader.core.ruler.push("page", (state) => {
  state.tokens.forEach((token, index) => {
    if (token.type === "heading_open" || token.type === "heading_close") {
      const level = Number(token.tag.slice(1));
      token.tag = `h${Math.min(6, level + 2)}`;
    }
    if (token.type === "th_open" || token.type === "td_open") {
      const align = token.attrGet("style")?.replace("text-align:", "");
      token.attrs = align ? [["class", `to-${align}`]] : null;
    }
    const item = state.tokens[index - 2];
    if (token.type === "inline" && item?.type === "list_item_open" && TASK.test(token.content)) {
      item.attrSet("class", "task");
      const box = new state.Token("task_box", "input", 0);
      box.meta = { isDone: token.content[1] !== " " };
      const words = token.children[0];
      words.content = words.content.replace(TASK, "");
      token.children.unshift(box);
    }
  });
});

const { escapeHtml } = reader.utils;
const { rules } = reader.renderer;
const OUTSIDE = 'target="_blank" rel="noopener noreferrer nofollow"';

rules.task_box = (tokens, index) => {
  const checked = tokens[index].meta.isDone ? " checked" : "";
  return `<input type="checkbox" disabled${checked}>`;
};
rules.link_open = (tokens, index) => `<a href="${escapeHtml(tokens[index].attrGet("href"))}" ${OUTSIDE}>`;
rules.image = (tokens, index, options, env, renderer) => {
  const words = renderer.renderInlineAsText(tokens[index].children, options, env);
  return `<a href="${escapeHtml(tokens[index].attrGet("src"))}" ${OUTSIDE}>${escapeHtml(words)}</a>`;
};
rules.fence = (tokens, index) => {
  const language = tokens[index].info.trim().split(/\s+/)[0] || say("code");
  const code = tokens[index].content.replace(/\n$/, "");
  return `<div class="codebox"><div class="codehead"><span>${escapeHtml(language)}</span></div>`
    + `<pre tabindex="0"><code>${escapeHtml(code)}</code></pre></div>`;
};
rules.table_open = () => '<div class="tablebox" tabindex="0"><table>';
rules.table_close = () => "</table></div>";

const CLEAN = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "div", "em", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p",
    "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "#text",
  ],
  ALLOWED_ATTR: ["checked", "class", "disabled", "href", "rel", "start", "tabindex", "target", "type"],
  ADD_URI_SAFE_ATTR: ["checked", "disabled", "rel", "start", "tabindex", "target", "type"],
  ALLOWED_URI_REGEXP: /^https?:\/\//i,
};

// The blocks of a text at its outermost level: { tokens, raw, from }, where `raw` is the block's source and
// `from` the place in the text where it begins.
export const parseBlocks = (text) => {
  const lines = text.split("\n");
  const offsets = [0];
  for (const line of lines) offsets.push(offsets.at(-1) + line.length + 1);
  const blocks = [];
  let block = null;
  let depth = 0;
  for (const token of reader.parse(text, {})) {
    if (depth === 0) {
      const [first, end] = token.map;
      block = { tokens: [], raw: lines.slice(first, end).join("\n"), from: offsets[first] };
      blocks.push(block);
    }
    block.tokens.push(token);
    depth += token.nesting;
  }
  return blocks;
};

const blockNode = (block) => {
  const html = reader.renderer.render(block.tokens, reader.options, {});
  const clean = DOMPurify.sanitize(html, CLEAN);
  for (const head of clean.querySelectorAll(".codehead")) {
    const code = head.nextSibling;
    head.append(copyButton(say("copy"), say("copied"), () => code.textContent, say("copy")));
  }
  return clean.firstElementChild;
};

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
    drawn = [...drawn.slice(0, same), ...blocks.slice(same).map((block) => ({ raw: block.raw, from: block.from, node: blockNode(block) }))];
    target.append(...drawn.slice(same).map((one) => one.node));
  };
};
