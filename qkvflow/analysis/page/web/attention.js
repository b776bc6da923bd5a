/* Attention maps: the head that is chosen, and all of them small. */
const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const stepOf = (run = runOf()) => clamp(Math.floor(state.t * textOf(run).exponents.length + 1e-9), 0, textOf(run).exponents.length - 1);
function decoded(code, n) { /* rows of the lower triangle; the numbers are square roots of p in 64 steps */
  const rows = []; let at = 0;
  for (let i = 0; i < n; i++) { rows.push([]); for (let j = 0; j <= i; j++) rows[i].push((ALPHABET.indexOf(code[at++]) / 63) ** 2); }
  return rows;
}
function picture(p, n) { /* one pixel for each number, as an image that is drawn larger */
  const canvas = el("canvas", { width: n, height: n }), context = canvas.getContext("2d"), image = context.createImageData(n, n);
  for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) { const rgb = heat(j <= i ? Math.sqrt(p[i][j]) : 0).rgb, at = 4 * (i * n + j); for (let c = 0; c < 3; c++) image.data[at + c] = rgb[c]; image.data[at + 3] = j <= i ? 255 : 0; }
  context.putImageData(image, 0, 0); return canvas.toDataURL();
}
const drawImage = (root, x, y, size, p, n) => svg("image", { x, y, width: size, height: size, href: picture(p, n), preserveAspectRatio: "none", style: "image-rendering: pixelated" }, root);
const meanMap = maps => maps[0].map((row, i) => row.map((_, j) => mean(maps.map(m => m[i][j]))));
function mapsNow() { const text = textOf(), n = describeOf().labels.length; return text.attention ? text.attention[stepOf()].map(code => decoded(code, n)) : null; }
const headOf = maps => state.ahead >= 0 && state.ahead < maps.length ? state.ahead : -1;
function attention(width) {
  const root = svg("svg", { role: "img", tabindex: "0" }), maps = mapsNow(), labels = describeOf().labels, n = labels.length;
  if (!maps) { root.setAttribute("viewBox", `0 0 ${width} 1`); root.setAttribute("aria-label", "no attention maps"); return { svg: root, csv: () => [] }; }
  const head = headOf(maps), p = head < 0 ? meanMap(maps) : maps[head];
  const title = `${MANY ? runOf().name + ": a" : "A"}ttention of ${head < 0 ? "all heads, mean" : "head " + head}, step ${stepOf() + 1} of ${textOf().attention.length}`, top = titleOf(root, title, width - 2);
  const names = labels.map(l => shorten(dot(l), 70, true)), room = Math.max(...names.map(l => textWidth(l, true))) + 8, size = Math.max(60, Math.min(width - room, 520)), cell = size / n, every = Math.ceil(15 / cell);
  svg("rect", { x: room, y: top, width: size, height: size, fill: "none", stroke: "var(--line)" }, root);
  drawImage(root, room, top, size, p, n);
  for (let i = 0; i < n; i += every) {
    svg("text", { x: room - 5, y: top + (i + 0.5) * cell + 4.5, "text-anchor": "end", class: "mono" }, root, names[i]);
    const x = room + (i + 0.5) * cell + 4.5, y = top + size + 6; svg("text", { x, y, "text-anchor": "end", class: "mono", transform: `rotate(-90 ${x} ${y})` }, root, names[i]);
  }
  const frame = svg("rect", { width: cell, height: cell, fill: "none", stroke: "var(--ink)", visibility: "hidden" }, root);
  let y = top + size + room + 6;
  for (let s = 0; s < 40; s++) svg("rect", { x: 20 + s * 4, y: y + 3, width: 4.3, height: 11, fill: heat(s / 39).back }, root);
  svg("text", { x: 0, y: y + 13 }, root, "0"); svg("text", { x: 186, y: y + 13 }, root, "1 (square root scale)");
  root.setAttribute("viewBox", `0 0 ${width} ${y + 22}`); root.setAttribute("width", width);
  root.setAttribute("aria-label", `${title}: rows look at columns. Arrow keys read the cells.`);
  const read = (i, j) => `“${dot(labels[i])}” (${i}) attends to\n“${dot(labels[j])}” (${j}): ${fmt(p[i][j])}\neven attention: ${fmt(1 / (i + 1))}`;
  const aim = (i, j) => { frame.setAttribute("x", room + j * cell); frame.setAttribute("y", top + i * cell); frame.setAttribute("visibility", "visible"); };
  const move = e => { const b = root.getBoundingClientRect(), f = width / b.width, j = Math.floor(((e.clientX - b.left) * f - room) / cell), i = Math.floor(((e.clientY - b.top) * f - top) / cell); if (i >= 0 && i < n && j >= 0 && j <= i) { aim(i, j); show(read(i, j), e.clientX, e.clientY); } else { frame.setAttribute("visibility", "hidden"); hide(); } };
  root.addEventListener("pointermove", move); root.addEventListener("pointerdown", move);
  const leave = () => { frame.setAttribute("visibility", "hidden"); hide(); };
  root.addEventListener("pointerleave", leave); root.addEventListener("blur", leave);
  let at = [n - 1, 0];
  root.addEventListener("keydown", e => { const d = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[e.key]; if (!d) return; e.preventDefault(); const i = clamp(at[0] + d[0], 0, n - 1); at = [i, clamp(at[1] + d[1], 0, i)]; aim(...at); const b = root.getBoundingClientRect(); show(read(...at), b.left + room + at[1] * cell, b.top + top + at[0] * cell); speak(read(...at)); });
  return { svg: root, csv: () => [["from", "from text", "to", "to text", "p"], ...p.flatMap((row, i) => row.map((v, j) => [i, labels[i], j, labels[j], +v.toPrecision(3)]))] };
}
function allHeads(width) {
  const root = svg("svg", { role: "img", tabindex: "0" }), maps = mapsNow(), n = describeOf().labels.length;
  if (!maps) { root.setAttribute("viewBox", `0 0 ${width} 1`); root.setAttribute("aria-label", "no attention maps"); return { svg: root, csv: () => [] }; }
  const top = titleOf(root, `All heads of ${MANY ? runOf().name + ", " : ""}step ${stepOf() + 1}: press one`, width - 2), columns = Math.min(maps.length, Math.max(Math.ceil(Math.sqrt(maps.length)), 2)), gap = 12, size = Math.min(240, (width - gap * (columns - 1)) / columns);
  const places = maps.map((p, h) => { const x = (h % columns) * (size + gap), y = top + Math.floor(h / columns) * (size + 28); drawImage(root, x, y, size, p, n); svg("rect", { x, y, width: size, height: size, fill: "none", stroke: h === headOf(maps) ? "var(--s0)" : "var(--line)", "stroke-width": h === headOf(maps) ? 3 : 1 }, root); svg("text", { x: x + size / 2, y: y + size + 16, "text-anchor": "middle" }, root, "head " + h); return [x, y]; });
  root.setAttribute("viewBox", `0 0 ${width} ${top + Math.ceil(maps.length / columns) * (size + 28)}`); root.setAttribute("width", width);
  root.setAttribute("aria-label", `attention of ${maps.length} heads; arrow keys choose one`);
  root.addEventListener("click", e => { const b = root.getBoundingClientRect(), f = width / b.width, x = (e.clientX - b.left) * f, y = (e.clientY - b.top) * f, h = places.findIndex(q => x >= q[0] && x <= q[0] + size && y >= q[1] && y <= q[1] + size); if (h >= 0) set({ ahead: h }); });
  root.addEventListener("keydown", e => { const d = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[e.key]; if (!d) return; e.preventDefault(); set({ ahead: clamp(headOf(maps) + d, 0, maps.length - 1) }); });
  return { svg: root, csv: () => [["head", "from", "to", "p"], ...maps.flatMap((p, h) => p.flatMap((row, i) => row.map((v, j) => [h, i, j, +v.toPrecision(3)])))] };
}
function attentionPanel() {
  const parts = [figure($("attention"), "attention", attention), figure($("heads"), "attention of all heads", allHeads)];
  const fill = () => {
    const maps = mapsNow(), missing = textOf().missing || "";
    $("attention-missing").replaceChildren(...(missing ? [el("p", {}, missing)] : []));
    $("attention").parentElement.hidden = !maps;
    if (maps) options($("attention-head"), [[-1, "mean"], ...maps.map((_, h) => [h, h])], headOf(maps)); else $("attention-head").parentElement.hidden = true;
    conclude("attention", r => textOf(r).places ? textOf(r).conclusions.attention : "");
  };
  $("attention-head").onchange = e => set({ ahead: +e.target.value });
  onChange("run text t step ahead", () => { fill(); parts.forEach(p => p.update()); });
  fill(); parts.forEach(p => p.update());
}
