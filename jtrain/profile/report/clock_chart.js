// Timeline: highlights one device and shows its sampled values at the cursor.
const timeline = document.getElementById("timeline");
if (timeline) {
  const breakdown = JSON.parse(document.getElementById("breakdown").textContent);
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
  const said = (name, value, unit) => (value === null ? [] : [`${name}${value.toLocaleString("en")} ${unit}`]);

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
    readout.textContent = `${track.time_s[index].toFixed(3)} s, step ${stepAt(time)}: ` + [
      ...said("core ", track.sm_mhz[index], "MHz"),
      ...said("memory ", track.mem_mhz[index], "MHz"),
      ...said("", track.power_w[index], "W"),
      ...said("", track.temperature_c[index], "°C"),
      track.reasons[index] ? `throttled by ${track.reasons[index]}` : "not throttled",
    ].join(", ");
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
