"use strict";
const breakdown = JSON.parse(document.getElementById("breakdown").textContent);

// Shows the waterfall of one step; the first choice is the mean over all steps.
const chosen = document.getElementById("step");
function showStep() {
  document.querySelectorAll("[data-waterfall]").forEach((one) => {
    one.hidden = one.dataset.waterfall !== chosen.value;
  });
}
chosen.addEventListener("change", showStep);
showStep(); // browsers keep the chosen value when going back in the history

// Sorting: numbers start with the largest, words with A; a second click reverses. Rows past the limit stay hidden.
const ops = document.getElementById("ops-table");
const more = document.getElementById("more-ops");
let limit = ops ? Number(ops.closest("section").dataset.limit) : 0;
function showRows() {
  [...ops.tBodies[0].rows].forEach((row, index) => { row.hidden = index >= limit; });
  if (more) more.hidden = limit >= ops.tBodies[0].rows.length;
}
function sortBy(column) {
  const head = ops.tHead.rows[0].cells[column];
  const rows = [...ops.tBodies[0].rows];
  const key = (row) => row.cells[column].dataset.sort;
  const numeric = head.classList.contains("number");
  const before = head.getAttribute("aria-sort");
  const descending = before ? before === "ascending" : numeric;
  rows.sort((a, b) => {
    const order = numeric ? key(a) - key(b) : (key(a) > key(b)) - (key(a) < key(b));
    return descending ? -order : order;
  });
  for (const cell of ops.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  ops.tBodies[0].append(...rows);
  showRows();
}
if (ops) {
  [...ops.tHead.rows[0].cells].forEach((head, column) => {
    const button = head.querySelector("button");
    if (button) button.addEventListener("click", () => sortBy(column));
  });
  if (more) more.addEventListener("click", () => { limit = Infinity; showRows(); });
  showRows();
}

// Timeline: highlights one device and shows its sampled values at the cursor.
const timeline = document.getElementById("timeline");
if (timeline) {
  const tracks = breakdown.clocks.filter((track) => track.time_s.length);
  const front = document.getElementById("track");
  const moment = document.getElementById("moment");
  const readout = document.getElementById("readout");
  const end = Number(timeline.dataset.endS);
  const plots = [...timeline.querySelectorAll("svg.plot")];
  const cursors = plots.map((plot) => {
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    plot.append(cursor);
    return cursor;
  });
  const said = (value, unit) => (value === null ? `${unit} unknown` : `${value.toLocaleString("en")} ${unit}`);

  function stepAt(time) {
    let after = 0;
    for (const step of breakdown.steps) {
      after += step.duration_s;
      if (time < after) return step.step;
    }
    return breakdown.steps.at(-1).step;
  }
  function read() {
    const track = tracks[Number(front.value)];
    const time = (Number(moment.value) / 1000) * end;
    let index = track.time_s.findLastIndex((sampled) => sampled <= time);
    if (index < 0) index = 0; // before the first sample, show the first
    readout.dataset.index = index;
    readout.textContent = `${track.time_s[index].toFixed(3)} s, step ${stepAt(time)}: ` +
      `SM ${said(track.sm_mhz[index], "MHz")}, memory ${said(track.mem_mhz[index], "MHz")}, ` +
      `${said(track.power_w[index], "W")}, ${said(track.temperature_c[index], "°C")}, ` +
      (track.reasons[index] ? `throttled by ${track.reasons[index]}` : "not throttled");
    for (const cursor of cursors) cursor.setAttribute("d", `M${moment.value} 0V100`);
  }
  function bringForward() {
    for (const one of timeline.querySelectorAll("[data-track]")) {
      const first = one.dataset.track === front.value;
      if (one.classList.contains("held")) one.style.display = first ? "" : "none";
      else one.classList.toggle("front", first);
    }
    read();
  }
  for (const plot of plots) {
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      moment.value = Math.round((1000 * (event.clientX - box.left)) / box.width);
      read();
    });
  }
  front.addEventListener("change", bringForward);
  moment.addEventListener("input", read);
  bringForward();
}
