// What hands do to the timeline: wheel, drag, keys, buttons. The rest of class Timeline stands before.

Object.assign(Timeline.prototype, {
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
      const time = start + ((event.offsetX - GUTTER) / (this.width - GUTTER)) * (end - start);
      this.look(time - (this.to - this.from) / 2, time + (this.to - this.from) / 2);
    };
    this.overview.addEventListener("pointerdown", (event) => {
      this.overview.setPointerCapture(event.pointerId);
      centre(event);
    });
    this.overview.addEventListener("pointermove", (event) => event.buttons && centre(event));
  },

  // The wheel zooms once the chart was clicked, or with Ctrl; else it scrolls the page, which must not get stuck here.
  onWheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.width);
    else this.zoom(Math.exp(Math.min(Math.max(event.deltaY, -240), 240) * 0.002), event.offsetX);
  },

  onDown(event) {
    if (event.button !== 0 || event.offsetX < GUTTER) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.dragged = [event.offsetX, event.offsetX];
    this.moves = event.shiftKey;
  },

  onMove(event) {
    const x = Math.min(Math.max(event.offsetX, GUTTER), this.width);
    if (!this.dragged) return this.point(this.under(x, event.offsetY), x);
    if (this.moves) {
      this.pan((this.dragged[1] - x) / (this.width - GUTTER));
      this.dragged = [x, x];
    } else {
      this.dragged[1] = x;
    }
    this.point(null);
    this.draw();
  },

  onUp() {
    if (!this.dragged) return;
    const [left, right] = this.dragged.map((x) => this.time(x)).sort((a, b) => a - b);
    const far = Math.abs(this.dragged[1] - this.dragged[0]) > 4;
    this.dragged = null;
    if (far && !this.moves) this.look(left, right);
    this.draw();
  },

  point(span, x = null) {
    this.pointed = x;
    this.choose(span);
    if (span) this.draw(); // the tooltip follows the pointer
  },

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
  },

  // To the span before or after in the same lane; the first in sight if none was chosen.
  step(by) {
    if (!this.chosen) return this.change(1);
    const { lane, number } = this.chosen;
    const next = number + by;
    if (next < 0 || next * FIELDS >= lane.spans.length) return;
    this.reach(spanAt(lane, next));
  },

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
  },

  // Choose a span, and move so that it is in sight.
  reach(span) {
    this.pointed = null;
    const length = this.to - this.from;
    if (span.end < this.from || span.start > this.to) this.look(span.start - length / 4, span.start + length * 0.75);
    this.choose(span, "keyboard");
  },
});
