// The page: header, list of runs, charts and panels; asks for news every second while somebody looks.
"use strict";
(() => {
  const POLL = 1000, SLOW_POLL = 10000, MOST_DETAILS = 12;

  class App {
    constructor(source) {
      this.source = source;
      this.store = hw.makeStore(source.isLive);
      this.runs = new Map();
      this.sources = [];
      this.version = 0;
      this.now = Date.now() / 1000;
      this.lit = null;
      this.onlyDifferences = true;
      this.onlyChanged = true;
      this.isReachable = true;
      this.details = new Map();
      this.rolloutView = { order: "sampled", batch: null, from: 0 };
      this.sidebar = new hw.Sidebar(this);
      this.charts = new hw.ChartsView(this);
      this.panel = hw.el("div", { class: "panel" });
      this.build();
      this.store.listen((changes) => this.changed(changes));
    }

    build() {
      const state = this.store.state, set = (changes) => this.store.set(changes);
      this.axis = hw.el("div", { class: "segments", role: "group", "aria-label": "Horizontal axis" }, [["step", "steps"], ["tokens", "tokens"], ["time", "time"]].map(([value, words]) => hw.el("button", { "data-axis": value, onclick: () => set({ axis: value, zoom: null }) }, words)));
      this.slider = hw.el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth, "aria-label": "Smoothing", oninput: () => set({ smooth: Number(this.slider.value) }) });
      this.smoothText = hw.el("output", {});
      const flip = (name, words, title) => hw.el("button", { class: "toggle", "data-flip": name, title, onclick: () => set({ [name]: !this.store.state[name] }) }, words);
      this.flips = [flip("logY", "log y", "Logarithmic vertical axis"), flip("logX", "log x", "Logarithmic horizontal axis"), flip("outliers", "outliers", "Scale charts to all values, or leave out the most extreme percent")];
      this.reset = hw.el("button", { class: "toggle on", onclick: () => set({ zoom: null }) }, "reset zoom");
      this.search = hw.el("input", { type: "search", placeholder: "Search metrics and settings", "aria-label": "Search metrics and settings", value: state.search, oninput: hw.debounce(() => set({ search: this.search.value }), 120) });
      this.link = hw.el("span", { class: "link" });
      this.tabs = hw.el("nav", { class: "tabs", "aria-label": "Views" }, hw.TABS.map(([name, words]) => hw.el("button", { "data-tab": name, onclick: () => set({ tab: name }) }, words)));
      this.tools = hw.el("div", { class: "tools" }, this.axis, hw.el("label", { class: "slider" }, "smooth", this.slider, this.smoothText), this.flips, this.reset);
      const themes = hw.el("button", { class: "toggle", title: "Light or dark", "aria-label": "Light or dark", onclick: () => this.theme(true) }, "◐");
      const menu = hw.el("button", { class: "toggle menu", "aria-label": "List of runs", onclick: () => document.body.classList.toggle("drawer") }, "☰ runs");
      const header = hw.el("header", {}, menu, hw.el("h1", {}, this.source.isLive ? "headway board" : "headway report"), this.link, hw.el("div", { class: "spring" }), this.search, themes);
      const main = hw.el("main", {}, hw.el("div", { class: "bar" }, this.tabs, this.tools), this.charts.node, this.panel);
      hw.fill(document.getElementById("app"), header, hw.el("div", { class: "body" }, this.sidebar.node, hw.el("div", { class: "shade", onclick: () => document.body.classList.remove("drawer") }), main));
      this.theme(false);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.theme(false));
      document.addEventListener("visibilitychange", () => { if (!document.hidden) this.poll(); });
      document.addEventListener("keydown", (event) => { if (event.key === "Escape") { document.body.classList.remove("drawer"); if (this.store.state.zoom) set({ zoom: null }); } });
    }

    theme(turn) {
      const dark = matchMedia("(prefers-color-scheme: dark)").matches;
      let chosen = this.store.state.theme || (dark ? "dark" : "light");
      if (turn) { chosen = chosen === "dark" ? "light" : "dark"; this.store.set({ theme: chosen }); }
      document.documentElement.dataset.theme = chosen;
      this.charts.redraw();
    }

    selected() { return (this.store.state.runs || []).filter((id) => this.runs.has(id)); }

    slot(id) { return this.store.state.colors[id] ?? 0; }

    colorize(ids) {
      // A run keeps its colour as long as it is chosen; a new one gets the first that is free.
      const colors = {}, before = this.store.state.colors;
      for (const id of ids) if (before[id] !== undefined) colors[id] = before[id];
      const used = new Set(Object.values(colors));
      for (const id of ids) if (colors[id] === undefined) { let slot = 0; while (used.has(slot)) slot++; used.add(slot); colors[id] = slot; }
      return colors;
    }

    select(ids) { this.store.set({ runs: ids, colors: this.colorize(ids) }); }
    toggle(id) { const chosen = this.selected(); this.select(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]); }
    highlight(id) { const lit = id && this.selected().includes(id) && this.selected().length > 1 ? id : null; if (lit !== this.lit) { this.lit = lit; this.charts.redraw(); } }

    firstChoice() {
      // Nothing chosen yet: what is running now, or the newest runs.
      if (this.store.state.runs !== null || !this.runs.size) return;
      const all = this.sidebar.shown(), live = all.filter((run) => run.state === "live" || run.state === "stalled");
      this.select((this.source.isLive ? (live.length ? live.slice(0, 8) : all.slice(0, 5)) : all).map((run) => run.id));
    }

    changed(changes) {
      if ("runs" in changes) this.charts.refreshMetrics();
      if ("runs" in changes || "filter" in changes || "states" in changes || "sort" in changes) this.sidebar.render();
      if ("search" in changes || "focus" in changes || "closed" in changes) this.charts.layout();
      if (["axis", "zoom", "runs", "smooth", "logX", "logY", "outliers"].some((name) => name in changes)) this.charts.refresh();
      if ("tab" in changes || "runs" in changes || ("search" in changes && this.store.state.tab === "config")) this.renderPanel();
      this.controls();
    }

    controls() {
      const s = this.store.state;
      for (const button of this.axis.children) button.classList.toggle("on", button.dataset.axis === s.axis);
      for (const button of this.tabs.children) { button.classList.toggle("on", button.dataset.tab === s.tab); button.setAttribute("aria-current", button.dataset.tab === s.tab ? "page" : "false"); }
      for (const button of this.flips) { button.classList.toggle("on", s[button.dataset.flip]); button.setAttribute("aria-pressed", String(s[button.dataset.flip])); }
      this.smoothText.textContent = Number(s.smooth).toFixed(2);
      this.slider.value = s.smooth;
      this.reset.hidden = !s.zoom;
      this.tools.hidden = s.tab !== "charts";
      this.charts.node.hidden = s.tab !== "charts";
      this.panel.hidden = s.tab === "charts";
      const live = [...this.runs.values()].filter((run) => run.state === "live").length;
      document.title = `${live ? `● ${live} live · ` : ""}${this.source.isLive ? "headway board" : "headway report"}`;
    }

    async renderPanel() {
      const { tab } = this.store.state;
      if (tab === "charts") return;
      const ids = this.selected().slice(0, MOST_DETAILS), number = (this.panelNumber = (this.panelNumber || 0) + 1);
      const found = [];
      if (!this.panel.childElementCount || this.panelTab !== tab) hw.fill(this.panel, hw.el("p", { class: "empty" }, "Loading…"));
      this.panelTab = tab;
      for (const id of ids) {
        const run = this.runs.get(id);
        try {
          let known = this.details.get(id);
          if (!known || known.version !== run.version) this.details.set(id, known = { version: run.version, value: await this.source.details(id) });
          const rollouts = tab === "rollouts" ? await this.source.rollouts(id, this.rolloutView) : null;
          found.push({ run, details: known.value, log: tab === "log" ? await this.source.log(id) : "", rollouts });
        } catch (problem) { this.fail(problem); }
        if (number !== this.panelNumber) return;
      }
      const tops = new Map([...this.panel.querySelectorAll("[data-keep]")].map((node) => [node.dataset.keep, node.scrollTop + node.clientHeight >= node.scrollHeight - 8 ? Infinity : node.scrollTop]));
      const rest = this.selected().length - ids.length;
      hw.fill(this.panel, hw.renderPanel(this, tab, found), rest > 0 ? hw.el("p", { class: "note" }, `The first ${MOST_DETAILS} runs are shown; ${rest} more are chosen.`) : null);
      for (const node of this.panel.querySelectorAll("[data-keep]")) node.scrollTop = tops.has(node.dataset.keep) ? Math.min(tops.get(node.dataset.keep), node.scrollHeight) : node.scrollHeight;
    }

    fail(problem) {
      if (problem.status === 401) { this.link.textContent = problem.message; this.link.className = "link bad"; }
      else if (!problem.status) { this.isReachable = false; this.link.textContent = "The board does not answer. It is tried again."; this.link.className = "link bad"; }
    }

    async poll() {
      clearTimeout(this.timer);
      if (this.polling) return;
      this.polling = true;
      try {
        const news = await this.source.state(this.version);
        this.isReachable = true;
        this.link.textContent = "";
        this.link.className = "link";
        this.take(news);
      } catch (problem) { this.fail(problem); }
      this.polling = false;
      if (this.source.isLive) this.timer = setTimeout(() => this.poll(), document.hidden ? SLOW_POLL : POLL);
    }

    take(news) {
      const restarted = news.version < this.version;
      this.version = restarted ? 0 : news.version;
      this.now = news.now;
      const problems = JSON.stringify(news.sources) !== JSON.stringify(this.sources);
      this.sources = news.sources;
      let members = false;
      if (news.ids) { const known = new Set(news.ids); for (const id of [...this.runs.keys()]) if (!known.has(id)) { this.runs.delete(id); members = true; } }
      const chosen = new Set(this.selected()), before = this.runs.size;
      let touched = false;
      for (const run of news.runs) { this.runs.set(run.id, run); touched = touched || chosen.has(run.id); }
      members = members || this.runs.size !== before;
      if (news.runs.length || members || problems) this.sidebar.render();
      if (!this.started) { this.started = true; this.firstChoice(); if (this.store.state.runs !== null) this.store.set({ colors: this.colorize(this.selected()) }); this.charts.refreshMetrics(); this.renderPanel(); }
      else if (this.store.state.runs === null) this.firstChoice();
      else if (touched || members) {
        this.charts.refresh();
        if (!Object.keys(this.charts.metrics).length || Date.now() - (this.metricsAt || 0) > 10000) { this.metricsAt = Date.now(); this.charts.refreshMetrics(); }
        if (this.store.state.tab !== "charts") this.renderPanel();
      }
      this.controls();
    }
  }

  hw.app = new App(hw.openSource());
  hw.app.controls();
  hw.app.poll();
})();
