/* Speed, direction, growth: of all runs, beside the nulls of the chosen one. */
const middles = ends => ends.slice(1).map((t, k) => (t + ends[k]) / 2);
const MOTION = {
  speed: ["Speed ‖dx/dt‖", middles, { zero: true }],
  turning: ["Cosine of dx/dt with that of the next step", ends => ends.slice(1, -1), { ylim: [-1, 1] }],
  outward: ["Cosine of dx/dt with x", middles, { ylim: [-1, 1] }],
  displacement: ["Displacement ‖x(t) − x(0)‖ / ‖x(0)‖", ends => ends, { zero: true }],
};
const share = (row, length) => length > 1 ? mean(row.slice(1).map((v, i) => v / Math.log(i + 2))) : null;
function motionChart(key) {
  const [title, times, more] = MOTION[key];
  return width => lineChart(width, { title, x: "layer-time t", xlim: [0, 1], height: 170, cursor: state.t, choose: t => set({ t }), ...more,
    series: [...perRun(r => r).map((s, i) => { const r = RUNS[i], line = spread(s.name, times(textOf(r).ends), textOf(r).motion[key], s.colour, { shape: i }); return i === state.run ? line : { ...line, band: [] }; }), ...nullSeries(n => n.motion[key], n => times(n.ends))] });
}
/* Of the runs that are not chosen, one line each. */
const others = (points, what) => RUNS.map((r, i) => ({ name: `${r.name}, ${what}`, colour: colour(i + 5), dash: DASHES[3], points: i === state.run ? [] : points(r) })).filter(s => s.points.length);
function entropyChart(width) {
  const run = runOf(), text = textOf(), n = describeOf().labels.length, heads = text.entropy ? text.entropy[0].length : 0, times = text.times;
  return lineChart(width, { title: `Attention entropy / largest possible${MANY ? ", " + run.name : ""}`, x: "layer-time t", xlim: [0, 1], ylim: [0, 1], height: 170, cursor: state.t,
    series: text.entropy ? [...Array.from({ length: heads }, (_, h) => ({ name: "head " + h, colour: colour(h), dash: DASHES[Math.floor(h / 8) % 4], marks: true, shape: h, points: text.entropy.map((row, k) => [times[k], share(row[h], n)]) })), ...others(r => textOf(r).entropy ? textOf(r).entropy.map((row, k) => [textOf(r).times[k], mean(row.map(head => share(head, describeOf(r).labels.length)))]) : [], "mean of heads"), ...nullSeries(x => x.entropy, x => x.times)] : [] });
}
function growthChart(width) {
  const run = runOf(), text = textOf(), with0 = (rows, i) => [[0, 0], ...rows.map((row, k) => [(k + 1) / rows.length, row[i]])];
  return lineChart(width, { title: `Growth of the leading perturbations (log)${MANY ? ", " + run.name : ""}`, x: "layer-time t", xlim: [0, 1], height: 170, cursor: state.t,
    series: [...text.exponents[0].map((_, i) => ({ name: `λ${i + 1} = ${fmt(text.exponents.at(-1)[i])}`, colour: colour(i), dash: DASHES[Math.floor(i / 8) % 4], points: with0(text.exponents, i) })),
      ...others(r => with0(textOf(r).exponents, 0), "λ1"), ...nullSeries(n => [0, ...n.exponents.map(row => row[0])], n => n.ends).map(s => ({ ...s, name: "λ1, " + s.name }))] });
}
function motionPanel() {
  const host = $("motion"), add = (name, draw) => figure(host, name, draw);
  const parts = [...Object.keys(MOTION).map(k => add(MOTION[k][0], motionChart(k))), add("attention entropy", entropyChart), add("growth of perturbations", growthChart)];
  const fill = () => { host.children[4].hidden = !textOf().entropy; conclude("motion", r => textOf(r).conclusions.motion); };
  onChange("run text step", fill); onChange("run text t step", () => parts.forEach(p => p.update()));
  fill();
}
