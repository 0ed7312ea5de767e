// Brings the page to life; without it tables, histograms and idle shares are there all the same.

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

// What is folded is printed all the same.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const part of opened) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of opened) part.open = false;
});
