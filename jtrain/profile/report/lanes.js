// What each device ran when: a canvas that is moved by dragging and zoomed by buttons, keys and a pinch.
const canvas = document.getElementById("lanes-canvas");
if (canvas) {
  const { lanes: track, ops } = JSON.parse(document.getElementById("breakdown").textContent);
  const opByName = new Map(ops.map((op) => [op.name, op]));
  const readout = document.getElementById("lanes-readout");
  const endUs = track.duration_s * 1e6;
  const laneHeight = 20;
  const colours = Object.fromEntries(
    [...document.querySelectorAll("#lanes .key")].map((key) =>
      [key.parentElement.textContent, getComputedStyle(key).backgroundColor]),
  );
  let shown = [0, endUs]; // microseconds at the left and the right edge

  const toX = (timeUs) => ((timeUs - shown[0]) / (shown[1] - shown[0])) * canvas.clientWidth;
  const toUs = (x) => shown[0] + (x / canvas.clientWidth) * (shown[1] - shown[0]);
  const named = (us) => (us >= 1e6 ? `${(us / 1e6).toFixed(3)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(3)} ms` : `${us.toFixed(1)} µs`);

  function draw() {
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, track.lanes.length * laneHeight];
    canvas.width = width * scale;
    canvas.height = height * scale;
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    const style = getComputedStyle(document.body);
    paint.font = "11px system-ui, sans-serif";
    track.lanes.forEach((lane, row) => {
      const top = row * laneHeight;
      lane.start_us.forEach((startUs, i) => {
        const [left, right] = [toX(startUs), toX(startUs + lane.duration_us[i])];
        if (right < 0 || left > width) return;
        paint.fillStyle = colours[track.groups[lane.ops[i]]] || colours.other;
        // Half a pixel at least: a short op is thin, not invisible.
        paint.fillRect(left, top + 2, Math.max(right - left, 0.5), laneHeight - 4);
      });
      const label = `${lane.device} ${lane.kind}`;
      paint.globalAlpha = 0.85;
      paint.fillStyle = style.backgroundColor;
      paint.fillRect(0, top + 3, paint.measureText(label).width + 6, laneHeight - 6);
      paint.globalAlpha = 1;
      paint.fillStyle = style.color;
      paint.fillText(label, 3, top + laneHeight / 2 + 4);
    });
    canvas.dataset.shown = shown.map((us) => us.toFixed(1)).join(" ");
  }
  function show(left, right) {
    const length = Math.min(endUs, Math.max(1, right - left));
    const start = Math.min(Math.max(0, left), endUs - length);
    shown = [start, start + length];
    draw();
    readout.textContent = `${named(shown[0])} to ${named(shown[1])} of the step`;
  }
  function zoom(factor, x = canvas.clientWidth / 2) {
    const [middle, length] = [toUs(x), (shown[1] - shown[0]) / factor];
    show(middle - (x / canvas.clientWidth) * length, middle + (1 - x / canvas.clientWidth) * length);
  }
  function move(share) {
    const length = shown[1] - shown[0];
    show(shown[0] + share * length, shown[1] + share * length);
  }
  function read(x, y) {
    const lane = track.lanes[Math.floor(y / laneHeight)];
    const timeUs = toUs(x);
    const index = lane ? lane.start_us.findLastIndex((startUs) => startUs <= timeUs) : -1;
    if (index < 0 || timeUs > lane.start_us[index] + lane.duration_us[index]) return;
    const name = track.names[lane.ops[index]];
    const op = opByName.get(name) || {};
    readout.textContent = `device ${lane.device}, ${name}: ${named(lane.duration_us[index])} from ` +
      [named(lane.start_us[index]), op.layer, op.phase, op.shape, op.source].filter(Boolean).join(", ");
  }
  const keys = {
    "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(0.5), 0: () => show(0, endUs),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
  };
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
    read(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged === null) return read(event.offsetX, event.offsetY);
    if (Math.abs(event.offsetX - dragged) < 3) return;
    move((dragged - event.offsetX) / canvas.clientWidth);
    dragged = event.offsetX;
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("dblclick", (event) => zoom(4, event.offsetX));
  // Browsers report a pinch on a trackpad as a wheel with Ctrl; the wheel alone scrolls the page.
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 100), event.offsetX);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.querySelectorAll("[data-lanes]").forEach((button) => {
    button.addEventListener("click", keys[button.dataset.lanes]);
  });
  window.addEventListener("resize", draw);
  canvas.style.height = `${track.lanes.length * laneHeight}px`;
  show(0, endUs);
}
