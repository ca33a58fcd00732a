"use strict";
// Show the nearest point of each curve while the pointer is over a chart.
for (const svg of document.querySelectorAll("svg[data-range]")) {
  const [x0, x1, y0, y1] = svg.dataset.range.split(" ").map(Number);
  const [left, right, top, bottom] = svg.dataset.box.split(" ").map(Number);
  const lines = [...svg.querySelectorAll("polyline.line")].map((line) =>
    line.getAttribute("points").split(" ").filter(Boolean).map((pair) => pair.split(",").map(Number)));
  if (!lines.length) continue;
  const caption = svg.parentNode.querySelector("figcaption");
  const title = caption.textContent;
  const value = (point) => (y0 + ((bottom - point[1]) / (bottom - top)) * (y1 - y0)).toPrecision(3);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const near = lines.filter((line) => line.length).map((line) =>
      line.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)));
    const step = Math.round(x0 + ((near[0][0] - left) / (right - left)) * (x1 - x0));
    caption.textContent = `${title}: step ${step}: ${near.map(value).join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => { caption.textContent = title; });
}
