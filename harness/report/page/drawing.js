// Drawing of a run's timeline onto a canvas. Nothing here keeps state; times are microseconds on the run's clock.

const BESIDE = 10; // pixels between the names of engines and the spans
const HEAD = 22; // for the names of iterations, above
const FOOT = 24; // for the axis, below
const OVERVIEW = 34; // how high the strip below is
const APART = 14; // pixels between the weights of two versions, at least
const ROW = 30;
const GAP = 6;
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
const FIELDS = 5; // of a span: start, duration, kind, version of its data or of weights (-1: not known), iteration

// The lanes of a run with the place of each, and how high they all are.
function layOut(run) {
  const lanes = [];
  const height = run.rows.length > 14 ? 20 : ROW;
  run.rows.forEach((row, number) => {
    const top = HEAD + number * (height + GAP);
    const thin = height / (row.lanes.length + 2); // what overlaps is short: weights on their way, mostly
    Object.assign(row, { top, height });
    row.lanes.forEach((spans, lane) => {
      const first = lane === 0;
      lanes.push({ row, spans, top: first ? top : top + (lane + 2) * thin, height: first ? 3 * thin : thin });
    });
  });
  return { lanes, bottom: HEAD + run.rows.length * (height + GAP), height: HEAD + run.rows.length * (height + GAP) + FOOT };
}

function spanAt(lane, number) {
  const [start, duration, kind, version, iteration] = lane.spans.slice(number * FIELDS, number * FIELDS + FIELDS);
  return { lane, number, start, duration, kind, version, iteration, end: start + duration };
}

