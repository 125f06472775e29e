// Everything about the chosen runs that is not a curve: settings and their differences, log, events, checkpoints, reports, samples.
"use strict";
(() => {
  const text = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const table = (columns, rows, attributes = {}) => hw.el("div", { class: "scroll" }, hw.el("table", attributes, hw.el("thead", {}, hw.el("tr", {}, columns.map((one) => hw.el("th", { class: one === "step" || one === "size" ? "num" : "" }, one)))), hw.el("tbody", {}, rows)));
  const swatch = (app, run) => hw.el("span", { class: "runname" }, hw.el("i", { class: "swatch", style: { background: hw.color(app.slot(run.id)) } }), run.name);
  const nothing = (words) => hw.el("p", { class: "empty" }, words);

  // Reports are Markdown; a run's folder may hold anything. HTML is shown as it is written, links stay text,
  // and a picture is one that the board gives or none.
  const reader = markdownit({ html: false, breaks: true });
  reader.disable(["autolink", "lheading", "link", "reference"]);
  reader.normalizeLink = (address) => address;
  reader.renderer.rules.image = (tokens, index, options, env, renderer) => {
    const token = tokens[index];
    const address = env.picture(token.attrGet("src"));
    if (!address) return "";
    token.attrSet("src", address);
    token.attrSet("alt", renderer.renderInlineAsText(token.children, options, env));
    token.attrSet("loading", "lazy");
    return renderer.renderToken(tokens, index, options);
  };
  reader.core.ruler.push("page", (state) => {
    for (const token of state.tokens) {
      if (/^heading_/.test(token.type)) token.tag = `h${Math.min(6, Number(token.tag.slice(1)) + 1)}`;
      // The page's policy forbids style attributes; columns of numbers get a class below.
      if (/^t[hd]_open$/.test(token.type)) token.attrs = null;
    }
  });
  const CLEAN = {
    RETURN_DOM_FRAGMENT: true,
    ALLOWED_TAGS: [
      "blockquote", "br", "code", "em", "h2", "h3", "h4", "h5", "h6", "hr", "img", "li", "ol", "p", "pre",
      "s", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "#text",
    ],
    ALLOWED_ATTR: ["alt", "loading", "src", "start"],
  };
  const NUMBER = /^[-+]?[\d.,]+(e[-+]?\d+)?\s*(%|x|s|ms|k|M|GB|MB)?( \([\d.,]+\))?$/;

  hw.markdown = (source, picture) => {
    const content = DOMPurify.sanitize(reader.render(source, { picture }), CLEAN);
    for (const table of content.querySelectorAll("table")) {
      const box = hw.el("div", { class: "scroll fit" });
      table.replaceWith(box);
      box.append(table);
      const [head, ...rows] = table.rows;
      [...head.cells].forEach((_, column) => {
        const texts = rows.map((row) => row.cells[column].textContent);
        const isNumeric = rows.length > 0 && texts.every((text) => !text || NUMBER.test(text));
        for (const row of table.rows) row.cells[column].classList.toggle("num", isNumeric);
      });
    }
    return hw.el("div", { class: "markdown" }, content);
  };

  const maskPicture = (app, run, mask) => {
    const rows = mask.table.length, columns = mask.table[0].length, cell = Math.max(3, Math.min(18, Math.floor(420 / Math.max(rows, columns))));
    const canvas = hw.el("canvas", { class: "mask", width: columns * cell, height: rows * cell, role: "img", "aria-label": `Heads of ${mask.path}` });
    const paint = canvas.getContext("2d"), full = mask.table.flat().filter((one) => one >= 0.5).length;
    mask.table.forEach((row, y) => row.forEach((value, x) => {
      paint.fillStyle = `color-mix(in srgb, ${hw.color(app.slot(run.id))} ${Math.round(100 * Math.max(0, Math.min(1, value)))}%, #8884)`;
      paint.fillRect(x * cell, y * cell, cell - 1, cell - 1);
    }));
    return hw.el("figure", { class: "maskbox" }, canvas, hw.el("figcaption", {}, mask.path, hw.el("br"), `${rows} layers × ${columns} KV heads, ${full} full`));
  };

  const PANELS = {
    config(app, found) {
      const keys = [...new Set(found.flatMap(({ details }) => Object.keys(details.config)))].sort();
      const search = app.store.state.search.toLowerCase(), rows = [];
      const changed = new Set(found.flatMap(({ details }) => details.changed || []));
      // A list that was changed is shown with all its entries.
      const isChanged = (key) => changed.has(key) || [...changed].some((one) => key.startsWith(`${one}.`));
      let same = 0, defaults = 0;
      for (const key of keys) {
        const values = found.map(({ details }) => text(details.config[key])), differs = new Set(values).size > 1;
        if (search && !key.toLowerCase().includes(search) && !values.some((value) => value.toLowerCase().includes(search))) continue;
        if (!search && app.onlyChanged && !differs && !isChanged(key)) { defaults++; continue; }
        if (found.length > 1 && app.onlyDifferences && !differs) { same++; continue; }
        rows.push(hw.el("tr", { class: differs ? "differs" : "" }, hw.el("th", {}, key), values.map((value) => hw.el("td", {}, value))));
      }
      const box = found.length > 1 ? hw.el("label", { class: "option" }, hw.el("input", { type: "checkbox", checked: app.onlyDifferences, onchange: (event) => { app.onlyDifferences = event.target.checked; app.renderPanel(); } }), `only differences between runs${same ? ` (${same} settings are the same)` : ""}`) : null;
      const short = hw.el("label", { class: "option" }, hw.el("input", { type: "checkbox", checked: app.onlyChanged, onchange: (event) => { app.onlyChanged = event.target.checked; app.renderPanel(); } }), `only what differs from the defaults${defaults ? ` (${defaults} settings are defaults)` : ""}`);
      if (!keys.length) return nothing("These runs have no recipe.yaml.");
      return hw.el("div", {}, short, box, rows.length ? table(["setting", ...found.map(({ run }) => swatch(app, run))], rows, { class: "config" }) : nothing("No setting differs."));
    },

    summary(app, found) {
      const keys = [["state", (r) => r.run.state], ["cause", (r) => r.run.cause || "–"], ["step", (r) => hw.number(r.run.step)], ["loss", (r) => hw.number(r.run.loss, 6)],
        ["best loss", (r) => hw.number(r.details.summary.best_loss, 6)], ["last validation loss", (r) => hw.number(r.run.valid_loss ?? r.details.summary.last_valid_loss, 6)],
        ["best validation loss", (r) => hw.number(r.details.summary.best_valid_loss, 6)], ["tokens", (r) => hw.short(r.run.num_consumed_tokens, 4)],
        ["tokens/s", (r) => hw.short(r.run.tokens_per_second, 4)], ["MFU", (r) => (typeof r.run.mfu_full === "number" ? `${(100 * r.run.mfu_full).toFixed(1)} %` : "–")],
        ["memory", (r) => hw.bytes(r.run.memory_bytes)], ["training time", (r) => hw.seconds(r.details.summary.seconds)], ["skipped steps", (r) => text(r.details.summary.skipped_steps) || "–"],
        ["started", (r) => hw.when(r.run.started)], ["hosts", (r) => (r.run.hosts || []).join(", ") || "–"], ["command", (r) => r.details.command || "–"], ["folder", (r) => r.details.folder]];
      return table(["", ...found.map(({ run }) => swatch(app, run))], keys.map(([name, value]) => hw.el("tr", {}, hw.el("th", {}, name), found.map((one) => hw.el("td", { "data-name": name }, value(one))))), { class: "config" });
    },

    log(app, found) {
      return found.map(({ run, log }) => hw.el("section", {}, hw.el("h3", {}, swatch(app, run)), log ? hw.el("pre", { class: "log", "data-keep": run.id }, log) : nothing("no train.log")));
    },

    events(app, found) {
      const rows = found.flatMap(({ run, details }) => details.events.map((event) => ({ run, event }))).sort((a, b) => (b.event.time || 0) - (a.event.time || 0)).slice(0, 500);
      if (!rows.length) return nothing("No events yet.");
      return table(["time", "run", "event", "step", ""], rows.map(({ run, event }) => hw.el("tr", { class: `event ${event.event}` }, hw.el("td", { class: "nowrap" }, hw.when(event.time)), hw.el("td", {}, swatch(app, run)), hw.el("td", {}, hw.el("span", { class: "badge" }, event.event)), hw.el("td", { class: "num" }, hw.number(event.step)), hw.el("td", { class: "pre" }, event.text))));
    },

    checkpoints(app, found) {
      const rows = found.flatMap(({ run, details }) => details.checkpoints.map((one) => hw.el("tr", {}, hw.el("td", {}, swatch(app, run)), hw.el("td", {}, one.name), hw.el("td", { class: "num" }, hw.number(one.step)), hw.el("td", { class: "num" }, hw.bytes(one.bytes)), hw.el("td", { class: "nowrap" }, hw.when(one.time)), hw.el("td", {}, one.links.map((link) => hw.el("span", { class: "badge" }, link)), one.complete ? null : hw.el("span", { class: "badge bad" }, "incomplete")))));
      return rows.length ? table(["run", "checkpoint", "step", "size", "saved", ""], rows) : nothing("No checkpoints.");
    },

    evaluations(app, found) {
      const parts = found.map(({ run, details }) => {
        const beside = (report) => (name) => { const folder = report.path.split("/").slice(0, -1).join("/"), path = folder ? `${folder}/${name}` : name; return report.pictures.includes(path) ? app.source.picture(run.id, path) : ""; };
        const reports = details.reports.map((one) => hw.el("details", { open: true, class: "report" }, hw.el("summary", {}, `${one.path} · ${hw.when(one.time)}`), hw.markdown(one.text, beside(one)),
          one.pictures.filter((path) => !one.text.includes(`(${path.split("/").pop()})`)).map((path) => hw.el("figure", { class: "picture" }, hw.el("img", { src: app.source.picture(run.id, path), alt: path, loading: "lazy" }), hw.el("figcaption", {}, path)))));
        const pictures = details.pictures.map((path) => hw.el("figure", { class: "picture" }, hw.el("img", { src: app.source.picture(run.id, path), alt: path, loading: "lazy" }), hw.el("figcaption", {}, path)));
        const masks = details.masks.map((one) => maskPicture(app, run, one));
        return reports.length || pictures.length || masks.length ? hw.el("section", {}, hw.el("h3", {}, swatch(app, run)), masks.length ? hw.el("div", { class: "maskrow" }, masks) : null, reports, pictures) : null;
      }).filter(Boolean);
      return parts.length ? parts : nothing("No reports below these run folders. `headway eval … --out RUN/eval` and `headway sparsify` write them.");
    },

    samples(app, found) {
      const prompts = new Map();
      for (const { run, details } of found) for (const one of details.samples) {
        if (!prompts.has(one.prompt)) prompts.set(one.prompt, new Map());
        const by = prompts.get(one.prompt);
        if (!by.has(run.id)) by.set(run.id, []);
        by.get(run.id).push(one);
      }
      if (!prompts.size) return nothing("No samples. `headway eval … --out RUN/eval` with prompts writes them.");
      return [...prompts].map(([prompt, by]) => hw.el("section", { class: "sample" }, hw.el("pre", { class: "prompt" }, prompt || "(no prompt)"),
        hw.el("div", { class: "sidebyside" }, found.filter(({ run }) => by.has(run.id)).map(({ run }) => hw.el("div", {}, hw.el("h4", {}, swatch(app, run)), by.get(run.id).map((one) => hw.el("pre", {}, one.text)))))));
    },
  };

  PANELS.rollouts = hw.rolloutsPanel;

  hw.TABS = [["charts", "Charts"], ["summary", "Summary"], ["config", "Config"], ["events", "Events"], ["log", "Log"], ["checkpoints", "Checkpoints"], ["evaluations", "Evaluations"], ["samples", "Samples"], ["rollouts", "Rollouts"]];

  hw.renderPanel = (app, name, found) => (found.length ? PANELS[name](app, found) : nothing("Choose one or more runs on the left."));
})();
