// Curves of every cell: which metric, against what, and the values under the pointer.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 56, right: 14, top: 12, bottom: 40 };
const CURVES_HEIGHT = 360;

class Curves {
  constructor(section, data) {
    this.section = section;
    this.data = data;
    this.host = section.querySelector(".curves");
    this.readout = section.querySelector(".readout");
    this.hidden = new Set();
    this.key = data.keys[0][0];
    this.axis = data.axes[0][0];
    for (const radio of section.querySelectorAll("input[type=radio]")) {
      radio.addEventListener("change", () => {
        this[radio.name === "axis" ? "axis" : "key"] = radio.value;
        this.draw();
      });
    }
    this.legend(section.querySelector(".legend"));
    this.host.addEventListener("pointermove", (event) => this.read(event));
    this.host.addEventListener("pointerleave", () => this.clear());
    new ResizeObserver(() => this.draw()).observe(this.host);
    this.draw();
  }

  legend(host) {
    this.data.cells.forEach((cell, number) => {
      const button = element("button", cell.label);
      button.type = "button";
      button.className = "line-key";
      button.setAttribute("aria-pressed", "true");
      const sample = made("svg", { width: 30, height: 10, viewBox: "0 0 30 10", "aria-hidden": "true" });
      sample.append(made("line", { x1: 0, x2: 30, y1: 5, y2: 5, stroke: cell.colour, "stroke-width": 2.6, "stroke-dasharray": cell.dash }));
      button.prepend(sample);
      button.addEventListener("click", () => {
        const shown = this.hidden.delete(number) || !this.hidden.add(number);
        button.setAttribute("aria-pressed", String(shown));
        this.draw();
      });
      host.append(button);
    });
  }

  draw() {
    this.paint(this.host.clientWidth);
  }

  paint(width) {
    this.width = width;
    if (!this.width) return;
    this.shown = this.data.curves.filter(
      ({ key, axis, cell }) => key === this.key && axis === this.axis && !this.hidden.has(cell),
    );
    this.section.dataset.axis = this.axis;
    this.section.dataset.key = this.key;
    const title = (pairs, name) => pairs.find(([own]) => own === name)[1];
    const [along, up] = [title(this.data.axes, this.axis), title(this.data.keys, this.key)];
    this.scale();
    const svg = made("svg", {
      width: this.width,
      height: CURVES_HEIGHT,
      viewBox: `0 0 ${this.width} ${CURVES_HEIGHT}`,
      role: "img",
      "aria-label": `${up} against ${along}, a line per cell${this.data.simulated ? ", simulated" : ""}`,
    });
    this.frame(svg, along, up);
    for (const curve of this.shown) this.curve(svg, curve);
    this.cursor = made("line", { y1: MARGIN.top, y2: CURVES_HEIGHT - MARGIN.bottom, class: "cursor", visibility: "hidden" });
    svg.append(this.cursor);
    this.host.replaceChildren(svg);
    this.clear();
  }

  scale() {
    const all = (pick) => this.shown.flatMap(pick).filter((value) => value !== null);
    this.right = Math.max(...all(({ grid }) => grid), 1e-9);
    const heights = all(({ low, high, mean, seeds }) => [
      ...mean,
      ...(seeds.length > 2 ? [...low, ...high] : []),
      ...seeds.flatMap(([, values]) => values),
    ]);
    const share = this.key === "reward/exact_match" || this.key.startsWith("eval/");
    const inside = share ? heights.map((value) => Math.min(Math.max(value, 0), 1)) : heights;
    const top = Math.max(...inside, 0);
    this.step = niceStep((top || 1) / 5);
    this.top = Math.max(Math.ceil(top / this.step - 1e-9), 1) * this.step;
    const bottom = Math.min(...inside, 0);
    this.bottom = Math.floor(bottom / this.step + 1e-9) * this.step;
  }

  x(value) {
    return MARGIN.left + (value / this.right) * (this.width - MARGIN.left - MARGIN.right);
  }

