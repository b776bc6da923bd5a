/* Eigenvalues in the complex plane, at any t, each with its path; and what is read off them along t. */
const SCALES = [["auto", "automatic"], ["linear", "all, linear"], ["zoom", "central 95 %"], ["symlog", "symlog"]];
const LABELS = { radius: "Spectral radius", positive: "Share with positive real part", symmetric: "Symmetric share ‖S‖² / ‖M‖²" };
const families = (run = runOf()) => Object.keys(snapshotOf(run).spectra);
const familyOf = () => families().includes(state.family) ? state.family : families().includes("ov") ? "ov" : families()[0];
const timeOf = run => nearest(run.times, state.t);
function measured(run, family) { /* moduli that choose the scale: the same for all t and checkpoints */
  const key = run.name + family; measured.kept ||= {};
  return measured.kept[key] ||= run.snapshots.flatMap(s => s.spectra[family].re.flatMap((heads, k) => heads.flatMap((row, h) => row.map((re, i) => Math.hypot(re, s.spectra[family].im[k][h][i]))))).sort((a, b) => a - b);
}
function plane(width) {
  const family = familyOf(), run = runOf(), k = timeOf(run), shown = state.all ? RUNS.filter(r => families(r).includes(family)) : [run];
  const moduli = shown.flatMap(r => measured(r, family)), most = Math.max(...shown.map(r => measured(r, family).at(-1)), 1e-9), central = Math.max(...shown.map(r => quantile(measured(r, family), 0.95)), 1e-9);
  const scale = state.scale === "auto" ? (most > 4 * central ? "symlog" : "linear") : state.scale;
  const reach = (scale === "zoom" ? central : most) * 1.06, knee = Math.max(quantile(moduli, 0.3), reach / 3000);
  const bend = scale === "symlog" ? r => Math.asinh(r / knee) / Math.asinh(reach / knee) : r => r / reach;
  const root = svg("svg", { role: "img", tabindex: "0" });
  const data = snapshotOf(run).spectra[family], heads = data.re[0].length;
  const t = run.times[k], isTrained = run.trained_times.some(s => Math.abs(s - t) < 1e-4);
  const name = state.all ? "all models" : heads > 1 && state.head >= 0 ? "head " + state.head : heads > 1 ? heads + " heads" : "the MLP";
  const top = titleOf(root, `Eigenvalues of ${NAMES[family]}, ${name}, t = ${t.toFixed(3)}${isTrained ? "" : " (between times of training)"}`, width - 2);
  const size = Math.min(width, 520), mid = size / 2, x0 = (width - size) / 2, radius = mid - 12;
  const at = (re, im) => { const r = Math.hypot(re, im), f = r ? Math.min(bend(r), 1.0) / r * radius : 0; return [x0 + mid + re * f, top + mid - im * f, bend(r) > 1]; };
  svg("line", { x1: x0 + 6, x2: x0 + size - 6, y1: top + mid, y2: top + mid, stroke: "var(--line)" }, root);
  svg("line", { x1: x0 + mid, x2: x0 + mid, y1: top + 6, y2: top + size - 6, stroke: "var(--line)" }, root);
  const rings = scale === "symlog" ? [-4, -3, -2, -1, 0, 1, 2, 3, 4, 5].flatMap(p => [10 ** p, 3 * 10 ** p]).filter(r => r > knee * 0.7 && r < reach) : ticks(0, reach, 4).filter(r => r > 0 && r < reach);
  const labels = [];
  for (const r of rings) { if (r !== 1) svg("circle", { cx: x0 + mid, cy: top + mid, r: bend(r) * radius, fill: "none", stroke: "var(--grid)" }, root); labels.push([r, fmt(r)]); }
  if (bend(1) <= 1) { svg("circle", { class: "unit", cx: x0 + mid, cy: top + mid, r: bend(1) * radius, fill: "none", stroke: "var(--soft)", "stroke-dasharray": "5 4" }, root); if (!rings.includes(1)) labels.push([1, "1"]); }
  const fresh = run.fresh && run.fresh.spectra[family];
  if (state.cloud && fresh && !state.all) fresh.re[k].forEach((re, i) => { const [x, y, out] = at(re, fresh.im[k][i]); if (!out) svg("circle", { class: "fresh", cx: x, cy: y, r: 2, fill: "var(--fresh)", opacity: 0.4 }, root); });
  const points = [], rows = [["model", "head", "index", "t", "re", "im"]]; let outside = 0;
  shown.forEach(r => {
    const own = snapshotOf(r).spectra[family], n = timeOf(r), i0 = RUNS.indexOf(r);
    own.re[n].forEach((row, h) => {
      if (!state.all && state.head >= 0 && heads > 1 && h !== state.head) return;
      const ink = state.all ? colour(i0) : colour(h), shape = state.all ? i0 : h + Math.floor(h / 8);
      if (state.trails) row.forEach((_, i) => { const path = own.re.map((at_t, m) => at(at_t[h][i], own.im[m][h][i])).map(p => `${p[0].toFixed(1)} ${p[1].toFixed(1)}`); svg("path", { class: "trail", d: "M" + path.join("L"), fill: "none", stroke: ink, "stroke-width": 0.9, opacity: 0.35 }, root); });
      row.forEach((re, i) => {
        const im = own.im[n][h][i], [x, y, out] = at(re, im); outside += out;
        points.push([re, im, h, x, y, r]); rows.push([r.name, h, i, r.times[n], re, im]);
        mark(root, shape, x, y, out ? "none" : ink, state.all || row.length > 64 ? 2.4 : 3, { class: "eigenvalue", opacity: 0.8, ...(out ? { stroke: ink } : {}) });
      });
    });
  });
  let lastX = x0 + mid + 12; /* ring labels stand on the right half of the real axis, where they have room */
  for (const [r, text] of labels.sort((a, b) => a[0] - b[0])) { const x = x0 + mid + bend(r) * radius; if (x - textWidth(text) / 2 < lastX) continue; lastX = x + textWidth(text) / 2 + 4; svg("text", { x, y: top + mid + 17, "text-anchor": "middle", stroke: "var(--card)", "stroke-width": 3, "paint-order": "stroke" }, root, text); }
  svg("text", { x: x0 + size - 4, y: top + mid - 7, "text-anchor": "end" }, root, "Re"); svg("text", { x: x0 + mid + 8, y: top + 16 }, root, "Im");
  const keys = state.all ? shown.map(r => ({ name: r.name, colour: colour(RUNS.indexOf(r)), shape: RUNS.indexOf(r) }))
    : heads > 1 ? data.re[0].map((_, h) => ({ name: "head " + h, colour: colour(h), shape: h + Math.floor(h / 8) })).filter((_, h) => state.head < 0 || h === state.head) : [{ name: "MLP", colour: colour(0), shape: 0 }];
  if (state.cloud && fresh && !state.all) keys.push({ name: "untrained", colour: "var(--fresh)", shape: 0 });
  if (bend(1) <= 1) keys.push({ name: "unit circle", colour: "var(--soft)", dash: "5 4" });
  let y = top + size + 4;
  const note = `${points.length} eigenvalues${data.left_out && !state.all ? `, the ${data.left_out} smallest of each left out` : ""}${outside ? `, ${outside} beyond the edge (hollow)` : ""}; ${scale === "symlog" ? "logarithmic beyond " + fmt(knee) : scale === "zoom" ? "central 95 %" : "linear"}`;
  for (const line of lines(note, width)) { svg("text", { x: 0, y: y + 13 }, root, line); y += 17; }
  y += 4 + legendOf(root, keys, width, y + 4);
  root.setAttribute("viewBox", `0 0 ${width} ${y + 4}`); root.setAttribute("width", width);
  const read = p => `${fmt(p[0])} ${p[1] < 0 ? "−" : "+"} ${fmt(Math.abs(p[1]))} i\nmodulus ${fmt(Math.hypot(p[0], p[1]))}${heads > 1 ? "\nhead " + p[2] : ""}${state.all ? "\n" + p[5].name : ""}`;
  root.setAttribute("aria-label", `Eigenvalues of ${NAMES[family]} at t = ${t.toFixed(3)}: ${points.length}, moduli up to ${fmt(Math.max(...points.map(p => Math.hypot(p[0], p[1]))))}. Arrow keys read them by modulus.`);
  const move = e => { const b = root.getBoundingClientRect(), f = width / b.width, px = (e.clientX - b.left) * f, py = (e.clientY - b.top) * f; let best = null, d = 18 ** 2; for (const p of points) { const q = (p[3] - px) ** 2 + (p[4] - py) ** 2; if (q < d) { d = q; best = p; } } best ? show(read(best), e.clientX, e.clientY) : hide(); };
  root.addEventListener("pointermove", move); root.addEventListener("pointerdown", move); root.addEventListener("pointerleave", hide); root.addEventListener("blur", hide);
  const order = [...points].sort((a, b) => Math.hypot(b[0], b[1]) - Math.hypot(a[0], a[1])); let cursor = -1;
  root.addEventListener("keydown", e => { const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key]; if (!step) return; e.preventDefault(); cursor = clamp(cursor + step, 0, order.length - 1); const b = root.getBoundingClientRect(), p = order[cursor]; show(read(p), b.left + p[3], b.top + p[4]); speak(read(p)); });
  return { svg: root, csv: () => rows };
}
function summary(key) {
  return width => {
    const family = familyOf(), run = runOf(), fresh = run.fresh && run.fresh.spectra[family];
    return lineChart(width, { title: LABELS[key] + " of " + NAMES[family], x: "layer-time t", xlim: [0, 1], height: 140, cursor: run.times[timeOf(run)], choose: t => set({ t }), ...(key === "radius" ? { zero: true } : { ylim: [0, 1] }),
      series: [...(fresh ? [{ name: whose(run) + "untrained, range", colour: "var(--fresh)", points: [], band: run.times.map((t, i) => [t, fresh.band[key][0][i], fresh.band[key][1][i]]) }] : []),
        ...perRun(r => r).map((s, i) => { const own = families(RUNS[i]).includes(family) ? snapshotOf(RUNS[i]).spectra[family][key] : null, times = RUNS[i].times;
          return { name: s.name, colour: s.colour, shape: i, marks: x => RUNS[i].trained_times.some(t => Math.abs(t - x) < 1e-4), points: own ? times.map((t, n) => [t, quantile(own[n], 0.5)]) : [],
            band: own && i === state.run ? times.map((t, n) => [t, Math.min(...own[n]), Math.max(...own[n])]) : [] }; })] });
  };
}
function spectra() {
  const buttons = ["qk", "ov", "ff"].map(f => el("button", { type: "button", onclick: () => set({ family: f }) }, NAMES[f]));
  $("family").replaceChildren(...buttons);
  const parts = [figure($("plane"), "eigenvalues", plane), ...Object.keys(LABELS).map(k => figure($("summaries"), LABELS[k], summary(k)))];
  const fill = () => {
    const family = familyOf(), heads = snapshotOf().spectra[family].re[0].length;
    buttons.forEach((b, i) => { const f = ["qk", "ov", "ff"][i]; b.setAttribute("aria-pressed", String(f === family)); b.hidden = !families().includes(f); });
    options($("head"), heads > 1 ? [[-1, "all"], ...Array.from({ length: heads }, (_, h) => [h, h])] : [[-1, "all"]], state.head < heads ? state.head : -1);
    options($("scale"), SCALES, state.scale);
    for (const key of ["trails", "cloud", "all"]) $(key).checked = state[key];
    $("cloud").parentElement.hidden = !runOf().fresh; $("all").parentElement.hidden = !MANY;
    conclude("spectra", r => families(r).includes(family) ? snapshotOf(r).spectra[family].conclusion : "");
  };
  $("head").onchange = e => set({ head: +e.target.value });
  $("scale").onchange = e => set({ scale: e.target.value });
  for (const key of ["trails", "cloud", "all"]) $(key).onchange = e => set({ [key]: e.target.checked });
  onChange("run step family", () => { fill(); parts.forEach(p => p.update()); });
  onChange("t", () => parts.forEach(p => p.update()));
  onChange("head scale trails cloud all", () => { fill(); parts[0].update(); });
  fill(); parts.forEach(p => p.update());
}
