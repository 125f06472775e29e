// What the chosen runs have sampled: distributions of reward and length, and answers beside what they earned.
"use strict";
(() => {
  const PAGE = 20;
  const ORDERS = [
    ["sampled", "prompt by prompt"], ["best", "best of the step"], ["worst", "worst of the step"],
    ["best_of_run", "best of the run"], ["worst_of_run", "worst of the run"],
  ];
  const QUANTILES = [["high", "highest", 4], ["p90", "90 %", 2], ["mean", "mean", 0], ["median", "median", 5], ["p10", "10 %", 2], ["low", "lowest", 4]];
  const VIEW = { axis: "step", logX: false, logY: false, smoothing: 0, outliers: true, zoom: null };
  const share = (value) => `${hw.number(100 * value, 3)} %`;

  // A plot stays while its run grows: only its numbers change.
  const known = new Map();

  const line = (figures, label, slot, dash, valueAt) => {
    const x = [];
    const y = [];
    figures.step.forEach((step, index) => {
      const value = valueAt(index);
      if (typeof value !== "number") return;
      x.push(step);
      y.push(value);
    });
    return { id: label, label, color: hw.color(slot), dash, x: Float64Array.from(x), y: Float64Array.from(y), bad: [] };
  };

  const spread = (figures, column) => QUANTILES.map(([name, label, slot]) =>
    line(figures, label, slot, name === "mean" ? [] : [4, 3], (index) => figures[column][index] && figures[column][index][name]));

  const CHARTS = [
    ["reward of an answer", (value, digits) => hw.number(value, digits), (figures) => spread(figures, "reward")],
    ["tokens of an answer", (value, digits) => hw.number(value, digits), (figures) => spread(figures, "tokens")],
    ["shares", share, (figures) => [
      line(figures, "prompts without signal", 1, [], (index) => figures.no_signal[index]),
      line(figures, "answers that were cut", 6, [4, 3], (index) => figures.cut[index]),
      line(figures, "answers on which a reward failed", 3, [2, 2], (index) => figures.failed[index] / Math.max(1, figures.answers[index])),
    ]],
  ];

  const makeChart = (app, title, unit) => {
    const canvas = hw.el("div", { class: "canvas" });
    const legend = hw.el("div", { class: "legend" });
    const node = hw.el("figure", { class: "card", "data-rollouts": title }, hw.el("figcaption", {}, hw.el("span", { class: "title" }, title)), canvas, legend);
    const card = { node, legend, series: [] };
    card.chart = new hw.Chart(canvas, {
      unit,
      onHover: (at, chart, event) => app.charts.hover(at, card, event),
      onZoom: () => {},
      onReset: () => {},
    });
    return card;
  };

  const charts = (app, run, figures) => {
    if (!known.has(run.id)) known.set(run.id, CHARTS.map(([title, unit]) => makeChart(app, title, unit)));
    const cards = known.get(run.id);
    cards.forEach((card, index) => {
      card.series = CHARTS[index][2](figures);
      card.chart.set(card.series, VIEW);
      card.node.dataset.points = String(card.series.reduce((sum, one) => sum + one.x.length, 0));
      hw.fill(card.legend, card.series.map((one) => hw.el("span", { class: "key" }, hw.el("i", { style: { background: one.color } }), one.label)));
    });
    return hw.el("div", { class: "grid" }, cards.map((card) => card.node));
  };

  const histogram = ({ low, high, counts }) => {
    const most = Math.max(1, ...counts);
    return hw.el("div", { class: "histogram", role: "img", "aria-label": "Rewards of the step" },
      hw.el("span", {}, hw.number(low, 3)),
      counts.map((count, index) => {
        const from = low + ((high - low) * index) / counts.length;
        return hw.el("i", { title: `${count} answers from ${hw.number(from, 3)} on`, style: { height: `${count ? 3 + (33 * count) / most : 1}px` } });
      }),
      hw.el("span", {}, hw.number(high, 3)));
  };

  const answer = (one) => {
    const parts = Object.entries(one.parts);
    const badges = [
      hw.el("span", { class: "badge reward" }, one.reward === null ? "no reward yet" : `reward ${hw.number(one.reward, 4)}`),
      parts.length > 1 ? parts.map(([name, value]) => hw.el("span", { class: "badge" }, `${name} ${hw.number(value, 4)}`)) : null,
      hw.el("span", { class: one.finished === "length" || one.finished === "context" ? "badge bad" : "badge" }, `${one.finished} after ${one.tokens} tokens`),
      hw.el("span", { class: "badge" }, `weights after ${one.version} updates`),
    ];
    return hw.el("div", { class: "answer", "data-reward": String(one.reward) }, hw.el("div", {}, badges), hw.el("pre", {}, one.text),
      one.problems.map((text) => hw.el("p", { class: "warn" }, `failed: ${text}`)));
  };

  const answers = (page) => {
    const parts = [];
    let last = "";
    for (const one of page.answers) {
      const key = `${one.batch} ${one.prompt}`;
      if (key !== last) parts.push(hw.el("h4", {}, `prompt ${one.prompt}, step ${one.step}`), hw.el("pre", { class: "prompt" }, one.question || "(the journal has no question)"));
      last = key;
      parts.push(answer(one));
    }
    return parts;
  };

  const controls = (app, { figures, page }) => {
    const view = app.rolloutView;
    const set = (changes) => { Object.assign(view, changes); app.renderPanel(); };
    const orders = hw.el("div", { class: "segments", role: "group", "aria-label": "Order of answers" },
      ORDERS.map(([order, words]) => hw.el("button", { class: view.order === order ? "on" : "", "data-order": order, onclick: () => set({ order, from: 0 }) }, words)));
    const button = (words, name, changes, isPossible) => hw.el("button", { class: "toggle", "data-go": name, disabled: !isPossible, onclick: () => set(changes) }, words);

    // Reports have the newest step alone, and the first page.
    const steps = [];
    if (app.source.isLive && page.batch !== undefined) {
      const at = figures.batch.indexOf(page.batch);
      const last = figures.batch.length - 1;
      steps.push(
        button("‹", "before", { batch: figures.batch[at - 1], from: 0 }, at > 0),
        hw.el("span", { class: "note" }, `step ${figures.step[at] ?? "?"}`),
        button("›", "after", { batch: at + 1 >= last ? null : figures.batch[at + 1], from: 0 }, at >= 0 && at < last),
      );
    }
    const pages = [];
    if (app.source.isLive && page.total > PAGE) {
      const end = Math.min(page.first + PAGE, page.total);
      pages.push(
        button("‹", "earlier", { from: Math.max(0, page.first - PAGE) }, page.first > 0),
        hw.el("span", { class: "note" }, `${page.first + 1}–${end} of ${page.total} answers`),
        button("›", "later", { from: page.first + PAGE }, end < page.total),
      );
    }
    return hw.el("div", { class: "tools answers" }, orders, steps, pages, page.rewards ? histogram(page.rewards) : null);
  };

  hw.rolloutsPanel = (app, found) => {
    const parts = found.filter(({ rollouts }) => rollouts && rollouts.figures.batch.length).map(({ run, rollouts }) => {
      const notes = [];
      if (rollouts.figures.partial) notes.push("The journal is still being read.");
      if (rollouts.figures.bad_lines) notes.push(`${rollouts.figures.bad_lines} lines of the journal cannot be read and are left out.`);
      return hw.el("section", {},
        hw.el("h3", {}, hw.el("span", { class: "runname" }, hw.el("i", { class: "swatch", style: { background: hw.color(app.slot(run.id)) } }), run.name)),
        notes.map((text) => hw.el("p", { class: "note" }, text)),
        charts(app, run, rollouts.figures), controls(app, rollouts), answers(rollouts.page));
    });
    for (const [id, cards] of known) {
      if (found.some(({ run }) => run.id === id)) continue;
      for (const card of cards) card.chart.destroy();
      known.delete(id);
    }
    return parts.length ? parts : hw.el("p", { class: "empty" }, "These runs have sampled no answers. Runs of objective grpo do; journals of runs on other machines are not copied.");
  };
})();