// The first span of a lane that ends after a time; as many as there are if none does.
function firstEndingAfter(lane, time) {
  let low = 0;
  let high = lane.spans.length / FIELDS;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.spans[middle * FIELDS] + lane.spans[middle * FIELDS + 1] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// A painter knows colours: those of the page (`ground`, `ink`, ...), `fill(kind, version)`, and the ink that can be
// read on it.
function painter(data, colourBy) {
  const wait = data.kinds.indexOf("wait_for_samples");
  const { kinds, versions } = data.colours[pageColour("scheme")];
  const names = ["ground", "ink", "muted", "edge", "rail", "veil"];
  const ofPage = Object.fromEntries(names.map((name) => [name, pageColour(name)]));
  const fill = (kind, version) =>
    kind === wait || colourBy === "kind" ? kinds[kind] : version < 0 ? ofPage.edge : versions[version % versions.length];
  const inkOn = (colour) => (luminance(colour) > 0.2 ? "#10161c" : "#ffffff");
  return { ...ofPage, kinds, versions, fill, inkOn, wait };
}

// What page.css has under this name, as the screen or the paper has it.
function pageColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function luminance(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// How wide the names of engines are, left of the spans.
function gutterOf(context, run) {
  const names = [...run.rows.map((row) => row.name), "whole run"];
  return Math.ceil(Math.max(...names.map((name) => context.measureText(name).width))) + 2 * BESIDE;
}

function drawRails(context, view, run, paint) {
  context.fillStyle = paint.rail;
  for (const row of run.rows) context.fillRect(view.gutter, row.top + row.height + GAP / 2, view.width - view.gutter, 1);
}

function drawLanes(context, view, data, paint) {
  for (const lane of view.layout.lanes) {
    let painted = -1; // up to this pixel: of the spans that share one pixel the first is drawn
    const count = lane.spans.length / FIELDS;
    for (let number = firstEndingAfter(lane, view.from); number < count; number += 1) {
      const start = lane.spans[number * FIELDS];
      if (start >= view.to) break;
      const left = Math.max(view.x(start), view.gutter);
      const right = Math.min(view.x(start + lane.spans[number * FIELDS + 1]), view.width);
      if (right <= painted) continue;
      const kind = lane.spans[number * FIELDS + 2];
      const version = lane.spans[number * FIELDS + 3];
      const width = Math.max(right - left, 1);
      const colour = paint.fill(kind, version);
      context.fillStyle = colour;
      context.fillRect(left, lane.top, width > 4 ? width - 0.7 : width, lane.height - 0.7);
      if (kind !== paint.wait) label(context, data.kinds[kind], version, left, width, lane, paint.inkOn(colour));
      painted = Math.ceil(left + width) - 1;
    }
  }
}

function label(context, kind, version, left, width, lane, ink) {
  if (width < 18 || lane.height < 11) return;
  context.fillStyle = ink;
  const short = version < 0 ? "" : `v${version}`;
  const long = `${kind.replaceAll("_", " ")} ${short}`.trim();
  for (const text of [long, short]) {
    if (context.measureText(text).width + 6 <= width) {
      context.textAlign = "center";
      context.fillText(text, left + width / 2, lane.top + lane.height / 2);
      return;
    }
  }
}

// All of the run: a thin line per lane.
function drawSketch(context, view, paint) {
  const { start, end } = view.run;
  const per = (view.width - view.gutter) / (end - start);
  const each = (OVERVIEW - 6) / Math.max(1, view.layout.lanes.length);
  view.layout.lanes.forEach((lane, number) => {
    let painted = -1;
    for (let at = 0; at < lane.spans.length; at += FIELDS) {
      const left = view.gutter + (lane.spans[at] - start) * per;
      const width = Math.max(lane.spans[at + 1] * per, 0.6);
      if (left + width < painted + 0.5 || lane.spans[at + 2] === paint.wait) continue;
      context.fillStyle = paint.fill(lane.spans[at + 2], lane.spans[at + 3]);
      context.fillRect(left, 3 + number * each, width, Math.max(each - 0.3, 0.7));
      painted = left + width;
    }
  });
  context.fillStyle = paint.muted;
  context.font = `12px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText("whole run", view.gutter - BESIDE, OVERVIEW / 2);
}

// Weight transfers; none, and false, where there are so many versions that nobody could follow them.
function drawArrows(context, view, run, chosen, paint) {
  const seen = new Set();
  for (const [, , sent, loaded, version] of run.arrows) {
    if (loaded >= view.from && sent <= view.to) seen.add(version);
  }
  if (seen.size * APART > view.width - view.gutter) return false;
  for (const [from, to, sent, loaded, version] of run.arrows) {
    if (loaded < view.from || sent > view.to) continue;
    const [source, target] = [run.rows[from], run.rows[to]];
    const down = target.top > source.top;
    const [x0, x1] = [view.x(sent), view.x(loaded)];
    const [y0, y1] = [source.top + source.height / 2, down ? target.top : target.top + target.height];
    if (x1 < view.gutter || x0 > view.width) continue;
    const strong = chosen && chosen.version === version && /weights/.test(chosen.kindName);
    context.strokeStyle = context.fillStyle = paint.ink;
    context.globalAlpha = strong ? 1 : 0.62;
    context.lineWidth = strong ? 2.4 : 1.1;
    context.beginPath();
    context.arc(x0, y0, strong ? 3.2 : 2.2, 0, 2 * Math.PI);
    context.fill();
    context.beginPath();
    context.moveTo(x0, y0);
    const bend = (y1 - y0) * 0.45;
    context.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1);
    context.stroke();
    const tip = down ? -1 : 1; // the point of the arrow is on the engine's bar
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 3.5, y1 + 6.5 * tip);
    context.lineTo(x1 + 3.5, y1 + 6.5 * tip);
    context.fill();
  }
  context.globalAlpha = 1;
  return true;
}

function drawIterations(context, view, run, paint) {
  context.textAlign = "center";
  context.strokeStyle = paint.edge;
  context.fillStyle = paint.muted;
  context.lineWidth = 1;
  context.setLineDash([4, 3]);
  let before = run.start;
  let free = view.gutter;
  for (const [iteration, end] of run.ends) {
    const [left, right] = [view.x(before), view.x(end)];
    before = end;
    if (right < view.gutter || left > view.width) continue;
    if (right - left > APART && right <= view.width) {
      context.beginPath();
      context.moveTo(Math.round(right) + 0.5, HEAD - 5);
      context.lineTo(Math.round(right) + 0.5, view.layout.bottom);
      context.stroke();
    }
    const middle = (Math.max(left, view.gutter) + Math.min(right, view.width)) / 2;
    const words = [`iteration ${iteration}${iteration < run.warmup ? " (warm-up)" : ""}`, `${iteration}`];
    const text = words.find((word) => context.measureText(word).width + 8 < right - left || word === words[1]);
    const half = context.measureText(text).width / 2 + 3;
    if (middle - half < free || middle + half > view.width) continue;
    context.fillText(text, middle, HEAD / 2 - 1);
    free = middle + half + 4;
  }
  context.setLineDash([]);
}

function drawNames(context, view, run, paint) {
  context.fillStyle = paint.ground;
  context.fillRect(0, 0, view.gutter, view.layout.height);
  context.textAlign = "right";
  for (const row of run.rows) {
    context.fillStyle = paint.ink;
    context.fillText(row.name, view.gutter - BESIDE, row.top + row.height / 2);
  }
}

function drawAxis(context, view, paint) {
  const bottom = view.layout.bottom;
  context.strokeStyle = paint.edge;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(view.gutter, bottom + 0.5);
  context.lineTo(view.width, bottom + 0.5);
  context.textAlign = "center";
  context.fillStyle = paint.muted;
  const step = niceStep((view.to - view.from) / 1e6 / Math.max(2, (view.width - view.gutter) / 110));
  for (let tick = Math.ceil(view.from / 1e6 / step); tick * step <= view.to / 1e6; tick += 1) {
    const x = view.x(tick * step * 1e6);
    context.moveTo(x, bottom);
    context.lineTo(x, bottom + 4);
    const text = `${seconds(tick * step, step)} s`;
    const half = context.measureText(text).width / 2;
    if (x - half > view.gutter - 20 && x + half < view.width) context.fillText(text, x, bottom + 14);
  }
  context.stroke();
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
}

// Seconds with as many digits as tell steps of that size apart.
function seconds(value, step) {
  const digits = Math.min(6, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function duration(microseconds) {
  if (microseconds < 1e3) return `${microseconds} µs`;
  if (microseconds < 1e6) return `${(microseconds / 1e3).toPrecision(3)} ms`;
  const digits = microseconds < 1e7 ? 2 : microseconds < 1e8 ? 1 : 0;
  return `${(microseconds / 1e6).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} s`;
}
