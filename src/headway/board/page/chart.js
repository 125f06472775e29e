// One chart on a canvas. Series come in ({id, label, color, dash, x, y, meanX, meanY, bad}); lines, axes and a crosshair go out.
// A second canvas above holds the crosshair, so that moving the mouse never draws the lines again.
"use strict";
(() => {
  const LEFT = 54, RIGHT = 12, TOP = 8, BOTTOM = 24;

  hw.smooth = (y, given) => {
    // An exponential moving average whose first values are not drawn towards zero. A curve of few points is smoothed over the same part of
    // the picture as one of many, not over the same number of points: otherwise ten validations would lag far behind.
    const weight = given ** Math.max(1, 500 / Math.max(1, y.length));
    const out = new Float64Array(y.length);
    let sum = 0, mass = 0;
    for (let i = 0; i < y.length; i++) {
      sum = sum * weight + y[i] * (1 - weight);
      mass = mass * weight + (1 - weight);
      out[i] = sum / mass;
    }
    return out;
  };

  hw.nearest = (x, value) => {
    let low = 0, high = x.length - 1;
    if (high < 0) return -1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < value) low = middle + 1; else high = middle;
    }
    return low > 0 && Math.abs(x[low - 1] - value) <= Math.abs(x[low] - value) ? low - 1 : low;
  };

  hw.ticks = (low, high, count) => {
    const span = high - low;
    if (!(span > 0)) return [low];
    const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw)), rest = raw / power;
    const step = (rest > 5 ? 10 : rest > 2.5 ? 5 : rest > 2 ? 2.5 : rest > 1 ? 2 : 1) * power;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  };

  hw.byteTicks = (low, high, count) => {
    const unit = 1024 ** Math.floor(Math.log(Math.max(1, Math.abs(high))) / Math.log(1024));
    return hw.ticks(low / unit, high / unit, count).map((one) => one * unit);
  };

  hw.timeTicks = (low, high, count) => {
    const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800, 2592000];
    const raw = (high - low) / Math.max(1, count);
    if (raw < 1) return hw.ticks(low, high, count);
    const step = steps.find((one) => one >= raw) || steps[steps.length - 1] * Math.ceil(raw / steps[steps.length - 1]);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
    return found;
  };

  hw.logTicks = (low, high, most = 8) => {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const factors = last - first <= 1 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : last - first <= 3 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil((last - first) / most));
    const found = [];
    for (let p = first; p <= last; p += every) for (const f of factors) if (f * 10 ** p >= low && f * 10 ** p <= high) found.push(f * 10 ** p);
    return found.length > 1 ? found : hw.ticks(low, high, 4);
  };

  hw.Chart = class {
    constructor(holder, options) {
      this.holder = holder;
      this.options = options; // unit, onHover(x | null), onZoom(from, to), onReset()
      this.base = hw.el("canvas", { class: "lines" });
      this.over = hw.el("canvas", { class: "cross" });
      holder.append(this.base, this.over);
      this.series = [];
      this.view = { axis: "step", logX: false, logY: false, smoothing: 0, outliers: true, zoom: null };
      this.drag = null;
      this.over.addEventListener("pointermove", (event) => this.move(event));
      this.over.addEventListener("pointerleave", () => { if (!this.drag) this.options.onHover(null, this); });
      this.over.addEventListener("pointerdown", (event) => this.press(event));
      this.over.addEventListener("pointerup", (event) => this.release(event));
      this.over.addEventListener("dblclick", () => this.options.onReset());
      new ResizeObserver(() => this.draw()).observe(holder);
    }

    set(series, view) { this.series = series; this.view = view; this.draw(); }

    size() {
      const ratio = window.devicePixelRatio || 1, width = this.holder.clientWidth, height = this.holder.clientHeight;
      for (const canvas of [this.base, this.over]) {
        if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
          canvas.width = Math.round(width * ratio);
          canvas.height = Math.round(height * ratio);
        }
      }
      return { width, height, ratio };
    }

    prepare() {
      // What is drawn of each series: faint points and a bold line.
      for (const one of this.series) {
        // A long curve is its lowest and highest points, which are drawn faintly, and its means, which are the line.
        const hasMeans = one.meanX && one.meanX.length > 0, middle = hasMeans ? one.meanY : one.y;
        one.boldX = hasMeans ? one.meanX : one.x;
        one.boldY = this.view.smoothing > 0 ? hw.smooth(middle, this.view.smoothing) : middle;
      }
    }

    range() {
      const { logX, logY, zoom, outliers } = this.view;
      let x0 = Infinity, x1 = -Infinity;
      for (const { x } of this.series) if (x.length) { x0 = Math.min(x0, x[0]); x1 = Math.max(x1, x[x.length - 1]); }
      if (zoom) [x0, x1] = zoom;
      if (logX) x0 = Math.max(x0, x1 > 1 ? Math.min(1, x1) : x1 / 1000);
      const seen = [];
      let low = Infinity, high = -Infinity;
      for (const one of this.series) {
        for (const [xs, ys] of this.view.smoothing > 0.9 ? [[one.boldX, one.boldY]] : [[one.x, one.y]]) {
          for (let i = 0; i < xs.length; i++) {
            if (xs[i] < x0 || xs[i] > x1 || (logY && !(ys[i] > 0))) continue;
            if (ys[i] < low) low = ys[i];
            if (ys[i] > high) high = ys[i];
            if (!outliers) seen.push(ys[i]);
          }
        }
      }
      if (!outliers && seen.length > 20) {
        seen.sort((a, b) => a - b);
        const at = (share) => seen[Math.floor(share * (seen.length - 1))];
        const first = at(0.01), last = at(0.99), room = 0.3 * (last - first);
        low = Math.max(low, first - room);
        high = Math.min(high, last + room);
      }
      if (!(low <= high)) { low = 0; high = 1; }
      if (!(x0 <= x1)) { x0 = 0; x1 = 1; }
      if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
      if (logY) { const room = Math.max(1.02, (high / low) ** 0.05); low /= room; high *= room; }
      else { const room = high > low ? 0.05 * (high - low) : Math.max(Math.abs(high) * 0.05, 1e-9); const floor = low >= 0; low -= room; high += room; if (floor && low < 0) low = 0; }
      return { x0, x1, low, high };
    }

    scales(size) {
      const { logX, logY } = this.view, range = this.range();
      const inner = { left: LEFT, right: size.width - RIGHT, top: TOP, bottom: size.height - BOTTOM };
      const span = (a, b, from, to, log) => {
        const fa = log ? Math.log(a) : a, fb = log ? Math.log(b) : b;
        return {
          to: (value) => from + ((log ? Math.log(Math.max(value, 1e-300)) : value) - fa) / (fb - fa) * (to - from),
          back: (pixel) => { const t = fa + (pixel - from) / (to - from) * (fb - fa); return log ? Math.exp(t) : t; },
        };
      };
      return { inner, range, x: span(range.x0, range.x1, inner.left, inner.right, logX), y: span(range.low, range.high, inner.bottom, inner.top, logY) };
    }

    draw() {
      const size = this.size();
      if (size.width < 60 || size.height < 60) return;
      this.prepare();
      const scale = this.scale = this.scales(size), paint = this.base.getContext("2d"), { inner } = scale;
      const style = getComputedStyle(this.holder), ink = style.getPropertyValue("--axis").trim(), grid = style.getPropertyValue("--grid").trim();
      paint.setTransform(size.ratio, 0, 0, size.ratio, 0, 0);
      paint.clearRect(0, 0, size.width, size.height);
      this.axes(paint, scale, ink, grid);
      paint.save();
      paint.beginPath();
      paint.rect(inner.left, inner.top - 2, inner.right - inner.left, inner.bottom - inner.top + 4);
      paint.clip();
      const bold = this.view.smoothing > 0, many = this.series.length > 12;
      for (const one of this.series) {
        if ((bold || one.boldX !== one.x) && !many) this.line(paint, scale, one, one.x, one.y, bold ? 0.28 : 0.4, 1);
        this.line(paint, scale, one, one.boldX, one.boldY, one.dim ? 0.25 : 1, one.strong ? 2.6 : many ? 1.2 : 1.6);
        paint.globalAlpha = 1;
        paint.fillStyle = one.color;
        for (const at of one.bad || []) { // NaN or infinite: a mark at the top
          const px = scale.x.to(at);
          paint.beginPath(); paint.moveTo(px - 4, inner.top); paint.lineTo(px + 4, inner.top); paint.lineTo(px, inner.top + 7); paint.fill();
        }
      }
      paint.restore();
      this.overlay(this.at === undefined ? null : this.at);
    }

    line(paint, scale, one, xs, ys, alpha, width) {
      const log = this.view.logY, only = xs.length <= 60;
      paint.globalAlpha = alpha;
      paint.strokeStyle = paint.fillStyle = one.color;
      paint.lineWidth = width;
      paint.lineJoin = "round";
      paint.setLineDash(one.dash || []);
      paint.beginPath();
      let pen = false;
      for (let i = 0; i < xs.length; i++) {
        if (log && !(ys[i] > 0)) { pen = false; continue; }
        const px = scale.x.to(xs[i]), py = scale.y.to(ys[i]);
        if (pen) paint.lineTo(px, py); else paint.moveTo(px, py);
        pen = true;
      }
      paint.stroke();
      paint.setLineDash([]);
      if (only && alpha > 0.5) {
        for (let i = 0; i < xs.length; i++) {
          if (log && !(ys[i] > 0)) continue;
          paint.beginPath(); paint.arc(scale.x.to(xs[i]), scale.y.to(ys[i]), xs.length < 25 ? 2.4 : 1.6, 0, 7); paint.fill();
        }
      }
      paint.globalAlpha = 1;
    }

    axes(paint, scale, ink, grid) {
      const { inner, range } = scale, { axis, logX, logY } = this.view;
      paint.font = "11px system-ui, sans-serif";
      paint.lineWidth = 1;
      const rows = Math.max(2, Math.floor((inner.bottom - inner.top) / 34));
      const ys = logY ? hw.logTicks(range.low, range.high, rows) : (this.options.unit === hw.bytes ? hw.byteTicks : hw.ticks)(range.low, range.high, rows);
      paint.textAlign = "right";
      paint.textBaseline = "middle";
      let lastY = Infinity;
      for (const value of ys) {
        const py = Math.round(scale.y.to(value)) + 0.5;
        if (py > inner.bottom + 1 || py < inner.top - 1) continue;
        paint.strokeStyle = grid;
        paint.beginPath(); paint.moveTo(inner.left, py); paint.lineTo(inner.right, py); paint.stroke();
        if (lastY - py < 13) continue;
        paint.fillStyle = ink;
        paint.fillText(Math.abs(value) >= 1e4 && this.options.unit !== hw.bytes ? hw.short(value, 4) : this.options.unit(value), inner.left - 6, py);
        lastY = py;
      }
      const columns = Math.max(2, Math.floor((inner.right - inner.left) / 84));
      const xs = logX ? hw.logTicks(range.x0, range.x1, columns) : axis === "time" ? hw.timeTicks(range.x0, range.x1, columns) : hw.ticks(range.x0, range.x1, columns);
      paint.textBaseline = "top";
      let end = -Infinity;
      for (const value of xs) {
        const px = Math.round(scale.x.to(value)) + 0.5;
        if (px < inner.left - 1 || px > inner.right + 1) continue;
        const text = axis === "time" ? hw.seconds(value) : Math.abs(value) >= 1e4 ? hw.short(value, 4) : String(value), wide = paint.measureText(text).width;
        const left = Math.max(inner.left - 8, Math.min(px - wide / 2, inner.right + RIGHT - 2 - wide));
        paint.strokeStyle = grid;
        paint.beginPath(); paint.moveTo(px, inner.bottom); paint.lineTo(px, inner.bottom + 4); paint.stroke();
        if (left < end + 10) continue;
        paint.textAlign = "left";
        paint.fillStyle = ink;
        paint.fillText(text, left, inner.bottom + 7);
        end = left + wide;
      }
      paint.strokeStyle = ink;
      paint.globalAlpha = 0.5;
      paint.beginPath(); paint.moveTo(inner.left, inner.bottom + 0.5); paint.lineTo(inner.right, inner.bottom + 0.5); paint.stroke();
      paint.globalAlpha = 1;
    }

    overlay(at) {
      this.at = at;
      const size = this.size(), paint = this.over.getContext("2d"), scale = this.scale;
      paint.setTransform(size.ratio, 0, 0, size.ratio, 0, 0);
      paint.clearRect(0, 0, size.width, size.height);
      if (!scale) return;
      const style = getComputedStyle(this.holder);
      if (this.drag && this.drag.moved) {
        paint.fillStyle = style.getPropertyValue("--accent").trim();
        paint.globalAlpha = 0.18;
        const left = Math.min(this.drag.from, this.drag.to), right = Math.max(this.drag.from, this.drag.to);
        paint.fillRect(left, scale.inner.top, right - left, scale.inner.bottom - scale.inner.top);
        paint.globalAlpha = 1;
        return;
      }
      if (at === null || at === undefined) return;
      const px = scale.x.to(at);
      if (px < scale.inner.left || px > scale.inner.right) return;
      paint.strokeStyle = style.getPropertyValue("--axis").trim();
      paint.globalAlpha = 0.6;
      paint.beginPath(); paint.moveTo(Math.round(px) + 0.5, scale.inner.top); paint.lineTo(Math.round(px) + 0.5, scale.inner.bottom); paint.stroke();
      paint.globalAlpha = 1;
      for (const { point, one } of this.valuesAt(at)) {
        const py = scale.y.to(point.bold);
        if (py < scale.inner.top - 2 || py > scale.inner.bottom + 2) continue;
        paint.fillStyle = one.color;
        paint.strokeStyle = style.getPropertyValue("--card").trim();
        paint.beginPath(); paint.arc(scale.x.to(point.x), py, 3.5, 0, 7); paint.fill(); paint.stroke();
      }
    }

    valuesAt(at) {
      const found = [];
      for (const one of this.series) {
        const index = hw.nearest(one.x, at);
        if (index < 0 || at > one.x[one.x.length - 1] + (this.scale.range.x1 - this.scale.range.x0) * 0.02) continue;
        const smooth = one.boldX === one.x ? index : hw.nearest(one.boldX, at);
        found.push({ one, point: { x: one.x[index], y: one.y[index], bold: one.boldY[smooth] } });
      }
      return found;
    }

    locate(event) { const box = this.over.getBoundingClientRect(); return event.clientX - box.left; }

    press(event) { if (event.button === 0) { this.drag = { from: this.locate(event), to: this.locate(event), moved: false }; this.over.setPointerCapture(event.pointerId); } }

    move(event) {
      if (!this.scale) return;
      const px = this.locate(event);
      if (this.drag) {
        this.drag.to = Math.max(this.scale.inner.left, Math.min(px, this.scale.inner.right));
        this.drag.moved = this.drag.moved || Math.abs(this.drag.to - this.drag.from) > 5;
        if (this.drag.moved) { this.options.onHover(null, this); this.overlay(null); return; }
      }
      const inside = px >= this.scale.inner.left - 4 && px <= this.scale.inner.right + 4;
      this.options.onHover(inside ? this.scale.x.back(px) : null, this, event);
    }

    release() {
      const drag = this.drag;
      this.drag = null;
      if (drag && drag.moved && this.scale) {
        const ends = [this.scale.x.back(drag.from), this.scale.x.back(drag.to)].sort((a, b) => a - b);
        this.options.onZoom(ends[0], ends[1]);
      }
      this.overlay(null);
    }
  };
})();
