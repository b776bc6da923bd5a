/* Figures are drawn at the width that they have, so all text has one size; they are drawn again when it changes. */
const figures = [];
const watcher = new ResizeObserver(entries => { for (const e of entries) { const f = e.target.figure; if (f && Math.abs(f.width - e.contentRect.width) > 1) f.update(); } });
function figure(host, name, draw) { /* draw: width -> {svg, csv: () => rows} */
  const box = el("figure", {}), place = el("div", {}), own = { width: 0, drawn: null, name };
  box.append(place, saveMenu(name, () => ({ svg: () => standalone(own.drawn.svg), csv: own.drawn.csv })));
  own.update = () => {
    if (!box.isConnected) return;
    own.width = place.clientWidth || 320;
    const focused = place.contains(document.activeElement);
    own.drawn = draw(own.width); place.replaceChildren(own.drawn.svg);
    if (focused) own.drawn.svg.focus();
  };
  place.figure = own; host.append(box); figures.push(own); own.update(); watcher.observe(place);
  return own;
}
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= raw) || power, list = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) list.push(+v.toPrecision(10));
  return list;
}
function titleOf(root, text, width) { /* leaves room for "save" */ const found = lines(text, (width - 52) * 0.94); found.forEach((line, i) => svg("text", { x: 0, y: 13 + 17 * i, class: "title" }, root, line)); return 17 * found.length + 6; }
/* Entries {name, colour, dash, shape, area} in rows below y; returns the height. */
function legendOf(root, entries, width, y) {
  let x = 0, row = 0;
  for (const e of entries) {
    const name = shorten(e.name, width - 34), w = textWidth(name) + 40;
    if (x && x + w > width) { x = 0; row++; }
    const at = y + 18 * row + 9;
    if (e.shape !== undefined) mark(root, e.shape, x + 10, at, e.colour, 4);
    else svg("line", { x1: x, x2: x + 20, y1: at, y2: at, stroke: e.colour, "stroke-width": e.area ? 9 : 2.4, opacity: e.area ? 0.4 : 1, ...(e.dash ? { "stroke-dasharray": e.dash } : {}) }, root);
    svg("text", { x: x + 26, y: at + 4.5, class: "name" }, root, name); x += w;
  }
  return entries.length ? 18 * (row + 1) + 4 : 0;
}
function mark(root, shape, x, y, fill, r = 3.2, extra) { /* circle, square, triangle, diamond */
  const a = { fill, ...(extra || {}) };
  if (shape % 4 === 0) return svg("circle", { cx: x, cy: y, r, ...a }, root);
  if (shape % 4 === 1) return svg("rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r, ...a }, root);
  const points = shape % 4 === 2 ? [[0, -1.2], [1.1, 0.9], [-1.1, 0.9]] : [[0, -1.35], [1.35, 0], [0, 1.35], [-1.35, 0]];
  return svg("polygon", { points: points.map(p => `${(x + p[0] * r).toFixed(1)},${(y + p[1] * r).toFixed(1)}`).join(" "), ...a }, root);
}
const DASHES = ["", "6 4", "2 3", "9 3 2 3"];
/* Lines. series: [{name, colour, points: [[x, y]], dash, band: [[x, low, high]], marks: true or x => shown}] */
function lineChart(width, spec) {
  const o = { height: 210, x: "", series: [], ...spec }, root = svg("svg", {});
  const drawn = o.series.map(s => ({ ...s, points: s.points.filter(p => finite(p[1])), band: (s.band || []).filter(b => finite(b[1]) && finite(b[2])) })).filter(s => s.points.length || s.band.length);
  const xs = [...new Set(drawn.flatMap(s => s.points.map(p => p[0])))].sort((a, b) => a - b), ys = drawn.flatMap(s => [...s.points.map(p => p[1]), ...s.band.flatMap(b => [b[1], b[2]])]);
  const top = titleOf(root, o.title, width - 2) + 4;
  const rows = () => [["series", o.x, o.title, "low", "high"], ...drawn.flatMap(s => s.points.length ? s.points.map(p => { const b = s.band.find(q => q[0] === p[0]); return [s.name, p[0], p[1], b ? b[1] : null, b ? b[2] : null]; }) : s.band.map(b => [s.name, b[0], null, b[1], b[2]]))];
  root.setAttribute("role", "img"); root.setAttribute("tabindex", "0");
  if (!xs.length) { svg("text", { x: 0, y: top + 14 }, root, "nothing to show"); root.setAttribute("viewBox", `0 0 ${width} ${top + 24}`); root.setAttribute("width", width); root.setAttribute("aria-label", o.title + ": nothing to show"); return { svg: root, csv: rows }; }
  const lx = o.log ? Math.log2 : v => v;
  let [x0, x1] = o.xlim || [Math.min(...xs.map(lx)), Math.max(...xs.map(lx))], [y0, y1] = o.ylim || [Math.min(...ys), Math.max(...ys)];
  if (o.zero) y0 = Math.min(0, y0);
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { y0 -= 0.5; y1 += 0.5; }
  if (!o.ylim) { const room = (y1 - y0) * 0.06; y1 += room; if (!(o.zero && y0 === 0)) y0 -= room; }
  const marksY = ticks(y0, y1, 4), left = Math.max(...marksY.map(v => textWidth(fmt(v)))) + 10, right = 14, bottom = top + o.height;
  const X = v => left + (lx(v) - x0) / (x1 - x0) * (width - left - right), Y = v => bottom - (v - y0) / (y1 - y0) * o.height;
  for (const v of marksY) {
    svg("line", { x1: left, x2: width - right, y1: Y(v), y2: Y(v), stroke: "var(--grid)" }, root);
    svg("text", { x: left - 6, y: Y(v) + 4.5, "text-anchor": "end" }, root, fmt(v));
  }
  let last = -99;
  for (const v of o.log ? xs : ticks(x0, x1, Math.min(6, width / 60))) {
    if (X(v) - last < 34 || X(v) > width - 6) continue; last = X(v);
    svg("text", { x: X(v), y: bottom + 17, "text-anchor": "middle" }, root, fmt(v));
  }
  svg("line", { x1: left, x2: width - right, y1: bottom, y2: bottom, stroke: "var(--line)" }, root);
  svg("text", { x: (left + width - right) / 2, y: bottom + 35, "text-anchor": "middle" }, root, o.x);
  for (const s of drawn) {
    if (s.band.length) svg("path", { d: "M" + s.band.map(b => `${X(b[0]).toFixed(1)} ${Y(b[2]).toFixed(1)}`).join("L") + "L" + [...s.band].reverse().map(b => `${X(b[0]).toFixed(1)} ${Y(b[1]).toFixed(1)}`).join("L") + "Z", fill: s.colour, stroke: "none", opacity: s.points.length ? 0.16 : 0.32 }, root);
    if (s.points.length) svg("path", { d: "M" + s.points.map(p => `${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("L"), fill: "none", stroke: s.colour, "stroke-width": s.thin ? 1.2 : 2, "stroke-linejoin": "round", ...(s.dash ? { "stroke-dasharray": s.dash } : {}) }, root);
    if (s.marks) for (const p of s.points) if (s.marks === true || s.marks(p[0])) mark(root, s.shape || 0, X(p[0]), Y(p[1]), s.colour, 3);
  }
  const cross = svg("line", { y1: top, y2: bottom, stroke: "var(--soft)", "stroke-dasharray": "3 3", visibility: "hidden" }, root);
  if (finite(o.cursor)) svg("line", { class: "cursor", x1: X(o.cursor), x2: X(o.cursor), y1: top, y2: bottom, stroke: "var(--ink)", opacity: 0.55 }, root);
  const below = bottom + 42, keys = drawn.filter(s => s.name).map(s => ({ ...s, shape: undefined, area: !s.points.length }));
  const height = below + (keys.length > 1 || o.legend ? legendOf(root, keys, width, below) : 0);
  root.setAttribute("viewBox", `0 0 ${width} ${height}`); root.setAttribute("width", width);
  const summary = drawn.filter(s => s.points.length).slice(0, 8).map(s => `${s.name || "line"} from ${fmt(s.points[0][1])} to ${fmt(s.points.at(-1)[1])}`).join("; ");
  root.setAttribute("aria-label", `${o.title}, against ${o.x}: ${summary}. Arrow keys read the values.`);
  const read = v => `${o.x} ${fmt(v)}\n` + drawn.filter(s => s.points.length).map(s => {
    const p = s.points.reduce((a, q) => Math.abs(X(q[0]) - X(v)) < Math.abs(X(a[0]) - X(v)) ? q : a, s.points[0]);
    return Math.abs(X(p[0]) - X(v)) < 12 ? `${s.name || o.title}: ${fmt(p[1])}` : null;
  }).filter(Boolean).join("\n");
  const aim = v => { cross.setAttribute("x1", X(v)); cross.setAttribute("x2", X(v)); cross.setAttribute("visibility", "visible"); };
  const near = e => { const b = root.getBoundingClientRect(), at = (e.clientX - b.left) / b.width * width; return xs.reduce((a, v) => Math.abs(X(v) - at) < Math.abs(X(a) - at) ? v : a, xs[0]); };
  const move = e => { const v = near(e); aim(v); show(read(v), e.clientX, e.clientY); };
  root.addEventListener("pointermove", move); root.addEventListener("pointerdown", move);
  const leave = () => { cross.setAttribute("visibility", "hidden"); hide(); };
  root.addEventListener("pointerleave", leave); root.addEventListener("blur", leave);
  let at = finite(o.cursor) ? nearest(xs, o.cursor) : 0;
  root.addEventListener("keydown", e => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (e.key === "Enter" && o.choose) return o.choose(xs[at]);
    if (!step) return; e.preventDefault();
    at = clamp(at + step, 0, xs.length - 1); aim(xs[at]);
    const b = root.getBoundingClientRect(); show(read(xs[at]), b.left + X(xs[at]), b.top + top); speak(read(xs[at]));
  });
  if (o.choose) { root.style.cursor = "pointer"; root.addEventListener("click", e => o.choose(near(e))); }
  return { svg: root, csv: rows };
}
function spread(name, x, rows, colour, more) { /* median and quartiles of each row */
  return { name, colour, marks: true, points: x.map((t, k) => [t, quantile(rows[k], 0.5)]), band: x.map((t, k) => [t, quantile(rows[k], 0.25), quantile(rows[k], 0.75)]), ...more };
}
