// The list of runs: state, newest numbers, filter, order, and which of them are shown.
"use strict";
(() => {
  const STATES = ["live", "stalled", "failed", "stopped", "done"];

  hw.Sidebar = class {
    constructor(app) {
      this.app = app;
      this.filter = hw.el("input", { type: "search", placeholder: "Filter runs", title: "Text or a regular expression", "aria-label": "Filter runs", value: app.store.state.filter, oninput: () => app.store.set({ filter: this.filter.value }) });
      this.chips = hw.el("div", { class: "chips", role: "group", "aria-label": "States" });
      this.sort = hw.el("select", { "aria-label": "Order of the runs", onchange: () => app.store.set({ sort: this.sort.value }) },
        [["updated", "newest first"], ["name", "by name"], ["loss", "by loss"], ["step", "by step"]].map(([value, text]) => hw.el("option", { value }, text)));
      this.sort.value = app.store.state.sort;
      this.count = hw.el("span", { class: "count" });
      this.list = hw.el("ul", { class: "runs", "aria-label": "Runs" });
      this.problems = hw.el("div", { class: "problems" });
      this.node = hw.el("aside", { class: "sidebar" },
        hw.el("div", { class: "sidehead" }, this.filter, this.chips,
          hw.el("div", { class: "sideline" }, this.count, hw.el("button", { class: "plain", onclick: () => this.selectShown(true) }, "all"),
            hw.el("button", { class: "plain", onclick: () => this.selectShown(false) }, "none"), this.sort)),
        this.problems, this.list);
      this.rows = new Map();
    }

    matches(run) {
      const { filter, states } = this.app.store.state;
      if (states && !states.split(",").includes(run.state)) return false;
      if (!filter) return true;
      const text = `${run.source}/${run.name}`;
      try { return new RegExp(filter, "i").test(text); } catch { return text.toLowerCase().includes(filter.toLowerCase()); }
    }

    shown() {
      const order = this.app.store.state.sort, value = (run) => (typeof run[order] === "number" ? run[order] : Infinity);
      const compare = { updated: (a, b) => b.updated - a.updated, name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }), loss: (a, b) => value(a) - value(b), step: (a, b) => (b.step || 0) - (a.step || 0) }[order] || (() => 0);
      const rank = (run) => (run.state === "live" || run.state === "stalled" ? 0 : 1);
      return [...this.app.runs.values()].filter((run) => this.matches(run)).sort((a, b) => (order === "updated" ? rank(a) - rank(b) : 0) || compare(a, b) || a.name.localeCompare(b.name));
    }

    selectShown(on) {
      const ids = this.shown().map((run) => run.id), chosen = new Set(this.app.selected());
      for (const id of ids) { if (on) chosen.add(id); else chosen.delete(id); }
      this.app.select([...chosen]);
    }

    render() {
      const shown = this.shown(), { states } = this.app.store.state, active = states ? states.split(",") : [];
      const counts = {};
      for (const run of this.app.runs.values()) counts[run.state] = (counts[run.state] || 0) + 1;
      hw.fill(this.chips, STATES.filter((one) => counts[one]).map((one) => hw.el("button", {
        class: `chip ${one}${active.includes(one) ? " on" : ""}`, "aria-pressed": String(active.includes(one)),
        onclick: () => this.app.store.set({ states: (active.includes(one) ? active.filter((other) => other !== one) : [...active, one]).join(",") }),
      }, hw.el("i", { class: `dot ${one}` }), `${one} ${counts[one]}`)));
      this.count.textContent = `${this.app.selected().length} of ${this.app.runs.size} shown`;
      hw.fill(this.problems, this.app.sources.filter((one) => one.problem).map((one) => hw.el("p", {}, hw.el("b", {}, one.label), `: ${one.problem}`)));
      const chosen = new Set(this.app.selected());
      this.list.replaceChildren(...shown.map((run) => this.row(run, chosen.has(run.id))));
    }

    row(run, isChosen) {
      let row = this.rows.get(run.id);
      if (!row) {
        row = { box: hw.el("input", { type: "checkbox", onchange: () => this.app.toggle(run.id) }), name: hw.el("span", { class: "name" }), dot: hw.el("i"), facts: hw.el("div", { class: "facts" }), cause: hw.el("div", { class: "cause" }), bar: hw.el("div", { class: "fillbar" }) };
        row.node = hw.el("li", { "data-run": run.id, onmouseenter: () => this.app.highlight(run.id), onmouseleave: () => this.app.highlight(null) },
          hw.el("label", {}, row.box, hw.el("div", { class: "text" }, hw.el("div", { class: "head" }, row.dot, row.name), row.facts, row.cause, hw.el("div", { class: "progress" }, row.bar))),
          hw.el("button", { class: "only", title: "Show only this run", onclick: () => this.app.select([run.id]) }, "only"));
        this.rows.set(run.id, row);
      }
      const slot = this.app.slot(run.id), color = isChosen ? hw.color(slot) : "";
      row.box.checked = isChosen;
      row.box.setAttribute("aria-label", `Show ${run.name}`);
      row.node.classList.toggle("chosen", isChosen);
      row.node.style.setProperty("--run", color || "transparent");
      row.box.style.accentColor = color;
      row.dot.className = `dot ${run.state}`;
      row.dot.title = run.state;
      row.name.textContent = run.name;
      row.name.title = `${run.source}: ${run.name}`;
      const total = run.total_steps, share = total && run.step !== null ? Math.min(1, run.step / total) : run.state === "done" ? 1 : 0;
      const facts = [run.state, run.step === null ? "no steps yet" : `${hw.number(run.step)}${total && total !== run.step ? ` / ${total >= 1e4 ? hw.short(total, 3) : hw.number(total)}` : " steps"}`];
      if (run.loss !== null && run.loss !== undefined) facts.push(`loss ${hw.number(run.loss, 4)}`);
      if (typeof run.valid_loss === "number") facts.push(`valid ${hw.number(run.valid_loss, 4)}`);
      if (run.state === "live" && run.eta_seconds) facts.push(`${hw.seconds(run.eta_seconds)} left`);
      if (run.alerts) facts.push(`⚠ ${run.alerts}`);
      row.facts.textContent = facts.join(" · ");
      row.facts.title = row.facts.textContent + (run.alerts ? " alerts" : "");
      row.cause.textContent = run.cause || "";
      row.cause.title = run.cause || "";
      row.bar.style.width = `${(100 * share).toFixed(2)}%`;
      row.bar.className = `fillbar ${run.state}`;
      return row.node;
    }
  };
})();
