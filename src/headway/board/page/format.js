// Numbers, times and elements: what every other file of the page needs. Text only ever enters the page as text, never as markup.
"use strict";
const hw = {};

hw.el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "checked" || name === "value" || name === "disabled") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
};

hw.fill = (node, ...children) => { node.replaceChildren(...children.flat(3).filter((one) => one !== null && one !== undefined && one !== false)); return node; };

hw.number = (value, digits = 5) => {
  if (typeof value === "string") return value;
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(Math.max(0, Math.min(3, digits - 1))).replace(/\.?0+e/, "e");
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
  if (size >= 1e5) return hw.short(value, 4);
  return String(Number(value.toPrecision(digits)));
};

hw.short = (value, digits = 3) => {
  if (value === null || value === undefined || typeof value === "string") return "–";
  const size = Math.abs(value);
  for (const [unit, mark] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return String(Number((value / unit).toPrecision(digits))) + mark;
  }
  return String(Number(value.toPrecision(digits)));
};

hw.bytes = (value) => {
  if (typeof value !== "number") return "–";
  for (const [unit, mark] of [[2 ** 40, "TB"], [2 ** 30, "GB"], [2 ** 20, "MB"], [2 ** 10, "KB"]]) {
    if (value >= unit) return `${Number((value / unit).toPrecision(4))} ${mark}`;
  }
  return `${value} B`;
};

hw.seconds = (value) => {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value < 60) return `${Number(value.toPrecision(2))} s`;
  const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days > 0) return `${days}d ${hours % 24}h`;
  if (hours > 0) return `${hours}h ${String(minutes % 60).padStart(2, "0")}m`;
  return `${minutes}m ${String(Math.floor(value % 60)).padStart(2, "0")}s`;
};

hw.when = (seconds) => {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000), two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
};

hw.ago = (seconds, now) => (seconds ? `${hw.seconds(Math.max(0, Math.floor(now - seconds)))} ago` : "–");

hw.metricUnit = (name) => (/_bytes$/.test(name) ? hw.bytes : /(seconds|_time)$/.test(name) ? (v) => (Math.abs(v) < 60 ? `${hw.number(v, 4)} s` : hw.seconds(v)) : (v, digits) => hw.number(v, digits));

hw.xText = (axis, value) => (axis === "time" ? hw.seconds(value) : axis === "tokens" ? `${hw.short(value, 4)} tokens` : `step ${hw.number(Math.round(value))}`);

hw.debounce = (action, wait) => {
  let timer = 0;
  return (...given) => { clearTimeout(timer); timer = setTimeout(() => action(...given), wait); };
};

hw.PALETTE = ["#3b82f6", "#f97316", "#10b981", "#e11d48", "#8b5cf6", "#06b6d4", "#ca8a04", "#ec4899", "#65a30d", "#64748b", "#b45309", "#4f46e5"];
hw.DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
hw.color = (slot) => hw.PALETTE[slot % hw.PALETTE.length];
hw.dash = (slot) => hw.DASHES[Math.floor(slot / hw.PALETTE.length) % hw.DASHES.length];
