// What the person has chosen: kept in the address (so that it can be shared) and in this browser (so that it survives a new tab).
"use strict";
(() => {
  const DEFAULTS = { runs: null, colors: {}, axis: "step", smooth: 0, logX: false, logY: false, outliers: true, zoom: null, tab: "charts", filter: "", states: "", search: "", focus: "", closed: "", sort: "updated", theme: "" };
  const SHORT = { runs: "r", axis: "x", smooth: "s", logX: "lx", logY: "ly", outliers: "o", zoom: "z", tab: "t", filter: "f", states: "st", search: "q", focus: "m", closed: "c", sort: "so" };
  const KEY = "headway-board";

  const read = () => {
    const state = { ...DEFAULTS };
    try { Object.assign(state, JSON.parse(localStorage.getItem(KEY) || "{}")); } catch { /* storage may be off, or hold something else */ }
    const given = new URLSearchParams(location.hash.slice(1));
    for (const [name, short] of Object.entries(SHORT)) {
      if (!given.has(short)) continue;
      const text = given.get(short), usual = DEFAULTS[name];
      if (name === "runs") state.runs = text ? text.split(",").filter((one) => /^[0-9a-f]{12}$/.test(one)) : [];
      else if (name === "zoom") { const ends = text.split(",").map(Number); state.zoom = ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null; }
      else if (typeof usual === "boolean") state[name] = text === "1";
      else if (typeof usual === "number") state[name] = Number.isFinite(Number(text)) ? Number(text) : usual;
      else state[name] = text;
    }
    if (!["step", "tokens", "time"].includes(state.axis)) state.axis = "step";
    state.smooth = Math.min(0.99, Math.max(0, Number(state.smooth) || 0));
    return state;
  };

  const write = hw.debounce((state) => {
    const parts = [];
    for (const [name, short] of Object.entries(SHORT)) {
      const value = state[name];
      if (JSON.stringify(value) === JSON.stringify(DEFAULTS[name])) continue;
      const text = name === "runs" || name === "zoom" ? (value || []).join(",") : typeof value === "boolean" ? (value ? "1" : "0") : String(value);
      parts.push(`${short}=${encodeURIComponent(text).replace(/%2C/g, ",")}`);
    }
    try { history.replaceState(null, "", parts.length ? `#${parts.join("&")}` : location.pathname + location.search); } catch { /* a file opened from disk */ }
    try { localStorage.setItem(KEY, JSON.stringify(state)); } catch { /* storage may be off */ }
  }, 120);

  hw.makeStore = (isLive) => {
    const state = isLive ? read() : { ...DEFAULTS }, listeners = [];
    return {
      state,
      set(changes) {
        Object.assign(state, changes);
        if (isLive) write(state);
        for (const listener of listeners) listener(changes);
      },
      listen(listener) { listeners.push(listener); },
    };
  };
})();
