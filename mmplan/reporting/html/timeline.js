"use strict";
// Zoom and details for the timelines. Without this script the picture stands as it is.
(() => {
  const source = document.getElementById("timeline-data");
  const frame = document.getElementById("timeline");
  if (!source || !frame) return;
  const data = JSON.parse(source.textContent);
  const svg = frame.querySelector("svg");
  const region = frame.querySelector(".scroll");
  const controls = frame.querySelector(".controls");
  const output = frame.querySelector("output");
  const NS = "http://www.w3.org/2000/svg";
  const groups = [...svg.querySelectorAll(".bars")];
  const axis = svg.querySelector(".axis");
  const flags = [...svg.querySelectorAll(".flag")];
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  const range = add(svg, "rect", { class: "range", visibility: "hidden" });
  const cursor = add(svg, "rect", { class: "cursor", visibility: "hidden" });
  const secondsPerTick = data.end / data.ticks;
  let from = 0;
  let to = data.ticks;
  let focus = null; // [row, bar]

  function add(parent, name, attributes, text) {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  }

  const xOf = (tick) => data.left + ((tick - from) / (to - from)) * data.width;
  const tickOf = (x) => from + ((x - data.left) / data.width) * (to - from);

  function seconds(value) {
    const size = Math.abs(value);
    if (size > 0 && size < 1e-3) return `${+(value * 1e6).toPrecision(4)} us`;
    if (size > 0 && size < 1) return `${+(value * 1e3).toPrecision(4)} ms`;
    return `${+value.toPrecision(4)} s`;
  }

  // --- drawing ---

  function draw() {
    groups.forEach((group, i) => drawRow(group, data.rows[i]));
    drawAxis();
    flags.forEach((flag) => {
      const tick = Number(flag.dataset.end);
      const seen = tick >= from && tick <= to * (1 + 1e-9);
      flag.setAttribute("d", seen ? `M${xOf(tick).toFixed(1)} ${flag.dataset.down}` : "");
    });
    drawCursor();
  }

  function drawRow(group, row) {
    const paths = {};
    const names = group.querySelector(".names");
    names.textContent = "";
    for (const bar of row.bars) {
      const [start, length, kind] = bar;
      if (start + length < from || start > to) continue;
      const x = Math.max(data.left, xOf(start));
      const room = Math.min(data.left + data.width, xOf(start + length)) - x;
      const width = Math.max(0.3, room > 4 * data.gap ? room - data.gap : room);
      const [top, share] = data.shapes[kind];
      const y = row.y + top * data.row;
      paths[kind] = (paths[kind] || "") +
        `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${(share * data.row).toFixed(1)}h-${width.toFixed(1)}z`;
      if (width >= data.labelWidth && data.labelled.includes(kind)) {
        const middle = row.y + (top + share / 2) * data.row + 3.5;
        add(names, "text", { x: x + width / 2, y: middle }, shortName(bar, width));
      }
    }
    for (const kind in data.kinds) {
      group.querySelector(`.k${kind}`).setAttribute("d", paths[kind] || "");
    }
  }

  function shortName(bar, width) {
    const short = bar[5] < 0 ? bar[2] : bar[2] + bar[5];
    const long = bar.length > 6 ? `${short} [${bar[6]}, ${bar[7]})` : short;
    return width > long.length * 6 + 8 ? long : short;
  }

  function drawAxis() {
    axis.textContent = "";
    const span = (to - from) * secondsPerTick;
    const power = 10 ** Math.floor(Math.log10(span / 8));
    const step = power * [1, 2, 5, 10].find((k) => power * k * 8 >= span);
    const last = to * secondsPerTick;
    for (let i = Math.ceil((from * secondsPerTick) / step - 1e-9); i * step <= last * (1 + 1e-9); i++) {
      const x = xOf((i * step) / secondsPerTick).toFixed(1);
      add(axis, "path", { d: `M${x} ${data.top - 4}V${data.bottom}` });
      add(axis, "text", { x, y: data.top - 9 }, i ? seconds(i * step) : "0");
    }
  }

  function drawCursor() {
    const bar = focus && data.rows[focus[0]].bars[focus[1]];
    if (!bar || bar[0] + bar[1] < from || bar[0] > to) {
      cursor.setAttribute("visibility", "hidden");
      return;
    }
    const x = Math.max(data.left, xOf(bar[0]));
    const end = Math.min(data.left + data.width, xOf(bar[0] + bar[1]));
    place(cursor, x - 1, data.rows[focus[0]].y + 1, Math.max(3, end - x + 2), data.row - 2);
  }

  function place(rect, x, y, width, height) {
    rect.setAttribute("x", x);
    rect.setAttribute("y", y);
    rect.setAttribute("width", width);
    rect.setAttribute("height", height);
    rect.setAttribute("visibility", "visible");
  }

  // --- what is shown ---

  function show(start, end) {
    const span = Math.min(data.ticks, Math.max(40, end - start));
    from = Math.min(Math.max(0, start), data.ticks - span);
    to = from + span;
    draw();
  }

  function zoom(factor, around) {
    const at = around === undefined ? (from + to) / 2 : around;
    show(at - (at - from) * factor, at + (to - at) * factor);
  }

  const move = (share) => show(from + share * (to - from), to + share * (to - from));

  function details(row, bar) {
    const [start, length, kind, name, what, microbatch] = bar;
    const lines = [`${data.strings[name]}: ${data.kinds[kind]}`];
    if (data.strings[what]) lines.push(data.strings[what]);
    const parts = [];
    if (microbatch >= 0) parts.push(`micro-batch ${microbatch}`);
    if (bar.length > 6) parts.push(`samples [${bar[6]}, ${bar[7]})`);
    if (parts.length) lines.push(parts.join(", "));
    const end = (start + length) * secondsPerTick;
    lines.push(`${row.label}: ${seconds(start * secondsPerTick)} to ${seconds(end)}, ${seconds(length * secondsPerTick)}`);
    return lines;
  }

  // --- keyboard ---

  function step(by) {
    if (!focus) {
      const row = Math.max(0, data.rows.findIndex((r) => r.bars.length));
      // Where people look: the first instruction that ends in sight.
      focus = [row, Math.max(0, data.rows[row].bars.findIndex((bar) => bar[0] + bar[1] > from))];
    } else {
      const last = data.rows[focus[0]].bars.length - 1;
      focus[1] = Math.min(last, Math.max(0, focus[1] + by));
    }
    reveal();
  }

  function changeRow(by) {
    if (!focus) return step(1);
    const at = data.rows[focus[0]].bars[focus[1]];
    for (let k = 1; k <= data.rows.length; k++) {
      const row = (focus[0] + by * k + data.rows.length * k) % data.rows.length;
      if (!data.rows[row].bars.length) continue;
      const after = data.rows[row].bars.findIndex((bar) => !at || bar[0] + bar[1] > at[0]);
      focus = [row, after < 0 ? data.rows[row].bars.length - 1 : after];
      break;
    }
    reveal();
  }

  function reveal() {
    const bar = data.rows[focus[0]].bars[focus[1]];
    if (!bar) return;
    if (bar[0] < from || bar[0] + bar[1] > to) {
      const middle = bar[0] + bar[1] / 2;
      const span = Math.max(to - from, 1.5 * bar[1]);
      show(middle - span / 2, middle + span / 2);
    } else {
      drawCursor();
    }
    output.textContent = details(data.rows[focus[0]], bar).join("; ");
  }

  const ACTIONS = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => move(-0.25),
    right: () => move(0.25),
    all: () => show(0, data.ticks),
    previous: () => step(-1),
    next: () => step(1),
    row: () => changeRow(1),
  };
  const KEYS = {
    "+": ACTIONS.in, "=": ACTIONS.in, "-": ACTIONS.out, 0: ACTIONS.all,
    ArrowLeft: ACTIONS.previous, ArrowRight: ACTIONS.next,
    ArrowUp: () => changeRow(-1), ArrowDown: ACTIONS.row,
  };
  controls.hidden = false;
  controls.addEventListener("click", (event) => {
    const action = event.target.dataset && ACTIONS[event.target.dataset.do];
    if (action) action();
  });
  region.addEventListener("keydown", (event) => {
    const action = KEYS[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });

  // --- mouse ---

  function at(event) {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  }

  function under([x, y]) {
    const row = data.rows.find((r) => y >= r.y && y < r.y + data.row);
    if (!row || x < data.left) return null;
    const tick = tickOf(x);
    const near = 2 * (to - from) / data.width;
    let best = null;
    for (const bar of row.bars) {
      if (bar[0] - near > tick) break;
      // A later bar starts inside an earlier one only where a message is still open.
      if (bar[0] + bar[1] + near >= tick && (!best || best[2] === "M" || bar[2] !== "M")) best = bar;
    }
    return best && [row, best];
  }

  let dragged = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button) return;
    const [x] = at(event);
    if (x < data.left) return;
    dragged = x;
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    const point = at(event);
    if (dragged !== null) {
      const end = Math.min(data.left + data.width, Math.max(data.left, point[0]));
      place(range, Math.min(dragged, end), data.top, Math.abs(end - dragged), data.bottom - data.top);
      tip.hidden = true;
      return;
    }
    const hit = under(point);
    tip.hidden = !hit;
    if (hit) showTip(event, hit);
  });
  svg.addEventListener("pointerup", (event) => {
    range.setAttribute("visibility", "hidden");
    const start = dragged;
    dragged = null;
    const point = at(event);
    if (start !== null && Math.abs(point[0] - start) > 6) {
      show(tickOf(Math.min(start, point[0])), tickOf(Math.max(start, point[0])));
      return;
    }
    const hit = under(point);
    if (hit) {
      focus = [data.rows.indexOf(hit[0]), hit[0].bars.indexOf(hit[1])];
      reveal();
    }
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  svg.addEventListener("dblclick", ACTIONS.all);
  region.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, tickOf(at(event)[0]));
  }, { passive: false });

  function showTip(event, hit) {
    tip.textContent = details(...hit).join("\n");
    const right = event.clientX + 14 + tip.offsetWidth > window.innerWidth;
    tip.style.left = `${Math.max(4, right ? event.clientX - tip.offsetWidth - 10 : event.clientX + 14)}px`;
    const below = event.clientY + 16 + tip.offsetHeight > window.innerHeight;
    tip.style.top = `${below ? event.clientY - tip.offsetHeight - 12 : event.clientY + 16}px`;
  }
})();
