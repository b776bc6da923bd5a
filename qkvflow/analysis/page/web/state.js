/* What is chosen, for all panels: one model, one text, one layer-time, one checkpoint. It stands in the address. */
const T = [...new Set(RUNS.flatMap(r => [...r.times, ...r.snapshots.flatMap(s => s.texts.flatMap(t => t.ends))]))].sort((a, b) => a - b);
const STEPS = [...new Set(RUNS.flatMap(r => r.snapshots.map(s => s.step)))].sort((a, b) => a - b);
const state = { run: 0, text: 0, t: 1, step: STEPS.at(-1), family: "", head: -1, scale: "auto", trails: false, cloud: true, all: false, metric: "score", output: -1, mode: "token", ahead: 0 };
const START = { ...state };
const views = []; /* [keys, draw] */
const onChange = (keys, draw) => { views.push([keys.split(" "), draw]); };
const runOf = i => RUNS[i ?? state.run];
const snapshotOf = (run = runOf()) => run.snapshots[nearest(run.snapshots.map(s => s.step), state.step)];
const describeOf = (run = runOf()) => run.texts[state.text];
const textOf = (run = runOf()) => snapshotOf(run).texts[state.text];
const freshOf = (run = runOf()) => run.fresh ? run.fresh.texts[state.text] : null;
const endOf = (run = runOf()) => nearest(textOf(run).ends, state.t);
function set(changes) {
  const changed = Object.keys(changes).filter(k => state[k] !== changes[k]);
  if (!changed.length) return;
  Object.assign(state, changes);
  for (const [keys, draw] of views) if (keys.some(k => changed.includes(k))) draw(changed);
  write();
}
let section = "";
function address() {
  const pairs = Object.keys(state).filter(k => state[k] !== START[k]).map(k => [k, String(state[k])]);
  return "#" + section + (pairs.length ? "?" + new URLSearchParams(pairs) : "");
}
function write() { try { history.replaceState(null, "", address() === "#" ? location.pathname : address()); } catch (error) { /* an address that may not be changed */ } }
function fromAddress() {
  const [id, query] = location.hash.slice(1).split("?"), found = {};
  for (const [k, v] of new URLSearchParams(query || "")) {
    if (!(k in START)) continue;
    const value = typeof START[k] === "number" ? Number(v) : typeof START[k] === "boolean" ? v === "true" : v;
    if (typeof value !== "number" || Number.isFinite(value)) found[k] = value;
  }
  found.run = clamp(Math.round(found.run ?? state.run), 0, RUNS.length - 1);
  found.text = clamp(Math.round(found.text ?? state.text), 0, RUNS[0].texts.length - 1);
  found.t = clamp(found.t ?? state.t, 0, 1);
  return [id, found];
}
const whose = run => MANY ? run.name + ": " : "";
/* Under each panel: what to conclude, of every run. */
function conclude(key, of) {
  const host = document.querySelector(`[data-of="${key}"]`);
  host.replaceChildren(...RUNS.map(r => [r, of(r)]).filter(p => p[1]).map(([r, text]) => el("p", {}, whose(r) + text)));
}
