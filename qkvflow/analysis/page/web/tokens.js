/* Tokens in colour, of every run: one robust scale with its legend. */
const METRICS = { score: "sensitivity of the output token, up to t", loss: "loss of the token, predicted at t", displacement: "displacement, up to t", entropy: "attention entropy at t, mean over heads" };
const outputsOf = (run = runOf()) => textOf(run).outputs;
const outputOf = run => { const list = outputsOf(run), wanted = list.indexOf(state.output); return wanted < 0 ? list.length - 1 : wanted; };
function valueOf(run, metric, k, i) { /* after step k (0 is the start); null where it has no meaning */
  const text = textOf(run);
  if (metric === "score") { const o = outputOf(run); return k && i <= text.outputs[o] ? text.scores[o][k - 1][i] : null; }
  if (metric === "loss") return i ? text.lens.loss[k][i - 1] : null;
  if (metric === "displacement") return text.motion.displacement[k][i];
  const row = text.entropy ? text.entropy[Math.min(k, text.entropy.length - 1)] : null;
  return row ? mean(row.map(head => head[i])) : null;
}
function tokenScale() { /* over all runs and times, without the output token, and without the largest 3 % */
  const values = RUNS.flatMap(r => textOf(r).ends.flatMap((_, k) => describeOf(r).labels.map((_, i) => state.metric === "score" && i === outputsOf(r)[outputOf(r)] ? null : valueOf(r, state.metric, k, i)))).filter(finite);
  const high = quantile(values, 0.97) ?? 1, low = Math.min(quantile(values, 0.01) ?? 0, 0);
  return { low, high: high > low ? high : low + 1, over: values.some(v => v > high) };
}
function tokens() {
  const { low, high, over } = tokenScale(), hosts = [], had = $("tokens").contains(document.activeElement), place = RUNS.map((r, i) => $("tokens").children[i]?.querySelector(".tokens")?.place?.());
  RUNS.forEach((run, n) => {
    const describe = describeOf(run), k = endOf(run), output = outputsOf(run)[outputOf(run)], box = el("div", { className: "tokens", role: "listbox", "aria-label": `tokens of ${run.name}, ${METRICS[state.metric]}` });
    const cells = describe.labels.map((label, i) => {
      const v = valueOf(run, state.metric, k, i), can = state.metric === "score" && outputsOf(run).includes(i), isOutput = state.metric === "score" && i === output;
      const node = el("span", { className: "token" + (can ? " choice" : "") + (isOutput ? " output" : ""), role: "option" }, label.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥"));
      node.setAttribute("aria-selected", String(isOutput)); node.setAttribute("aria-label", `token ${i}, ${dot(label)}, ${finite(v) ? fmt(v) : "no value"}${isOutput ? ", output" : ""}`);
      warm(node, finite(v) && !isOutput ? (v - low) / (high - low) : 0);
      hover(node, () => [`“${dot(label)}”, token ${i}${isOutput ? ", the output" : ""}`, ...Object.keys(METRICS).map(m => [m, valueOf(run, m, k, i)]).filter(p => finite(p[1])).map(p => `${METRICS[p[0]].split(",")[0]} ${fmt(p[1])}`), ...(can && !isOutput ? ["press to make it the output"] : [])].join("\n"));
      if (can) { node.onclick = () => set({ output: i }); node.onkeydown = e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); set({ output: i }); } }; }
      return node;
    });
    box.append(...cells); rove(box, [cells], place[n] ?? 0, 8);
    hosts.push(el("div", {}, ...(MANY ? [el("p", { className: "whose" }, run.name)] : []), box));
  });
  const focus = had && [...$("tokens").children].findIndex(c => c.contains(document.activeElement));
  $("tokens").replaceChildren(...hosts);
  if (had && hosts[focus]) hosts[focus].querySelector('[tabindex="0"]').focus();
  scaleLegend($("tokens-scale"), METRICS[state.metric], fmt(low), fmt(high), over);
}
function tokenPanel() {
  $("tokens-section").querySelector(".finding").before(saveMenu("token values", () => ({ svg: () => pictured($("tokens")),
    csv: () => [["model", "token", "text", "t", ...Object.values(METRICS)], ...RUNS.flatMap(r => describeOf(r).labels.map((l, i) => [r.name, i, l, textOf(r).ends[endOf(r)], ...Object.keys(METRICS).map(m => valueOf(r, m, endOf(r), i))]))] })));
  const fill = () => {
    options($("metric"), Object.entries(METRICS).filter(([m]) => m !== "entropy" || textOf().entropy), state.metric);
    options($("output"), outputsOf().map(p => [p, `${p}: “${dot(describeOf().labels[p])}”`]), outputsOf()[outputOf(runOf())]);
    $("output").parentElement.hidden = state.metric !== "score" || outputsOf().length < 2;
    conclude("tokens", r => textOf(r).conclusions.tokens);
  };
  $("metric").onchange = e => set({ metric: e.target.value });
  $("output").onchange = e => set({ output: +e.target.value });
  onChange("run text t step metric output", () => { fill(); tokens(); });
  fill(); tokens();
}
