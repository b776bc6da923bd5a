/* Title, findings, the hero figure, configuration, training curves. */
function heading() {
  $("title").textContent = RUNS.map(r => r.name).join(" · ");
  document.title = "qkvflow: " + $("title").textContent;
  const data = [...new Set(RUNS.map(r => r.facts.data))].join("; ");
  $("made").textContent = `${DATA.made.date} · qkvflow ${DATA.made.version} · trained on ${data} · ${[...new Set(RUNS.map(r => r.facts.checkpoint))].join(", ")}`;
  $("command").textContent = DATA.made.command;
  $("opening").replaceChildren(...DATA.opening.map(s => el("li", {}, s)));
}
function facts() {
  const keys = [...new Set(RUNS.flatMap(r => Object.keys(r.facts)))], groups = [...new Set(RUNS.flatMap(r => Object.keys(r.parameters)))];
  const row = (name, values) => {
    const shown = values.map(v => v === undefined || v === null ? "–" : typeof v === "number" ? v.toLocaleString("en") : String(v));
    $("facts").append(el("tr", { className: new Set(shown).size > 1 ? "differs" : "" }, el("th", { scope: "row" }, name), ...shown.map(v => el("td", {}, v))));
  };
  $("facts").append(el("tr", {}, el("td", {}, ""), ...RUNS.map(r => el("th", { scope: "col" }, r.name))));
  for (const k of keys) row(k, RUNS.map(r => r.facts[k]));
  for (const k of groups) row("parameters: " + k, RUNS.map(r => r.parameters[k] || 0));
  row("parameters: total", RUNS.map(r => Object.values(r.parameters).reduce((a, b) => a + b, 0)));
  row("last validation loss", RUNS.map(r => r.curves.eval.length ? r.curves.eval.at(-1)[1] : null));
}
function nullSeries(read, times) { /* of the chosen model: shuffled texts, an untrained model, each at its own times */
  const shuffled = textOf().shuffled || [], fresh = freshOf(), list = [];
  if (shuffled.length && read(shuffled[0])) list.push({ name: whose(runOf()) + "shuffled text", colour: "var(--null)", dash: DASHES[1], points: times(shuffled[0]).map((t, k) => [t, mean(shuffled.map(s => read(s)[k]))]),
    band: shuffled.length > 1 ? times(shuffled[0]).map((t, k) => [t, Math.min(...shuffled.map(s => read(s)[k])), Math.max(...shuffled.map(s => read(s)[k]))]) : [] });
  if (fresh && read(fresh)) list.push({ name: whose(runOf()) + "untrained", colour: "var(--fresh)", dash: DASHES[2], points: times(fresh).map((t, k) => [t, read(fresh)[k]]) });
  return list;
}
const perRun = make => RUNS.map((r, i) => ({ ...make(r, i), name: MANY ? r.name : "this model", colour: colour(i), shape: i }));
function hero(width) {
  return lineChart(width, { title: `Loss of the next token if the model stopped at t (nats, mean over “${dot(describeOf().text.slice(0, 40))}”)`, x: "layer-time t", xlim: [0, 1], height: width < 600 ? 190 : 250, zero: true, cursor: state.t, legend: true, choose: t => set({ t }),
    series: [...perRun(r => ({ marks: true, points: textOf(r).ends.map((t, k) => [t, mean(textOf(r).lens.loss[k])]) })), ...nullSeries(n => n.loss.length ? n.loss : null, n => n.ends)] });
}
function curves(width) {
  const steps = runOf().snapshots.map(s => s.step);
  return lineChart(width, { title: "Loss during training (nats per token)", x: "step", height: width < 600 ? 190 : 250, legend: true, cursor: STEPS.length > 1 ? snapshotOf().step : undefined, choose: STEPS.length > 1 ? x => set({ step: STEPS[nearest(STEPS, x)] }) : undefined,
    series: RUNS.flatMap((r, i) => [
      { name: whose(r) + "training", colour: colour(MANY ? i : 0), thin: true, points: r.curves.train },
      { name: whose(r) + "validation", colour: colour(MANY ? i : 1), dash: MANY ? DASHES[1] : "", marks: true, shape: i, points: r.curves.eval }]) });
}
function training() {
  heading(); facts();
  const first = figure($("hero"), "loss along layer-time", hero);
  onChange("run text t step", () => first.update());
  $("training").hidden = !RUNS.some(r => r.curves.train.length || r.curves.eval.length);
  if ($("training").hidden) return;
  const second = figure($("curves"), "training curves", curves);
  onChange("run step", () => second.update());
  conclude("training", r => r.conclusions.training);
}
