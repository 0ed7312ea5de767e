// Small pieces of the page.

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
  const told = crowded ? "weight transfers: zoom in to see them" : "weights, from the trainer to an engine that has loaded them";
  const item = element("span", told);
  item.className = "swatch";
  item.prepend(element("b", "⤵"));
  return item;
}

// A canvas of so many CSS pixels, sharp on this screen, empty; returns what draws on it.
function scaled(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
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
