// The interactive timeline: which run, which part of it, what is under the pointer or the keyboard's cursor, and input.

class Timeline {
  constructor(section, data) {
    this.section = section;
    this.data = data;
    this.find = (name) => section.querySelector(name);
    this.canvas = this.find(".spans");
    this.overview = this.find(".overview");
    this.tooltip = this.find(".tooltip");
    this.status = this.find(".status");
    this.colourBy = "version";
    this.chosen = null; // the span that is pointed at
    this.dragged = null; // [x where it began, x now]
    this.listen();
    this.show(0);
    new ResizeObserver(() => this.draw()).observe(section);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(number) {
    this.run = this.data.runs[number];
    const alone = (role) => this.run.rows.filter((row) => row.role === role).length === 1;
    for (const row of this.run.rows) {
      row.name = alone(row.role) ? row.role : `${row.role} ${row.engine}`;
      row.name = row.name.replaceAll("_", " ");
    }
    this.layout = layOut(this.run);
    this.find(".left-out").textContent = this.run.left_out.join(" ");
    this.find(".run-title").textContent = this.run.title;
    this.choose(null);
    this.look(...this.run.window);
  }

  // Look at a part of the run, no less than ten microseconds and no more than all of it.
  look(from, to) {
    const { start, end } = this.run;
    const length = Math.min(Math.max(to - from, 10), end - start);
    this.from = Math.min(Math.max((from + to - length) / 2, start), end - length);
    this.to = this.from + length;
    this.section.dataset.from = this.from;
    this.section.dataset.to = this.to;
    this.draw();
  }

  zoom(factor, x = (this.gutter + this.width) / 2) {
    const fixed = this.time(x);
    this.look(fixed - (fixed - this.from) * factor, fixed + (this.to - fixed) * factor);
  }

  pan(share) {
    const by = (this.to - this.from) * share;
    const { start, end } = this.run;
    const bounded = Math.min(Math.max(by, start - this.from), end - this.to);
    this.look(this.from + bounded, this.to + bounded);
  }

  whole() {
    this.look(this.run.start, this.run.end);
  }

  x(time) {
    return this.gutter + ((time - this.from) / (this.to - this.from)) * (this.width - this.gutter);
  }

  time(x) {
    return this.from + ((x - this.gutter) / (this.width - this.gutter)) * (this.to - this.from);
  }

  draw() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.paint();
    });
  }

  paint(width = this.canvas.parentElement.clientWidth) {
    this.width = width;
    if (!this.width) return;
    const context = scaled(this.canvas, this.width, this.layout.height);
    context.font = `12px ${FONT}`;
    context.textBaseline = "middle";
    this.gutter = gutterOf(context, this.run);
    const paint = painter(this.data, this.colourBy);
    drawRails(context, this, this.run, paint);
    drawLanes(context, this, this.data, paint);
    drawIterations(context, this, this.run, paint);
    this.crowded = !drawArrows(context, this, this.run, this.chosen, paint);
    if (this.chosen) this.outline(context, this.chosen, paint);
    if (this.dragged) this.shade(context, ...this.dragged);
    drawNames(context, this, this.run, paint);
    drawAxis(context, this, paint);
    this.paintOverview(paint);
    this.paintLegend(paint);
    if (this.chosen) this.placeTooltip();
    this.section.dataset.scheme = pageColour("scheme");
  }

  outline(context, span, paint) {
    const left = Math.max(this.x(span.start), this.gutter);
    context.strokeStyle = paint.ink;
    context.lineWidth = 2;
    context.strokeRect(left, span.lane.top, Math.max(this.x(span.end) - left, 2), span.lane.height - 0.7);
  }

  shade(context, begun, now) {
    context.fillStyle = "rgba(0, 114, 178, 0.16)";
    context.fillRect(Math.min(begun, now), HEAD, Math.abs(now - begun), this.layout.bottom - HEAD);
  }

  // All of the run, and which part of it is looked at.
  paintOverview(paint) {
    const context = scaled(this.overview, this.width, OVERVIEW);
    const key = [this.data.runs.indexOf(this.run), this.colourBy, this.width, window.devicePixelRatio, paint.ground].join();
    if (this.sketchKey !== key) {
      this.sketch = document.createElement("canvas");
      drawSketch(scaled(this.sketch, this.width, OVERVIEW), this, paint);
      this.sketchKey = key;
    }
    context.drawImage(this.sketch, 0, 0, this.width, OVERVIEW);
    const { start, end } = this.run;
    const [left, right] = [this.from, this.to].map((time) => this.gutter + ((time - start) / (end - start)) * (this.width - this.gutter));
    context.fillStyle = paint.veil;
    context.fillRect(this.gutter, 0, left - this.gutter, OVERVIEW);
    context.fillRect(right, 0, this.width - right, OVERVIEW);
    context.strokeStyle = paint.ink;
    context.lineWidth = 1.5;
    context.strokeRect(left, 1, Math.max(right - left, 2), OVERVIEW - 2);
  }

  // What is in sight, by colour; rebuilt only if that changed.
  paintLegend(paint) {
    const { kinds } = this.data;
    const seen = new Set();
    for (const lane of this.layout.lanes) {
      for (let n = firstEndingAfter(lane, this.from); n * FIELDS < lane.spans.length; n += 1) {
        if (lane.spans[n * FIELDS] >= this.to) break;
        const kind = lane.spans[n * FIELDS + 2];
        if (this.colourBy === "kind") seen.add(kind);
        else if (kinds[kind] !== "wait_for_samples") seen.add(lane.spans[n * FIELDS + 3]);
      }
    }
    const unknown = this.colourBy === "version" && seen.delete(-1);
    const shown = [...seen].sort((a, b) => a - b);
    const steps = paint.versions.length;
    let items;
    if (this.colourBy === "kind") {
      items = shown.map((kind) => [paint.kinds[kind], kinds[kind].replaceAll("_", " ")]);
    } else if (shown.length <= steps) {
      items = shown.map((version) => [paint.versions[version % steps], `v${version}`]);
    } else {
      items = paint.versions.map((colour, step) => [colour, `v${step}, v${step + steps}, …`]);
    }
    if (unknown) items.push([paint.edge, "not trained"]);
    if (this.colourBy === "version") items.push([paint.kinds[kinds.indexOf("wait_for_samples")], "waits for samples"]);
    const words = JSON.stringify([this.colourBy, items, this.crowded]);
    if (words === this.legend) return;
    this.legend = words;
    const legend = this.find(".legend");
    const meaning = this.colourBy === "version" ? "Version that sampled the data:" : "Kind of work:";
    legend.replaceChildren(element("b", meaning), ...items.map(([colour, text]) => swatch(colour, text)), arrowSample(this.crowded));
  }

  choose(span, from = "pointer") {
    const same = span && this.chosen && span.lane === this.chosen.lane && span.number === this.chosen.number;
    if (same || (!span && !this.chosen)) return;
    this.chosen = span;
    this.tooltip.hidden = !span;
    if (span) {
      span.kindName = this.data.kinds[span.kind];
      const { role, engine, pool } = span.lane.row;
      const facts = [
        ["role", role.replaceAll("_", " ")],
        ["engine", `${engine} (pool ${pool})`],
        ["kind", span.kindName.replaceAll("_", " ")],
        [/weights/.test(span.kindName) ? "weights" : "data", span.version < 0 ? "not trained" : `v${span.version}`],
        ["iteration", `${span.iteration}`],
        ["start", `${seconds(span.start / 1e6, 0.0001)} s`],
        ["duration", duration(span.duration)],
      ];
      this.tooltip.replaceChildren(...facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
      if (from === "keyboard") this.status.textContent = facts.map((pair) => pair.join(" ")).join(", ");
    }
    this.draw();
  }

  placeTooltip() {
    const { lane } = this.chosen;
    const [left, right] = [Math.max(this.x(this.chosen.start), this.gutter), Math.min(this.x(this.chosen.end), this.width)];
    const middle = this.pointed ?? (left + right) / 2;
    const [width, height] = [this.tooltip.offsetWidth, this.tooltip.offsetHeight];
    const below = lane.top + lane.height + 8;
    const top = below + height > this.layout.height ? lane.top - height - 8 : below;
    this.tooltip.style.left = `${Math.min(Math.max(middle - width / 2, 0), this.width - width)}px`;
    this.tooltip.style.top = `${this.canvas.offsetTop + top}px`;
  }

  // The span under a point of the canvas, or none: a thin one counts as four pixels wide.
  under(x, y) {
    if (x < this.gutter || x > this.width) return null;
    const lane = this.layout.lanes.find(({ top, height }) => y >= top && y < top + height);
    if (!lane) return null;
    const slack = ((this.to - this.from) / (this.width - this.gutter)) * 2;
    const time = this.time(x);
    const count = lane.spans.length / FIELDS;
    for (const [at, leeway] of [[time, 0], [time - slack, slack]]) {
      const number = firstEndingAfter(lane, at);
      if (number < count && lane.spans[number * FIELDS] <= time + leeway) return spanAt(lane, number);
    }
    return null;
  }

  // Input: wheel, drag, keys, buttons.
  listen() {
    this.find(".which").addEventListener("change", (event) => this.show(Number(event.target.value)));
    for (const radio of this.section.querySelectorAll("input[name=colour]")) {
      radio.addEventListener("change", () => {
        this.colourBy = radio.value;
        this.draw();
      });
    }
    const acts = {
      in: () => this.zoom(0.5),
      out: () => this.zoom(2),
      back: () => this.pan(-0.5),
      on: () => this.pan(0.5),
      whole: () => this.whole(),
      first: () => this.look(...this.run.window),
    };
    for (const button of this.section.querySelectorAll("button[data-act]")) {
      button.addEventListener("click", acts[button.dataset.act]);
    }
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerup", (event) => this.onUp(event));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("dblclick", () => this.whole());
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    const centre = (event) => {
      const { start, end } = this.run;
      const time = start + ((event.offsetX - this.gutter) / (this.width - this.gutter)) * (end - start);
      this.look(time - (this.to - this.from) / 2, time + (this.to - this.from) / 2);
    };
    this.overview.addEventListener("pointerdown", (event) => {
      this.overview.setPointerCapture(event.pointerId);
      centre(event);
    });
    this.overview.addEventListener("pointermove", (event) => event.buttons && centre(event));
  }

  // The wheel zooms once the chart was clicked, or with Ctrl; else it scrolls the page, which must not get stuck here.
  onWheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.width);
    else this.zoom(Math.exp(Math.min(Math.max(event.deltaY, -240), 240) * 0.002), event.offsetX);
  }

  onDown(event) {
    if (event.button !== 0 || event.offsetX < this.gutter) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.dragged = [event.offsetX, event.offsetX];
    this.moves = event.shiftKey;
  }

  onMove(event) {
    const x = Math.min(Math.max(event.offsetX, this.gutter), this.width);
    if (!this.dragged) return this.point(this.under(x, event.offsetY), x);
    if (this.moves) {
      this.pan((this.dragged[1] - x) / (this.width - this.gutter));
      this.dragged = [x, x];
    } else {
      this.dragged[1] = x;
    }
    this.point(null);
    this.draw();
  }

  onUp() {
    if (!this.dragged) return;
    const [left, right] = this.dragged.map((x) => this.time(x)).sort((a, b) => a - b);
    const far = Math.abs(this.dragged[1] - this.dragged[0]) > 4;
    this.dragged = null;
    if (far && !this.moves) this.look(left, right);
    this.draw();
  }

  point(span, x = null) {
    this.pointed = x;
    this.choose(span);
    if (span) this.draw(); // the tooltip follows the pointer
  }

  onKey(event) {
    const acts = {
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.whole(),
      Home: () => this.whole(),
      ArrowLeft: () => (event.shiftKey ? this.step(-1) : this.pan(-0.2)),
      ArrowRight: () => (event.shiftKey ? this.step(1) : this.pan(0.2)),
      ArrowUp: () => this.change(-1),
      ArrowDown: () => this.change(1),
      Escape: () => this.choose(null),
    };
    const act = acts[event.key];
    if (!act || event.altKey || event.metaKey || event.ctrlKey) return;
    event.preventDefault();
    act();
  }

  // To the span before or after in the same lane; the first in sight if none was chosen.
  step(by) {
    if (!this.chosen) return this.change(1);
    const { lane, number } = this.chosen;
    const next = number + by;
    if (next < 0 || next * FIELDS >= lane.spans.length) return;
    this.reach(spanAt(lane, next));
  }

  // To the lane above or below, to the span there that is nearest in time.
  change(by) {
    const { lanes } = this.layout;
    let at = this.chosen ? lanes.indexOf(this.chosen.lane) : by > 0 ? -1 : lanes.length;
    const time = this.chosen ? Math.max(this.chosen.start, this.from) : this.from;
    do at += by;
    while (at >= 0 && at < lanes.length && !lanes[at].spans.length);
    if (at < 0 || at >= lanes.length) return;
    const last = lanes[at].spans.length / FIELDS - 1;
    this.reach(spanAt(lanes[at], Math.min(firstEndingAfter(lanes[at], time), last)));
  }

  // Choose a span, and move so that it is in sight.
  reach(span) {
    this.pointed = null;
    const length = this.to - this.from;
    if (span.end < this.from || span.start > this.to) this.look(span.start - length / 4, span.start + length * 0.75);
    this.choose(span, "keyboard");
  }
}
