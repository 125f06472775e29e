// Where the page's numbers come from: the server it was loaded from, or what is embedded in a report file. Both answer the same questions.
"use strict";
(() => {
  hw.unpack = (buffer) => {
    // 4 bytes: length of the JSON head; the head; float64 numbers.
    const length = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    let offset = 4 + length;
    const take = (count) => { const part = new Float64Array(buffer, offset, count); offset += 8 * count; return part; };
    for (const one of head.series) {
      one.x = take(one.n); one.y = take(one.n);
      one.meanX = take(one.means); one.meanY = take(one.means);
      one.bad = take(one.bad);
    }
    return head.series;
  };

  class Live {
    constructor() { this.isLive = true; this.version = 0; }

    async get(path) {
      const answer = await fetch(path, { credentials: "same-origin", cache: "no-store" });
      if (!answer.ok) {
        let text = `${answer.status}`;
        try { text = (await answer.json()).error || text; } catch { /* no JSON: the status says enough */ }
        throw Object.assign(new Error(text), { status: answer.status });
      }
      return answer;
    }

    async state(since) { return (await this.get(`/api/state?since=${since}`)).json(); }

    query(values) {
      const parts = [];
      for (const [name, value] of Object.entries(values)) for (const one of [].concat(value)) if (one !== null && one !== undefined) parts.push(`${name}=${encodeURIComponent(one)}`);
      return parts.join("&");
    }

    async metrics(runs) { return runs.length ? (await this.get(`/api/metrics?${this.query({ run: runs })}`)).json() : {}; }

    async series(runs, metrics, view) {
      const query = this.query({ run: runs, metric: metrics, x: view.axis, points: view.points, from: view.from, to: view.to });
      return hw.unpack(await (await this.get(`/api/series?${query}`)).arrayBuffer());
    }

    async details(run) { return (await this.get(`/api/details?${this.query({ run })}`)).json(); }
    async rollouts(run, view) { return (await this.get(`/api/rollouts?${this.query({ run, ...view })}`)).json(); }
    async log(run) { return (await (await this.get(`/api/log?${this.query({ run })}`)).json()).text; }
    picture(run, path) { return `/api/file?${this.query({ run, path })}`; }
  }

  class Embedded {
    constructor(content) { this.isLive = false; this.content = content; this.known = {}; }

    async state() { return { version: 1, now: this.content.now, ids: this.content.runs.map((run) => run.id), runs: this.content.runs, sources: [] }; }

    async metrics(runs) {
      const found = {};
      for (const run of runs) for (const [name, count] of Object.entries(this.content.metrics[run] || {})) found[name] = Math.max(found[name] || 0, count);
      return found;
    }

    decode(run, axis) {
      const key = `${run} ${axis}`;
      if (!this.known[key]) {
        const packed = (this.content.curves[run] || {})[axis];
        this.known[key] = packed ? hw.unpack(Uint8Array.from(atob(packed), (c) => c.charCodeAt(0)).buffer) : [];
      }
      return this.known[key];
    }

    async series(runs, metrics, view) { return runs.flatMap((run) => this.decode(run, view.axis).filter((one) => metrics.includes(one.metric)).map((one) => ({ ...one, run }))); }
    async details(run) { return this.content.details[run]; }

    async rollouts(run, view) {
      const known = (this.content.rollouts || {})[run];
      return known ? { figures: known.figures, page: known.pages[view.order] } : null;
    }

    async log(run) { return (this.content.logs || {})[run] || ""; }
    picture(run, path) { return (this.content.pictures[run] || {})[path] || ""; }
  }

  hw.openSource = () => {
    const embedded = document.getElementById("embedded");
    return embedded ? new Embedded(JSON.parse(embedded.textContent)) : new Live();
  };
})();
