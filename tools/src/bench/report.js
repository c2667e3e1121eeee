// Tells the values of all curves at the moment under the pointer.
"use strict";
const curves = JSON.parse(document.getElementById("curves").textContent);
const figures = [...document.querySelectorAll("figure")];

function nearest(points, at) {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < at) low = middle + 1;
    else high = middle;
  }
  const before = points[low - 1];
  const after = points[low];
  const close = !before || (after && after[0] - at < at - before[0]) ? after : before;
  // Beyond that the curve tells of something else, such as another job.
  return close && Math.abs(close[0] - at) <= Math.max(1, curves.end / 200) ? close : undefined;
}

function show(at) {
  figures.forEach((figure, index) => {
    const x = curves.left + (curves.right - curves.left) * at / curves.end;
    figure.querySelector(".cursor").setAttribute("d", `M${x} 8V158`);
    figure.querySelectorAll(".key b").forEach((value, line) => {
      const point = nearest(curves.panels[index][line], at);
      value.textContent = point ? point[1] ?? "-" : "-";
    });
  });
}

function hide() {
  document.querySelectorAll(".cursor").forEach((cursor) => cursor.setAttribute("d", ""));
  document.querySelectorAll(".key b").forEach((value) => { value.textContent = ""; });
}

for (const figure of figures) {
  const picture = figure.querySelector("svg");
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) * 1000 / box.width;
    const part = (x - curves.left) / (curves.right - curves.left);
    if (part >= 0 && part <= 1) show(part * curves.end);
    else hide();
  });
  picture.addEventListener("pointerleave", hide);
}
