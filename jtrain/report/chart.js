// Charts on canvases, over one axis of steps: what is chosen in one shows in all. `charts.show(data)` draws.
const charts = (() => {
  const figures = [...document.querySelectorAll("figure.chart")];
  const LEFT = 58, RIGHT = 4, TOP = 6, BOTTOM = 18;
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const colours = new Map();
  let data = { steps: [0, 1], charts: {}, marks: [] };
  let chosen = null; // steps; null: all, also those that come later
  const picture = new Map(); // number of the picture that each chart shows
  let newest = 0, cursor = null, selection = null, isDue = false, onChange = () => {};

  const range = () => chosen || data.steps;
  const seriesOf = (figure) => data.charts[figure.id] || [];
  const isStack = (figure) => figure.dataset.kind === "stack";
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // A colour is a class of the page's style, as in every legend; a class without one is drawn soft.
  function colour(name) {
    if (!colours.has(name)) {
      const key = document.body.appendChild(document.createElement("i"));
      key.className = `key ${name}`;
      const made = getComputedStyle(key).backgroundColor;
      colours.set(name, /^rgba\(.*, 0\)$/.test(made) ? variable("--soft") : made);
      key.remove();
    }
    return colours.get(name);
  }
  // Index of the last step that is not after `step`; -1 before the first.
  function indexAt(x, step) {
    let low = 0, high = x.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] <= step) low = middle + 1; else high = middle;
    }
    return low - 1;
  }
  // Calls with each shown point, and with one more at each end.
  function visit({ x, y }, call) {
    const last = Math.min(x.length - 1, indexAt(x, range()[1]) + 1);
    for (let i = Math.max(0, indexAt(x, range()[0])); i <= last; i++) call(x[i], y[i]);
  }
  // Lowest and highest shown value of each group of charts; a stack begins at 0.
  function groupLimits() {
    const limits = {};
    for (const figure of figures) {
      const limit = (limits[figure.dataset.group] ??= [Infinity, -Infinity]), series = seriesOf(figure);
      const add = (value) => {
        if (value === null) return;
        limit[0] = Math.min(limit[0], value);
        limit[1] = Math.max(limit[1], value);
      };
      if (!isStack(figure)) for (const one of series) visit(one, (_, value) => add(value));
      else if (series.length) series[0].x.forEach((_, i) => { add(0); add(series.reduce((sum, part) => sum + part.y[i], 0)); });
    }
    for (const limit of Object.values(limits)) {
      const margin = limit[0] === 0 ? 0 : 0.05 * (limit[1] - limit[0]) || 0.05 * Math.abs(limit[1]) || 1;
      limit[0] = Math.max(limit[0] - margin, limit[0] < 0 ? -Infinity : 0); // no axis of milliseconds begins below 0
      limit[1] += margin || 1e-9;
    }
    return limits;
  }

  function draw() {
    isDue = false;
    // What is not on the screen is drawn when it comes there.
    const due = figures.filter((figure) => {
      const box = figure.getBoundingClientRect();
      return !figure.hidden && picture.get(figure) !== newest && box.bottom > 0 && box.top < innerHeight;
    });
    const limits = due.length ? groupLimits() : {};
    for (const figure of due) {
      drawFigure(figure, limits[figure.dataset.group]);
      picture.set(figure, newest);
    }
  }
  function drawFigure(figure, [low, high]) {
    const canvas = figure.querySelector("canvas"), pen = canvas.getContext("2d"), [first, last] = range();
    const width = canvas.clientWidth, height = canvas.clientHeight, bottom = height - BOTTOM;
    const size = [width, height].map((length) => Math.round(length * devicePixelRatio));
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    const toX = (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
    const toY = (value) => TOP + ((high - value) / (high - low)) * (bottom - TOP);
    const line = (points, style, dashes = []) => {
      pen.strokeStyle = style;
      pen.setLineDash(dashes);
      pen.beginPath();
      points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      pen.stroke();
    };
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.lineCap = "round";
    pen.textBaseline = "middle";
    pen.fillStyle = variable("--soft");
    for (let part = 0; part <= 4; part++) {
      const value = low + ((high - low) * part) / 4, step = first + ((last - first) * part) / 4;
      line([[LEFT, toY(value)], [width, toY(value)]], variable("--rule"));
      pen.textAlign = "right";
      pen.fillText(compact.format(value), LEFT - 5, toY(value));
      pen.textAlign = ["left", "center", "center", "center", "right"][part];
      pen.fillText(whole.format(step), toX(step), height - BOTTOM / 2 + 2);
    }
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, bottom);
    pen.clip();
    if (isStack(figure)) drawStack(pen, seriesOf(figure), toX, toY);
    else for (const one of seriesOf(figure)) drawLine(pen, one, toX, toY);
    // A checkpoint is a tick below, a restart a dashed line, a bad step or an alert a wedge from above.
    const run = figure.id.match(/-(\d+)$/);
    for (const mark of data.marks) {
      if (run && mark.run !== Number(run[1])) continue;
      const x = toX(mark.step);
      pen.fillStyle = "#d55e00";
      if (mark.kind === "checkpoint") line([[x, bottom - 8], [x, bottom]], colour(mark.colour));
      else if (mark.kind === "restart") line([[x, 0], [x, bottom]], colour(mark.colour), [3, 3]);
      else pen.fill(new Path2D(`M${x - 5} 0H${x + 5}L${x} 9Z`));
    }
    if (cursor !== null) line([[toX(cursor), 0], [toX(cursor), bottom]], variable("--ink"), [3, 2]);
    pen.globalAlpha = 0.2;
    pen.fillStyle = variable("--line");
    if (selection) pen.fillRect(toX(selection[0]), 0, toX(selection[1]) - toX(selection[0]), bottom);
    pen.restore();
    writeLegend(figure);
  }
  function drawLine(pen, series, toX, toY) {
    pen.strokeStyle = colour(series.colour);
    pen.lineWidth = 1.5;
    pen.setLineDash(series.dashed ? [5, 3] : []);
    pen.beginPath();
    let isDown = false;
    visit(series, (step, value) => {
      if (value !== null) {
        if (!isDown) pen.moveTo(toX(step), toY(value));
        pen.lineTo(toX(step) + 0.01, toY(value)); // a point alone is seen, too
      }
      isDown = value !== null;
    });
    pen.stroke();
    pen.lineWidth = 1;
  }
  function drawStack(pen, series, toX, toY) {
    const sums = series.length ? series[0].x.map(() => 0) : [];
    for (const { x, to, y, colour: name } of series) {
      pen.fillStyle = colour(name);
      x.forEach((from, i) => {
        const top = toY(sums[i] + y[i]), width = toX(to[i]) - toX(from);
        pen.fillRect(toX(from), top, to[i] === from ? 6 : Math.max(1, width - 0.3), toY(sums[i]) - top);
        sums[i] += y[i];
      });
    }
  }
  // Names with their colours, and the values at the cursor; of lines also the newest.
  function writeLegend(figure) {
    const list = figure.querySelector(".legend"), series = seriesOf(figure);
    while (list.children.length > series.length) list.lastChild.remove();
    series.forEach((one, index) => {
      const item = list.children[index] || list.appendChild(document.createElement("li"));
      let at = cursor === null ? (isStack(figure) ? -1 : one.x.length - 1) : indexAt(one.x, cursor);
      while (at >= 0 && one.y[at] === null) at--;
      const text = at < 0 ? one.name : `${one.name}: ${compact.format(one.y[at])}`;
      if (item.textContent === text) return;
      const key = document.createElement("i");
      key.className = `key ${one.dashed ? "dashed" : one.colour}`;
      if (one.dashed) key.style.borderTopColor = colour(one.colour);
      item.replaceChildren(key, text);
    });
  }

  function drawSoon() {
    if (!isDue) requestAnimationFrame(draw);
    isDue = true;
  }
  function redraw() {
    newest += 1;
    drawSoon();
  }
  function choose(first, last) {
    const [from, to] = data.steps, width = Math.min(Math.max(last - first, 2), to - from);
    first = Math.min(Math.max(first, from), to - width);
    chosen = width >= to - from ? null : [first, first + width];
    redraw();
    onChange();
  }
  function zoom(factor, at = (range()[0] + range()[1]) / 2) {
    choose(...range().map((step) => at + (step - at) * factor));
  }
  const pan = (part) => choose(...range().map((step) => step + part * (range()[1] - range()[0])));

  for (const figure of figures) {
    const canvas = figure.querySelector("canvas");
    const stepAt = (event) => {
      const box = canvas.getBoundingClientRect(), [first, last] = range();
      return first + ((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (last - first);
    };
    canvas.addEventListener("pointerdown", (event) => { selection = [stepAt(event), stepAt(event)]; });
    canvas.addEventListener("pointermove", (event) => {
      cursor = stepAt(event);
      document.getElementById("readout").textContent = `step ${whole.format(cursor)}`;
      if (selection) selection[1] = cursor;
      redraw();
    });
    canvas.addEventListener("pointerup", () => {
      const [first, last] = (selection || [0, 0]).sort((a, b) => a - b);
      selection = null;
      // Some pixels only are a click.
      if (last - first > 0.01 * (range()[1] - range()[0])) choose(first, last);
      redraw();
    });
    canvas.addEventListener("pointerleave", () => { cursor = selection = null; redraw(); });
    canvas.addEventListener("wheel", (event) => {
      // A wheel alone scrolls the page.
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      if (event.ctrlKey) zoom(Math.exp(event.deltaY / 300), stepAt(event)); else pan(event.deltaY / 1000);
    }, { passive: false });
  }
  for (const button of document.querySelectorAll("[data-zoom]")) button.onclick = () => zoom(Number(button.dataset.zoom));
  for (const button of document.querySelectorAll("[data-pan]")) button.onclick = () => pan(Number(button.dataset.pan));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours.clear(); redraw(); });
  addEventListener("resize", redraw);
  addEventListener("scroll", drawSoon, { passive: true });

  return {
    get chosen() { return chosen; },
    set onChange(call) { onChange = call; },
    get width() { return Math.max(200, ...figures.map((figure) => figure.clientWidth)); },
    show(next) {
      data = next;
      for (const figure of figures) figure.hidden = !seriesOf(figure).some((series) => series.x.length);
      redraw();
    },
  };
})();
