/* What the model would say on the way. */
const MODES = { token: "most likely token, shaded by its probability", rank: "rank of the right token, shaded by it", entropy: "entropy of the prediction (nats)", kl: "KL of the end's prediction from this one (nats)" };
function lensCell(run, k, i) { /* what a cell shows and how warm it is, its rank (null for the last token) */
  const lens = textOf(run).lens, rank = i < lens.rank[k].length ? lens.rank[k][i] : null, entropy = lens.entropy[k][i], kl = lens.kl[k][i];
  const top = lens.top[k][i].map(id => run.vocabulary[id]), uniform = run.uniform;
  if (state.mode === "rank") return { text: rank === null ? "–" : String(rank + 1), share: rank === null ? 0 : Math.log1p(rank) / uniform, rank, top };
  if (state.mode === "entropy") return { text: entropy.toFixed(2), share: entropy / uniform, rank, top };
  if (state.mode === "kl") return { text: kl.toFixed(2), share: kl / lens.high, rank, top };
  return { text: dot(top[0]), share: 0.9 * lens.p[k][i][0], rank, top };
}
function lens() {
  const run = runOf(), text = textOf(), describe = describeOf(), data = text.lens, old = $("lens"), place = old && old.place ? old.place() : 0, had = old && old.contains(document.activeElement);
  data.high ||= Math.max(quantile(data.kl.flat(), 0.97), 1e-6);
  const rows = [], now = endOf();
  const table = el("table", { id: "lens", className: "lens", role: "grid", "aria-label": `logit lens of ${run.name}: ${MODES[state.mode]}` });
  table.append(el("tr", {}, el("th", { scope: "col" }, "after"), ...describe.labels.map(l => el("th", { scope: "col" }, dot(l)))));
  text.ends.forEach((t, k) => {
    const cells = describe.labels.map((label, i) => {
      const own = lensCell(run, k, i), right = own.rank === 0, cell = el("td", { className: right ? "right" : "" }, (right && state.mode === "token" ? "✓" : "") + own.text);
      warm(cell, own.share);
      hover(cell, () => `after “${dot(label)}” at t = ${t.toFixed(3)}\n` + own.top.map((w, j) => `“${dot(w)}” ${fmt(data.p[k][i][j])}`).join("\n") + (own.rank !== null ? `\nnext is “${dot(describe.labels[i + 1])}”: rank ${own.rank + 1}, loss ${fmt(data.loss[k][i])}` : "") + `\nentropy ${fmt(data.entropy[k][i])}, KL to the end ${fmt(data.kl[k][i])}`);
      return cell;
    });
    rows.push(cells); table.append(el("tr", { className: k === now ? "now" : "" }, el("th", { scope: "row" }, t.toFixed(2)), ...cells));
  });
  rove(table, rows, place);
  const box = $("lens-box").firstElementChild; const left = box.scrollLeft; box.replaceChildren(table); box.scrollLeft = left;
  if (had) table.querySelector('[tabindex="0"]').focus();
  const ends = { token: ["0", "0.9 and more"], rank: ["1", String(Math.round(Math.exp(run.uniform)))], entropy: ["0", fmt(run.uniform)], kl: ["0", fmt(data.high)] }[state.mode];
  scaleLegend($("lens-scale"), { token: "probability", rank: "rank (log)", entropy: "nats", kl: "nats" }[state.mode], ends[0], ends[1], state.mode === "kl");
  $("lens-section").querySelector(".hint").hidden = box.scrollWidth <= box.clientWidth; $("lens-box").classList.toggle("more", box.scrollWidth > box.clientWidth);
}
function lensPanel() {
  $("lens-box").append(el("div", { className: "wide" }));
  $("lens-section").querySelector(".finding").before(saveMenu("logit lens", () => ({ svg: () => pictured($("lens-box").firstElementChild),
    csv: () => { const d = describeOf(), l = textOf().lens; return [["t", "token", "text", "most likely", "probability", "rank", "loss", "entropy", "kl"], ...textOf().ends.flatMap((t, k) => d.labels.map((w, i) => [t, i, w, runOf().vocabulary[l.top[k][i][0]], l.p[k][i][0], i < l.rank[k].length ? l.rank[k][i] + 1 : null, i < l.loss[k].length ? l.loss[k][i] : null, l.entropy[k][i], l.kl[k][i]]))]; } })));
  const fill = () => { options($("mode"), Object.entries(MODES), state.mode); $("echo").textContent = textOf().conclusions.echo; conclude("lens", r => textOf(r).conclusions.lens); };
  $("mode").onchange = e => set({ mode: e.target.value });
  onChange("run text step mode", () => { fill(); lens(); });
  onChange("t", () => { if (!$("lens")) return; [...$("lens").rows].slice(1).forEach((row, k) => { row.className = k === endOf() ? "now" : ""; }); });
  fill(); lens();
}
