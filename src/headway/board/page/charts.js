// The charts of the chosen runs, in sections. A chart asks for its curves when it is on the screen, and again for runs that changed.
"use strict";
(() => {
  const FIRST = ["loss", "reward", "valid/loss", "valid/reward", "lr", "grad_norm", "tokens_per_second", "mfu_full", "memory_bytes"];
  const SPEED = /^(tokens_per_second|tgs|mfu_|tflops|step_seconds|fwd_bwd_time|data_wait|save_stall|memory|gpu_|eta_|rollout_|update_tokens|rollout\/(seconds|reward_seconds|tokens_per_second))/;
  const COUNTS = /^(micro_num|num_|largest_|smallest_|epoch$|tokens$|inf_nan|adam_beta2|loss_scale|stage_step|skipped|targets\/)/;
  const SECTIONS = ["Main", "Training", "Validation", "Sources", "Speed and memory", "Counts"];
  const BUDGET = 24000;

  hw.sectionOf = (name, sources) => {
    if (FIRST.includes(name)) return "Main";
    if (COUNTS.test(name)) return "Counts";
    if (/^valid(_at_start)?\//.test(name)) return "Validation";
    const tail = name.indexOf("/") > 0 ? name.slice(name.indexOf("/") + 1) : "";
    if (sources.has(tail)) return "Sources";
    if (SPEED.test(name)) return "Speed and memory";
    return "Training";
  };

  const order = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);

  hw.ChartsView = class {
    constructor(app) {
      this.app = app;
      this.node = hw.el("div", { class: "charts" });
      this.cards = new Map();
      this.sections = new Map();
      this.metrics = {};
      this.queue = [];
      this.active = 0;
      this.tip = hw.el("div", { class: "tip", role: "status" });
      document.body.append(this.tip);
      this.watcher = new IntersectionObserver((entries) => {
        for (const entry of entries) { const card = entry.target.card; card.onScreen = entry.isIntersecting; if (card.onScreen) this.update(card); }
      }, { rootMargin: "200px" });
      this.empty = hw.el("p", { class: "empty" });
    }

    view() {
      const s = this.app.store.state;
      return { axis: s.axis, logX: s.logX, logY: s.logY, smoothing: s.smooth, outliers: s.outliers, zoom: s.zoom };
    }

    async refreshMetrics() {
      const runs = this.app.selected();
      try { this.metrics = await this.app.source.metrics(runs); } catch (problem) { this.app.fail(problem); return; }
      this.layout();
    }

    layout() {
      const { search, focus, closed } = this.app.store.state, chosen = this.app.selected();
      const names = Object.keys(this.metrics).filter((name) => name !== "step");
      const sources = new Set(names.filter((name) => name.startsWith("loss/") || name.startsWith("targets/")).map((name) => name.slice(name.indexOf("/") + 1)));
      let wanted = names;
      if (search) { let test; try { const re = new RegExp(search, "i"); test = (name) => re.test(name); } catch { test = (name) => name.toLowerCase().includes(search.toLowerCase()); } wanted = names.filter(test); }
      const groups = new Map(SECTIONS.map((one) => [one, []]));
      for (const name of wanted) groups.get(hw.sectionOf(name, sources)).push(name);
      if (chosen.length === 1 && !search) {
        const bySource = names.filter((name) => name.startsWith("loss/"));
        if (bySource.length > 1) groups.get("Main").push({ title: "loss by source", metrics: bySource.slice(0, 12) });
      }
      const keep = new Set(), parts = [];
      for (const [title, members] of groups) {
        if (!members.length) continue;
        members.sort((a, b) => order(a.title || a) - order(b.title || b) || String(a.title || a).localeCompare(String(b.title || b), "en", { numeric: true }));
        const shut = search ? false : closed.split(",").includes(title) !== (title === "Counts");
        parts.push(this.section(title, members, shut, keep, focus));
      }
      for (const [key, card] of this.cards) if (!keep.has(key)) { this.watcher.unobserve(card.node); card.chart.destroy(); this.cards.delete(key); }
      this.empty.textContent = !this.app.runs.size ? "No runs here yet. A run appears as soon as it writes its first step." : !chosen.length ? "Choose one or more runs on the left." : search ? "No metric has such a name." : "These runs have not written a step yet.";
      hw.fill(this.node, parts.length ? parts : this.empty);
    }

    section(title, members, shut, keep, focus) {
      const toggle = () => {
        const closed = new Set(this.app.store.state.closed.split(",").filter(Boolean));
        if (closed.has(title)) closed.delete(title); else closed.add(title);
        this.app.store.set({ closed: [...closed].join(",") });
      };
      const head = hw.el("button", { class: "sectionhead", "aria-expanded": String(!shut), onclick: toggle }, hw.el("span", { class: "arrow" }, shut ? "▸" : "▾"), title, hw.el("span", { class: "count" }, String(members.length)));
      if (shut) return hw.el("section", {}, head);
      const cards = members.map((member) => {
        const key = member.title || member;
        keep.add(key);
        const card = this.cards.get(key) || this.card(key, member.metrics || [member], Boolean(member.metrics));
        card.node.classList.toggle("wide", focus === key);
        return card.node;
      });
      return hw.el("section", {}, head, hw.el("div", { class: "grid" }, cards));
    }

    card(key, metrics, bySource) {
      const card = { key, metrics, bySource, data: new Map(), onScreen: false, busy: false };
      const canvas = hw.el("div", { class: "canvas" });
      card.value = hw.el("span", { class: "value" });
      card.legend = hw.el("div", { class: "legend" });
      card.node = hw.el("figure", { class: "card", "data-metric": key },
        hw.el("figcaption", {}, hw.el("span", { class: "title", title: key }, key), card.value,
          hw.el("button", { class: "icon", title: "Wider or narrower", "aria-label": `Resize ${key}`, onclick: () => this.app.store.set({ focus: this.app.store.state.focus === key ? "" : key }) }, "⤢")),
        canvas, card.legend);
      card.node.card = card;
      card.chart = new hw.Chart(canvas, {
        unit: bySource ? (v, digits) => hw.number(v, digits) : hw.metricUnit(metrics[0]),
        onHover: (at, chart, event) => this.hover(at, card, event),
        onZoom: (from, to) => this.app.store.set({ zoom: [from, to] }),
        onReset: () => this.app.store.set({ zoom: null }),
      });
      this.cards.set(key, card);
      this.watcher.observe(card.node);
      return card;
    }

    points(card) {
      const width = card.node.clientWidth || 500, curves = Math.max(1, this.app.selected().length * card.metrics.length);
      return Math.max(120, Math.min(2000, Math.round(2 * width / 100) * 100, Math.floor(BUDGET / curves)));
    }

    wants(card) {
      const s = this.app.store.state, key = JSON.stringify([s.axis, s.zoom, this.points(card)]);
      return { key, runs: this.app.selected().filter((id) => { const known = card.data.get(id), run = this.app.runs.get(id); return run && (!known || known.key !== key || known.version !== run.version); }) };
    }

    update(card) {
      // Draw what is known at once; ask for what is missing or has changed.
      this.draw(card);
      if (!card.onScreen || card.busy) return;
      const { key, runs } = this.wants(card);
      if (!runs.length) return;
      card.busy = true;
      this.queue.push(() => this.load(card, key, runs));
      this.pump();
    }

    pump() {
      while (this.active < 4 && this.queue.length) {
        this.active++;
        this.queue.shift()().finally(() => { this.active--; this.pump(); });
      }
    }

    async load(card, key, runs) {
      const s = this.app.store.state, versions = new Map(runs.map((id) => [id, this.app.runs.get(id)?.version]));
      try {
        const found = await this.app.source.series(runs, card.metrics, { axis: s.axis, points: this.points(card), from: s.zoom ? s.zoom[0] : null, to: s.zoom ? s.zoom[1] : null });
        const by = new Map(runs.map((id) => [id, []]));
        for (const one of found) by.get(one.run)?.push(one);
        for (const [id, curves] of by) card.data.set(id, { key, version: versions.get(id), curves });
      } catch (problem) { this.app.fail(problem); }
      card.busy = false;
      this.draw(card);
      if (card.onScreen && this.wants(card).runs.length && this.app.isReachable) setTimeout(() => this.update(card), 50);
    }

    draw(card) {
      const chosen = this.app.selected(), series = [];
      let partial = false;
      for (const id of chosen) {
        const run = this.app.runs.get(id), known = card.data.get(id);
        if (!run || !known) continue;
        known.curves.forEach((one) => {
          partial = partial || one.partial;
          if (!one.n && !one.bad.length) return;
          const slot = card.bySource ? card.metrics.indexOf(one.metric) : this.app.slot(id);
          const label = card.bySource ? one.metric.slice(one.metric.indexOf("/") + 1) : run.name;
          series.push({ ...one, id, label, color: hw.color(slot), dash: hw.dash(slot), strong: this.app.lit === id, dim: this.app.lit && this.app.lit !== id && !card.bySource });
        });
      }
      const view = this.view();
      if (view.logY && !series.some((one) => one.y.some((value) => value > 0))) view.logY = false;
      card.chart.set(series, view);
      card.series = series;
      card.node.classList.toggle("partial", partial);
      card.node.title = partial ? "A first look: some of the steps. The rest is being indexed." : "";
      const unit = card.chart.options.unit;
      const only = series.length === 1 ? series[0] : null, values = only && view.smoothing > 0 ? only.boldY : only && only.y;
      card.value.textContent = values && values.length ? unit(values[values.length - 1]) : "";
      const bad = series.reduce((sum, one) => sum + one.bad.length, 0);
      hw.fill(card.legend, card.bySource ? series.map((one) => hw.el("span", { class: "key" }, hw.el("i", { style: { background: one.color } }), one.label)) : null, bad ? hw.el("span", { class: "warn" }, `▼ ${bad} not finite`) : null);
      card.node.dataset.points = String(series.reduce((sum, one) => sum + one.n, 0));
    }

    redraw() { for (const card of this.cards.values()) if (card.onScreen) this.draw(card); }
    refresh() { for (const card of this.cards.values()) if (card.onScreen) this.update(card); }

    hover(at, card, event) {
      if (at === null || !card.series) { this.tip.classList.remove("on"); return; }
      const unit = card.chart.options.unit, smoothing = this.app.store.state.smooth > 0;
      const rows = card.chart.valuesAt(at).sort((a, b) => b.point.bold - a.point.bold), shown = rows.slice(0, 14);
      if (!rows.length) { this.tip.classList.remove("on"); return; }
      const nearest = rows.reduce((best, row) => (Math.abs(row.point.x - at) < Math.abs(best.point.x - at) ? row : best), rows[0]);
      hw.fill(this.tip, hw.el("div", { class: "tiphead" }, hw.xText(this.app.store.state.axis, nearest.point.x)),
        shown.map(({ one, point }) => hw.el("div", { class: "tiprow", "data-run": one.id, "data-x": String(point.x), "data-value": String(point.y) },
          hw.el("i", { style: { background: one.color } }), hw.el("span", { class: "name" }, one.label), hw.el("b", {}, unit(smoothing ? point.bold : point.y)), smoothing ? hw.el("span", { class: "raw" }, unit(point.y)) : null)),
        rows.length > shown.length ? hw.el("div", { class: "tipmore" }, `and ${rows.length - shown.length} more`) : null);
      this.tip.classList.add("on");
      const box = this.tip.getBoundingClientRect(), room = 14;
      let left = event.clientX + room, top = event.clientY + room;
      if (left + box.width > innerWidth - 8) left = Math.max(8, event.clientX - room - box.width);
      if (top + box.height > innerHeight - 8) top = Math.max(8, innerHeight - 8 - box.height);
      this.tip.style.transform = `translate(${left}px, ${top}px)`;
    }
  };
})();