  y(value) {
    const share = (Math.min(Math.max(value, this.bottom), this.top) - this.bottom) / (this.top - this.bottom);
    return CURVES_HEIGHT - MARGIN.bottom - share * (CURVES_HEIGHT - MARGIN.bottom - MARGIN.top);
  }

  frame(svg, along, up) {
    const [left, right, bottom] = [MARGIN.left, this.width - MARGIN.right, CURVES_HEIGHT - MARGIN.bottom];
    for (let tick = Math.round(this.bottom / this.step); tick * this.step <= this.top * 1.0001; tick += 1) {
      const y = this.y(tick * this.step);
      svg.append(made("line", { x1: left, x2: right, y1: y, y2: y, class: tick ? "grid" : "axis" }));
      svg.append(made("text", { x: left - 8, y: y + 4, class: "tick end" }, seconds(tick * this.step, this.step)));
    }
    const step = niceStep(this.right / Math.max(2, (right - left) / 130));
    for (let tick = 0; tick * step <= this.right; tick += 1) {
      const x = this.x(tick * step);
      svg.append(made("line", { x1: x, x2: x, y1: bottom, y2: bottom + 4, class: "axis" }));
      svg.append(made("text", { x, y: bottom + 17, class: "tick" }, seconds(tick * step, step)));
    }
    svg.append(made("text", { x: (left + right) / 2, y: CURVES_HEIGHT - 4, class: "title" }, along));
    const middle = (MARGIN.top + bottom) / 2;
    svg.append(made("text", { x: 12, y: middle, class: "title", transform: `rotate(-90 12 ${middle})` }, up));
  }

  curve(svg, { cell, grid, mean, low, high, seeds }) {
    const { colour, dash } = this.data.cells[cell];
    const points = (values) =>
      values.map((value, at) => (value === null ? null : `${this.x(grid[at]).toFixed(1)},${this.y(value).toFixed(1)}`)).filter(Boolean);
    const band = [...points(low), ...points(high).reverse()];
    if (band.length && seeds.length > 2) svg.append(made("polygon", { points: band.join(" "), fill: colour, opacity: 0.13 }));
    if (seeds.length > 1) {
      for (const [, values] of seeds) {
        svg.append(made("polyline", { points: points(values).join(" "), class: "seed-line", stroke: colour }));
      }
    }
    svg.append(made("polyline", { points: points(mean).join(" "), class: "mean-line", stroke: colour, "stroke-dasharray": dash }));
  }

  // The values of all curves at the place of the pointer.
  read(event) {
    const x = event.clientX - this.host.getBoundingClientRect().left;
    const value = ((x - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)) * this.right;
    if (value < 0 || value > this.right) return this.clear();
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    this.cursor.setAttribute("visibility", "visible");
    const step = niceStep(this.right / 400);
    const parts = [`${seconds(value, step)} ${this.axis === "seconds" ? "s" : this.axis}`];
    for (const curve of this.shown) {
      const read = at(curve.grid, curve.mean, value);
      if (read !== null) parts.push(`${this.data.cells[curve.cell].label} ${Number(read.toPrecision(3)).toLocaleString("en")}`);
    }
    this.readout.textContent = parts.join("  ·  ");
  }

  clear() {
    this.cursor?.setAttribute("visibility", "hidden");
    const window = this.shown[0]?.window ?? 1;
    this.readout.textContent = window > 1 ? `Running means of ${window} iterations.` : "Every iteration.";
  }
}

// A curve's value at a place between its points; null where it has none.
function at(grid, values, place) {
  const after = grid.findIndex((own) => own >= place);
  if (after < 0 || values[after] === null) return null;
  if (after === 0 || values[after - 1] === null) return after === 0 && grid[0] > place ? null : values[after];
  const share = (place - grid[after - 1]) / (grid[after] - grid[after - 1]);
  return values[after - 1] + share * (values[after] - values[after - 1]);
}

function made(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
