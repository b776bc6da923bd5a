/* Elements, numbers, colours, the tooltip. Names and texts of the data only ever become text nodes. */
const DATA = JSON.parse(document.getElementById("data").textContent), RUNS = DATA.runs;
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const NAMES = { qk: "QK", ov: "OV", ff: "FF" };
const MANY = RUNS.length > 1;
const colour = i => `var(--s${i % 8})`;
const dot = s => s.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·").replace(/[\x00-\x1f\x7f]/g, c => "\\x" + c.charCodeAt(0).toString(16).padStart(2, "0").toUpperCase());
const legal = s => typeof s === "string" ? s.replace(/[^\x09\x0a\x0d\x20-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, "\ufffd") : s; /* what XML can hold */
const fmt = x => x === null || x === undefined ? "–" : Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(3));
const finite = x => x !== null && x !== undefined && Number.isFinite(x);
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
const mean = list => { const known = list.filter(finite); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
const nearest = (list, x) => list.reduce((best, v, i) => Math.abs(v - x) < Math.abs(list[best] - x) - 1e-9 ? i : best, 0);
function quantile(values, q) {
  const s = values.filter(finite).sort((a, b) => a - b); if (!s.length) return null;
  const p = (s.length - 1) * q, f = Math.floor(p); return s[f] + (p - f) * ((s[f + 1] ?? s[f]) - s[f]);
}

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const key in attributes || {}) key in node && !key.includes("-") ? node[key] = attributes[key] : node.setAttribute(key, attributes[key]);
  node.append(...children);
  return node;
}
function svg(tag, attributes, parent, text) {
  const node = document.createElementNS(SVG, tag);
  for (const key in attributes) node.setAttribute(key, legal(attributes[key]));
  if (text !== undefined) node.textContent = legal(text);
  if (parent) parent.append(node);
  return node;
}
const pen = document.createElement("canvas").getContext("2d");
function textWidth(text, mono) {
  pen.font = mono ? "13px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace" : "13px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
  return pen.measureText(text).width;
}
function shorten(text, width, mono) {
  if (textWidth(text, mono) <= width) return text;
  let n = text.length; while (n > 1 && textWidth(text.slice(0, n) + "…", mono) > width) n--;
  return text.slice(0, n) + "…";
}
function lines(text, width) { /* breaks at blanks */
  const out = [""];
  for (const word of text.split(" ")) { const next = out.at(-1) ? out.at(-1) + " " + word : word; if (textWidth(next) <= width * 0.94 || !out.at(-1)) out[out.length - 1] = next; else out.push(word); }
  return out;
}

/* Heat: a ramp from the card's colour to a hot one, and black or white ink, whichever reads better (4.5:1 at least). */
const themeColour = name => getComputedStyle(document.documentElement).getPropertyValue(name).split(",").map(Number);
const luminance = rgb => rgb.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((a, v, i) => a + v * [0.2126, 0.7152, 0.0722][i], 0);
const ramp = { cold: [255, 255, 255], hot: [194, 65, 12] };
function heat(share) {
  const rgb = ramp.cold.map((c, i) => Math.round(c + (ramp.hot[i] - c) * clamp(share || 0, 0, 1)));
  return { back: `rgb(${rgb.join(",")})`, ink: luminance(rgb) > 0.179 ? "#000000" : "#ffffff", rgb };
}
function warm(node, share) { const h = heat(share); node.style.background = h.back; node.style.color = h.ink; }
function scaleLegend(host, label, low, high, over) {
  const bar = el("i", {}); bar.style.background = `linear-gradient(90deg, ${heat(0).back}, ${heat(1).back})`;
  host.replaceChildren(el("span", {}, label), el("span", {}, low), bar, el("span", {}, (over ? "≥ " : "") + high));
}

/* Tooltip: follows the pointer, and stands below what a tap or the keyboard has chosen. */
const tip = $("tip");
function show(text, x, y) {
  tip.textContent = text; tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = clamp(x + 12, 4, Math.max(4, innerWidth - box.width - 4)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18) + "px";
}
const hide = () => { tip.style.display = "none"; };
const speak = text => { $("spoken").textContent = text; };
function hover(node, text) {
  const at = e => { const b = node.getBoundingClientRect(); show(text(), e.clientX || b.left, e.clientY || b.bottom - 12); };
  node.addEventListener("pointermove", at); node.addEventListener("pointerdown", at); node.addEventListener("focus", at);
  node.addEventListener("pointerleave", hide); node.addEventListener("blur", hide);
}
addEventListener("scroll", hide, { passive: true });
addEventListener("keydown", e => { if (e.key === "Escape") hide(); });

/* One tab stop for many cells: arrow keys move it (WAI-ARIA's roving tabindex). rows: cells in rows, or one row. */
function rove(box, rows, at, step) {
  const flat = rows.flat(), first = flat[clamp(at || 0, 0, Math.max(0, flat.length - 1))];
  flat.forEach(cell => { cell.tabIndex = cell === first ? 0 : -1; });
  box.onkeydown = e => {
    const r = rows.findIndex(row => row.includes(document.activeElement)); if (r < 0) return;
    const c = rows[r].indexOf(document.activeElement), across = rows.length === 1 ? step || 1 : 1;
    const to = { ArrowRight: [r, c + 1], ArrowLeft: [r, c - 1], ArrowDown: rows.length === 1 ? [r, c + across] : [r + 1, c], ArrowUp: rows.length === 1 ? [r, c - across] : [r - 1, c],
      Home: [r, 0], End: [r, rows[r].length - 1] }[e.key];
    if (!to || !rows[to[0]] || !rows[to[0]][to[1]]) return;
    e.preventDefault(); flat.forEach(cell => { cell.tabIndex = -1; });
    const cell = rows[to[0]][to[1]]; cell.tabIndex = 0; cell.focus();
  };
  box.onclick = e => { const cell = flat.find(c => c.contains(e.target)); if (cell) { flat.forEach(c => { c.tabIndex = -1; }); cell.tabIndex = 0; } };
  box.place = () => flat.findIndex(c => c.tabIndex === 0);
}
function options(select, names, value) { /* [[value, name]]; hidden where there is no choice; keeps what is chosen */
  const now = String(value ?? select.value);
  select.replaceChildren(...names.map(([v, n]) => el("option", { value: v }, n)));
  if (names.some(([v]) => String(v) === now)) select.value = now;
  select.parentElement.hidden = names.length < 2;
}
