// Starts curves and timeline; without scripts, tables, histograms and idle shares are there all the same.

for (const [id, data, Part] of [
  ["reward", "curves-data", Curves],
  ["timeline", "timeline-data", Timeline],
]) {
  const section = document.getElementById(id);
  if (section?.querySelector(".live")) section.live = new Part(section, pageData(data));
}

// All measures at once.
const unfold = document.querySelector(".unfold");
unfold.addEventListener("click", () => {
  const open = unfold.textContent === "unfold all";
  for (const part of document.querySelectorAll("#measures details")) part.open = open;
  unfold.textContent = open ? "fold all" : "unfold all";
});

// Of samples those of one run and kind.
const samples = document.getElementById("samples");
function choose() {
  const kind = samples.querySelector("input:checked")?.value;
  const run = samples.querySelector("select").value;
  for (const one of samples.querySelectorAll("details")) one.hidden = one.dataset.run !== run || one.dataset.kind !== kind;
}
samples?.addEventListener("change", choose);
if (samples) choose();

// What is folded is printed all the same; what is drawn, as wide as the paper, and on white.
const PAPER = 703; // pixels between the margins of A4
const drawn = [...document.querySelectorAll("section")].map((section) => section.live).filter(Boolean);
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const part of opened) part.open = true;
  document.documentElement.classList.add("paper");
  for (const part of drawn) part.paint(PAPER);
});
addEventListener("afterprint", () => {
  for (const part of opened) part.open = false;
  document.documentElement.classList.remove("paper");
  for (const part of drawn) part.draw();
});

// Elements that curves and timeline share.

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function swatch(colour, text) {
  const item = element("span", text);
  item.className = "swatch";
  const box = document.createElement("i");
  box.style.background = colour;
  item.prepend(box);
  return item;
}

function arrowSample(crowded) {
  const text = crowded ? "weight transfers: zoom in to see them" : "weights, from the trainer to an engine that has loaded them";
  const item = element("span", text);
  item.className = "swatch";
  item.prepend(element("b", "⤵"));
  return item;
}

// A canvas of so many CSS pixels, sharp on this screen or on paper, empty; returns what draws on it.
function scaled(canvas, width, height) {
  const ratio = document.documentElement.classList.contains("paper") ? 3 : window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function pageData(id) {
  return JSON.parse(document.getElementById(id).textContent);
}
