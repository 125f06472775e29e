// Elements and icons. Text enters the page as text nodes only, never as markup.
const SVG = "http://www.w3.org/2000/svg";

export const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "checked" || name === "value" || name === "disabled" || name === "hidden") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...kept(children));
  return node;
};

const kept = (children) => children.flat(3).filter((one) => one !== null && one !== undefined && one !== false);

export const fill = (node, ...children) => { node.replaceChildren(...kept(children)); return node; };

// Give a node these children; those that are there already stay where they are, so that the browser lays out only what is new.
export const arrange = (node, children) => {
  children.forEach((child, at) => { if (node.childNodes[at] !== child) node.insertBefore(child, node.childNodes[at] ?? null); });
  while (node.childNodes.length > children.length) node.lastChild.remove();
};

const PATHS = {
  menu: "M2.5 4h11M2.5 8h11M2.5 12h11",
  plus: "M8 3v10M3 8h10",
  send: "M8 13V3.5M4 7l4-4 4 4",
  stop: "M4.5 4.5h7v7h-7z",
  edit: "M3 13l.6-2.8L10.8 3 13 5.2 5.8 12.4zM9.6 4.2l2.2 2.2",
  copy: "M5.5 5.5h7.5v7.5H5.5zM10.5 5.5V3H3v7.5h2.5",
  done: "M3 8.5l3.2 3.2L13 4.8",
  retry: "M13 8a5 5 0 1 1-1.5-3.6M13 2.5v2.6h-2.6",
  left: "M9.8 3.5L5.3 8l4.5 4.5",
  right: "M6.2 3.5L10.7 8l-4.5 4.5",
  down: "M8 3v9.5M4 9l4 4 4-4",
  settings: "M2.5 4.5h7M12.5 4.5h1M2.5 11.5h1M6.5 11.5h7M11 3v3M5 10v3",
  theme: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11",
  attach: "M12.5 7.2L7.6 12a2.9 2.9 0 0 1-4.1-4.1l5.3-5.2a1.9 1.9 0 0 1 2.7 2.7L6.4 10.6a.9.9 0 0 1-1.3-1.3l4.4-4.4",
  trash: "M3 4.5h10M6.2 4.5V3h3.6v1.5M4.3 4.5l.6 8.5h6.2l.6-8.5",
  download: "M8 2.5v7.2M5 7l3 3 3-3M3 13h10",
  upload: "M8 10V2.8M5 5.6l3-3 3 3M3 13h10",
  close: "M4 4l8 8M12 4l-8 8",
  compare: "M2.5 3h4.5v10H2.5zM9 3h4.5v10H9z",
};

export const icon = (name) => {
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", name === "stop" ? "icon solid" : "icon");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
};

// A button with an icon; its words are its label, and shown where `words` is given.
export const button = (name, label, action, more = {}, words = null) =>
  el("button", { type: "button", title: label, "aria-label": label, onclick: action, ...more, class: `tool ${more.class || ""}` }, icon(name), words);

export const copyText = async (text) => {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed, or not a secure page */ }
  const box = el("textarea", { class: "offscreen", "aria-hidden": "true" });
  box.value = text;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
};

// A copy button that says so when it has copied.
export const copyButton = (label, said, text, words = null) => {
  const node = button("copy", label, async () => {
    if (!(await copyText(text()))) return;
    node.replaceChildren(icon("done"), ...(words ? [said] : []));
    node.setAttribute("aria-label", said);
    setTimeout(() => { node.replaceChildren(icon("copy"), ...(words ? [words] : [])); node.setAttribute("aria-label", label); }, 1500);
  }, {}, words);
  return node;
};

export const bytes = (value) => {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  for (const [unit, mark] of [[2 ** 30, "GB"], [2 ** 20, "MB"], [2 ** 10, "KB"]]) {
    if (value >= unit) return `${Number((value / unit).toPrecision(3))} ${mark}`;
  }
  return `${value} B`;
};

export const short = (value, digits = 3) => (typeof value === "number" && Number.isFinite(value) ? String(Number(value.toPrecision(digits))) : "–");

export const seconds = (value) => (typeof value !== "number" ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${short(value)} s`);
