// One chart, drawn by uPlot. Curves come in ({id, label, color, dash, x, y, meanX, meanY, bad});
// lines, axes and a crosshair that all charts share go out.
"use strict";
(() => {
  const FONT = "11px system-ui, sans-serif";
  const NO_CURVE = { color: "transparent", x: [], y: [], alpha: 1, width: 1, isBold: false };

  // Where the mouse is, on the horizontal axis of all charts.
  let crosshair = null;

  hw.smooth = (y, chosenWeight) => {
    // An exponential moving average whose first values are not drawn towards zero. A curve of few
    // points is smoothed over the same part of the picture as one of many, not over the same number
    // of points: otherwise ten validations would lag far behind.
    const weight = chosenWeight ** Math.max(1, 500 / Math.max(1, y.length));
    const out = new Float64Array(y.length);
    let sum = 0;
    let mass = 0;
    for (let i = 0; i < y.length; i++) {
      sum = sum * weight + y[i] * (1 - weight);
      mass = mass * weight + (1 - weight);
      out[i] = sum / mass;
    }
    return out;
  };

  hw.nearest = (x, value) => {
    let low = 0;
    let high = x.length - 1;
    if (high < 0) return -1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < value) low = middle + 1;
      else high = middle;
    }
    const isBefore = low > 0 && Math.abs(x[low - 1] - value) <= Math.abs(x[low] - value);
    return isBefore ? low - 1 : low;
  };

  // Steps between the marks of an axis.
  const COUNTS = Array.from({ length: 19 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
  const BYTES = Array.from({ length: 60 }, (_, power) => 2 ** power);
  const SECONDS = [
    0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200,
    86400, 172800, 604800, 2592000, 7776000, 31536000,
  ];

  // The marks of a logarithmic axis. uPlot marks 1, 2, 3, ... of each power of ten: a curve between two
  // of those would have no mark at all.
  const logSplits = (u, axis, low, high) => {
    const splits = [];
    const decades = Math.log10(high / low);
    if (decades < 0.5) {
      const raw = (high - low) / 5;
      const power = 10 ** Math.floor(Math.log10(raw));
      const step = power * [1, 2, 2.5, 5, 10].find((digit) => digit * power >= raw * 0.999);
      for (let i = Math.ceil(low / step); i * step <= high; i++) splits.push(Number((i * step).toPrecision(12)));
      return splits;
    }
    let digits = [1];
    if (decades <= 3) digits = [1, 2, 5];
    if (decades <= 1) digits = [1, 1.5, 2, 3, 4, 5, 6, 8];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
      for (const digit of digits) {
        const value = Number((digit * 10 ** power).toPrecision(12));
        if (value >= low && value <= high) splits.push(value);
      }
    }
    return splits;
  };

  // Of marks that are too close to each other for their texts, only the first keeps it.
  const withRoom = (u, splits, axis) => {
    const scale = axis === 0 ? "x" : "y";
    const room = axis === 0 ? 44 : 14;
    let last = -Infinity;
    return splits.map((value) => {
      const position = u.valToPos(value, scale);
      if (Math.abs(position - last) < room) return null;
      last = position;
      return value;
    });
  };

  hw.Chart = class {
    constructor(holder, options) {
      this.holder = holder;
      this.options = options; // unit, onHover(x | null, chart, event), onZoom(from, to), onReset()
      this.series = [];
      this.plot = null;
      this.key = "";
      this.sizes = new ResizeObserver(() => this.resize());
      this.sizes.observe(holder);
    }

    set(series, view) {
      this.series = series;
      this.view = view;
      this.draw();
    }

    destroy() {
      this.sizes.disconnect();
      this.plot?.destroy();
    }

    size() { return { width: this.holder.clientWidth, height: this.holder.clientHeight }; }

    resize() {
      const size = this.size();
      if (size.width < 60 || size.height < 60) return;
      if (this.plot) this.plot.setSize(size);
      else if (this.view) this.draw();
    }

    prepare() {
      // What is drawn of each curve: faint points and a bold line.
      for (const curve of this.series) {
        // A long curve is its lowest and highest points, which are drawn faintly, and its means,
        // which are the line.
        const hasMeans = curve.meanX && curve.meanX.length > 0;
        const middle = hasMeans ? curve.meanY : curve.y;
        curve.boldX = hasMeans ? curve.meanX : curve.x;
        curve.boldY = this.view.smoothing > 0 ? hw.smooth(middle, this.view.smoothing) : middle;
      }
    }

    // All faint lines, then all bold ones, so that no curve hides another's line; the highlighted one is last.
    lines() {
      const isSmooth = this.view.smoothing > 0;
      const many = this.series.length > 12;
      const faint = [];
      const bold = [];
      for (const curve of this.series) {
        const { color, dash } = curve;
        if ((isSmooth || curve.boldX !== curve.x) && !many && curve.x.length) {
          faint.push({ curve, color, dash, x: curve.x, y: curve.y, alpha: isSmooth ? 0.28 : 0.4, width: 1, isBold: false });
        }
        let width = many ? 1.2 : 1.6;
        if (curve.strong) width = 2.6;
        if (curve.boldX.length) {
          bold.push({ curve, color, dash, x: curve.boldX, y: curve.boldY, alpha: curve.dim ? 0.25 : 1, width, isBold: true });
        }
      }
      bold.sort((a, b) => Number(a.curve.strong) - Number(b.curve.strong));
      // uPlot wants a line even where nothing is known yet.
      return faint.length + bold.length ? [...faint, ...bold] : [NO_CURVE];
    }

    range() {
      const { logX, logY, zoom, outliers } = this.view;
      let x0 = Infinity;
      let x1 = -Infinity;
      for (const { x } of this.series) {
        if (!x.length) continue;
        x0 = Math.min(x0, x[0]);
        x1 = Math.max(x1, x[x.length - 1]);
      }
      if (zoom) [x0, x1] = zoom;
      if (logX) x0 = Math.max(x0, x1 > 1 ? Math.min(1, x1) : x1 / 1000);
      const values = [];
      let low = Infinity;
      let high = -Infinity;
      for (const curve of this.series) {
        // With strong smoothing the line alone counts: the points around it are background.
        const onlyLine = this.view.smoothing > 0.9;
        const xs = onlyLine ? curve.boldX : curve.x;
        const ys = onlyLine ? curve.boldY : curve.y;
        for (let i = 0; i < xs.length; i++) {
          if (xs[i] < x0 || xs[i] > x1 || (logY && !(ys[i] > 0))) continue;
          if (ys[i] < low) low = ys[i];
          if (ys[i] > high) high = ys[i];
          if (!outliers) values.push(ys[i]);
        }
      }
      if (!outliers && values.length > 20) {
        values.sort((a, b) => a - b);
        const quantile = (share) => values[Math.floor(share * (values.length - 1))];
        const room = 0.3 * (quantile(0.99) - quantile(0.01));
        low = Math.max(low, quantile(0.01) - room);
        high = Math.min(high, quantile(0.99) + room);
      }
      if (!(low <= high)) [low, high] = logY ? [0.1, 1] : [0, 1];
      if (!(x0 <= x1)) [x0, x1] = logX ? [0.1, 1] : [0, 1];
      if (x0 === x1) [x0, x1] = logX ? [x0 / 2, x1 * 2] : [x0 - 0.5, x1 + 0.5];
      if (logY) {
        const room = Math.max(1.02, (high / low) ** 0.05);
        return { x0, x1, low: low / room, high: high * room };
      }
      const room = high > low ? 0.05 * (high - low) : Math.max(Math.abs(high) * 0.05, 1e-9);
      const isPositive = low >= 0;
      low -= room;
      if (isPositive && low < 0) low = 0;
      return { x0, x1, low, high: high + room };
    }

    // Draw what is known. The plot stays as long as its lines and axes look the same; then only its
    // numbers change, and the crosshair stays where it is.
    draw() {
      const size = this.size();
      if (size.width < 60 || size.height < 60) return;
      this.prepare();
      this.drawn = this.lines();
      this.limits = this.range();
      const { logX, logY, axis } = this.view;
      const looks = this.drawn.map(({ color, dash, alpha, width, isBold }) => [color, dash, alpha, width, isBold]);
      const key = JSON.stringify([logX, logY, axis, document.documentElement.dataset.theme, looks]);
      const positive = (values) => (values.some((value) => !(value > 0)) ? Array.from(values, (value) => (value > 0 ? value : null)) : values);
      const data = [null, ...this.drawn.map(({ x, y }) => [x, logY ? positive(y) : y])];
      if (this.plot && this.key === key) {
        this.plot.setData(data);
        return;
      }
      this.plot?.destroy();
      this.plot = new uPlot(this.plotOptions(size), data, this.holder);
      this.key = key;
      this.touch(this.plot.over);
    }

    plotOptions(size) {
      const style = getComputedStyle(this.holder);
      const color = (name) => style.getPropertyValue(name).trim();
      const line = (index) => this.drawn[index - 1];
      const { logX, logY } = this.view;
      return {
        ...size,
        mode: 2, // each line has an x of its own
        padding: [8, 20, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false, distr: logX ? 3 : 1, range: () => [this.limits.x0, this.limits.x1] },
          y: { distr: logY ? 3 : 1, range: () => [this.limits.low, this.limits.high] },
        },
        axes: this.axes(color("--axis"), color("--grid")),
        series: [
          null,
          ...this.drawn.map((look) => ({
            facets: [{ scale: "x", auto: false }, { scale: "y", auto: false }],
            auto: false,
            stroke: look.color,
            dash: look.dash,
            alpha: look.alpha,
            width: look.width,
            pxAlign: 0,
            points: {
              show: false,
              fill: look.color,
              width: 0,
              size: 5,
              // A curve of few points shows them.
              filter: (u, index) => (look.isBold && line(index).x.length <= 60 ? [...line(index).x.keys()] : null),
            },
          })),
        ],
        cursor: {
          y: false,
          drag: { x: true, y: false, setScale: false, dist: 5 },
          bind: { dblclick: () => () => this.options.onReset() },
          // The crosshair moves in all charts; a stretch is chosen in one.
          sync: { key: "charts", scales: ["x", null], filters: { pub: (type) => type === "mousemove" } },
          points: { size: 8, width: 1.5, stroke: color("--card"), fill: (u, index) => line(index).color },
          dataIdx: (u, index) => this.markAt(line(index), u.posToVal(u.cursor.left, "x")),
        },
        hooks: {
          ready: [(u) => this.join(u)],
          draw: [(u) => this.drawBad(u)],
          setCursor: [(u) => this.moved(u)],
          setSelect: [(u) => this.chosen(u)],
        },
      };
    }

    axes(ink, grid) {
      const { axis, logX, logY } = this.view;
      const { unit } = this.options;
      const isBytes = unit === hw.bytes;
      const xText = (value) => {
        if (value === null) return null;
        if (axis === "time") return hw.seconds(value);
        return Math.abs(value) >= 1e4 ? hw.short(value, 4) : String(value);
      };
      const yTexts = (splits) => {
        // Enough digits that no two marks read the same, as far as there is room.
        const step = Math.abs(splits[1] - splits[0]) || 1;
        const largest = Math.max(...splits.map(Math.abs));
        const digits = Math.min(8, Math.ceil(Math.log10(largest / step)) + 1);
        return splits.map((value) => {
          if (value === null) return null;
          if (Math.abs(value) >= 1e4 && !isBytes) return hw.short(value, Math.max(4, digits));
          return unit(value, Math.max(5, digits));
        });
      };
      const log = { splits: logSplits, filter: withRoom };
      return [
        {
          stroke: ink,
          font: FONT,
          size: 26,
          gap: 4,
          space: 84,
          incrs: axis === "time" ? SECONDS : COUNTS,
          values: (u, splits) => splits.map(xText),
          grid: { show: false },
          ticks: { stroke: grid, width: 1, size: 4 },
          border: { show: true, stroke: `color-mix(in srgb, ${ink} 50%, transparent)`, width: 1 },
          ...(logX ? log : {}),
        },
        {
          stroke: ink,
          font: FONT,
          // All charts begin at the same place, unless a text needs more room.
          size: (u, texts) => Math.max(58, ...(texts ?? []).map((text) => 12 + 6.5 * (text ?? "").length)),
          gap: 6,
          space: 34,
          incrs: isBytes ? BYTES : undefined,
          values: (u, splits) => yTexts(splits),
          grid: { stroke: grid, width: 1 },
          ticks: { show: false },
          ...(logY ? log : {}),
        },
      ];
    }

    // Which point of a line is marked under the crosshair: none past the line's end.
    markAt({ x, isBold }, at) {
      const { x0, x1 } = this.limits;
      if (!isBold || at > x[x.length - 1] + (x1 - x0) * 0.02) return null;
      return hw.nearest(x, at);
    }

    drawBad(u) { // NaN or infinite: a mark at the top
      const scale = uPlot.pxRatio;
      const { left, top, width } = u.bbox;
      u.ctx.save();
      for (const curve of this.series) {
        u.ctx.fillStyle = curve.color;
        for (const x of curve.bad || []) {
          const middle = u.valToPos(x, "x", true);
          if (!(middle >= left && middle <= left + width)) continue;
          u.ctx.beginPath();
          u.ctx.moveTo(middle - 4 * scale, top);
          u.ctx.lineTo(middle + 4 * scale, top);
          u.ctx.lineTo(middle, top + 7 * scale);
          u.ctx.fill();
        }
      }
      u.ctx.restore();
    }

    moved(u) {
      const { event, left } = u.cursor;
      if (!event) return; // moved along with another chart's crosshair
      const isHovering = left >= 0 && u.select.width === 0;
      crosshair = isHovering ? u.posToVal(left, "x") : null;
      this.options.onHover(crosshair, this, event);
    }

    // A plot that is made while the mouse rests on a chart shows the crosshair too.
    join(u) {
      if (crosshair !== null) u.setCursor({ left: u.valToPos(crosshair, "x"), top: 0 }, false);
    }

    chosen(u) {
      const { left, width } = u.select;
      if (width === 0) return;
      const from = u.posToVal(left, "x");
      const to = u.posToVal(left + width, "x");
      u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      this.options.onZoom(from, to);
    }

    // uPlot knows the mouse alone; a finger does the same.
    touch(over) {
      const events = { pointerdown: "mousedown", pointermove: "mousemove", pointerup: "mouseup", pointercancel: "mouseup" };
      for (const [type, mouse] of Object.entries(events)) {
        over.addEventListener(type, (event) => {
          if (event.pointerType === "mouse") return;
          const { clientX, clientY } = event;
          over.dispatchEvent(new MouseEvent(mouse, { bubbles: true, clientX, clientY, movementX: 1 }));
        });
      }
    }

    valuesAt(at) {
      const rows = [];
      const { x0, x1 } = this.limits;
      for (const curve of this.series) {
        const index = hw.nearest(curve.x, at);
        if (index < 0 || at > curve.x[curve.x.length - 1] + (x1 - x0) * 0.02) continue;
        const smooth = curve.boldX === curve.x ? index : hw.nearest(curve.boldX, at);
        rows.push({ one: curve, point: { x: curve.x[index], y: curve.y[index], bold: curve.boldY[smooth] } });
      }
      return rows;
    }
  };
})();
