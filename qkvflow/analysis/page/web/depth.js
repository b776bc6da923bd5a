/* Readings of the same weights by other solvers, on other grids, with exits and drafts. */
const LOSS = "Validation loss (nats per token)";
function readings(of) {
  return RUNS.flatMap((r, i) => [...new Set(of(r).map(s => s.solver))].map(solver => ({ name: whose(r) + solver, run: i, rows: of(r).filter(s => s.solver === solver).sort((a, b) => a.evaluations - b.evaluations) })));
}
const KINDS = { steps: "fewer steps", exit: "exits", draft: "drafts" };
function anytime() { /* what experiments.bench.anytime measured */
  return RUNS.flatMap((r, i) => Object.keys(KINDS).map(kind => ({ name: whose(r) + KINDS[kind], run: i, exits: kind === "exit", rows: r.anytime.filter(s => s.kind === kind).sort((a, b) => a.evaluations - b.evaluations) }))).filter(f => f.rows.length);
}
function depthPanel() {
  const sweep = readings(r => r.sweep), exits = RUNS.flatMap((r, i) => r.exits.length ? [{ name: whose(r) + "exits by " + r.exits[0].rule, run: i, exits: true, rows: [...r.exits].sort((a, b) => a.evaluations - b.evaluations) }] : []);
  const both = [...sweep, ...exits], measured = anytime();
  const chartOf = (list, key, title) => width => lineChart(width, { title, x: "evaluations of the field per token", log: true, zero: key !== "loss", legend: true, height: 200,
    series: list.map((f, n) => ({ name: f.name, colour: colour(n), dash: f.exits ? DASHES[1] : "", marks: true, shape: n, points: f.rows.map(r => [r.evaluations, r[key]]) })) });
  $("depth").hidden = !both.length && !measured.length;
  if (both.length || measured.length) {
    if (both.length) figure($("depth-charts"), "loss against depth", chartOf(both, "loss", LOSS));
    if (sweep.length) figure($("depth-charts"), "displacement against depth", chartOf(sweep, "displacement", "Displacement ‖x(1) − x(0)‖ / ‖x(0)‖"));
    if (measured.length) {
      figure($("depth-charts"), "loss of generated tokens", chartOf(measured, "loss", LOSS + ", as tokens are generated"));
      figure($("depth-charts"), "speed of generation", chartOf(measured, "speed", "Tokens per second, relative to the full depth"));
    }
    conclude("depth", r => r.conclusions.depth);
  }
  const found = readings(r => r.continuity ? r.continuity.readings : []);
  $("continuity").hidden = !found.length;
  if (found.length) {
    for (const [key, title] of Object.entries({ loss: LOSS, state: "Distance of x(1) to the finest reading", kl: "KL of next tokens to the finest reading (nats)" })) figure($("continuity-charts"), "continuity: " + key, chartOf(found, key, title));
    conclude("continuity", r => r.continuity ? r.continuity.verdict : "");
  }
}
