/* Controls that all panels share, theme, contents, print. */
function controls() {
  $("run").parentElement.hidden = !MANY; options($("run"), RUNS.map((r, i) => [i, r.name]), state.run);
  options($("text"), RUNS[0].texts.map((t, i) => [i, `${i + 1}: ${dot(t.text.slice(0, 40))}`]), state.text);
  $("t").max = T.length - 1; $("step").max = STEPS.length - 1; $("step").parentElement.hidden = STEPS.length < 2;
  const fill = () => {
    $("run").value = state.run; $("text").value = state.text;
    const i = nearest(T, state.t), j = nearest(STEPS, state.step), isTrained = runOf().trained_times.some(t => Math.abs(t - T[i]) < 1e-4);
    $("t").value = i; $("t-out").textContent = T[i].toFixed(3); $("t").setAttribute("aria-valuetext", `layer-time ${T[i].toFixed(3)}${isTrained ? ", a time of training" : ""}`);
    $("step").value = j; $("step-out").textContent = STEPS[j]; $("step").setAttribute("aria-valuetext", `checkpoint of step ${STEPS[j]}, ${j + 1} of ${STEPS.length}`);
  };
  $("run").onchange = e => set({ run: +e.target.value });
  $("text").onchange = e => set({ text: +e.target.value, output: -1 });
  $("t").oninput = e => { stop(); set({ t: T[+e.target.value] }); };
  $("step").oninput = e => set({ step: STEPS[+e.target.value] });
  onChange("run text t step", fill); fill();
  let timer = null;
  const stop = () => { if (timer) clearInterval(timer); timer = null; $("play").textContent = "play"; $("play").setAttribute("aria-pressed", "false"); };
  $("play").onclick = () => {
    if (timer) return stop();
    $("play").textContent = "stop"; $("play").setAttribute("aria-pressed", "true");
    if (nearest(T, state.t) === T.length - 1) set({ t: T[0] });
    timer = setInterval(() => { const i = nearest(T, state.t); if (i >= T.length - 1) stop(); else set({ t: T[i + 1] }); }, 350);
  };
}
function contents() {
  for (const part of document.querySelectorAll("main section")) {
    if (part.hidden) continue;
    const title = part.querySelector("h2"), name = title.textContent, go = e => { e.preventDefault(); section = part.id; write(); part.scrollIntoView(); title.querySelector("a").focus({ preventScroll: true }); };
    title.replaceChildren(el("a", { href: "#" + part.id, onclick: go }, name));
    $("contents").append(el("li", {}, el("a", { href: "#" + part.id, onclick: go }, name)));
  }
}
/* Theme: that of the system, until the button is pressed. Colours of cells and maps are computed, so they are drawn again. */
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  ramp.cold = themeColour("--cold"); ramp.hot = themeColour("--hot");
  const other = name === "dark" ? "light" : "dark"; $("theme").textContent = other; $("theme").setAttribute("aria-label", `${other} colours`);
}
function redraw() { figures.forEach(f => f.update()); tokens(); lens(); }
function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const [id, found] = fromAddress(); Object.assign(state, found); section = id && $(id) ? id : "";
  training(); spectra(); tokenPanel(); lensPanel(); attentionPanel(); motionPanel(); depthPanel(); controls(); contents();
  $("theme").onclick = () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); redraw(); };
  $("link").onclick = async () => { write(); try { await navigator.clipboard.writeText(location.href); speak("link copied"); $("link").textContent = "copied"; } catch (error) { $("link").textContent = "see the address"; } setTimeout(() => { $("link").textContent = "copy link"; }, 2000); };
  let before = null;
  addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; $("configuration").open = true; setTheme("light"); redraw(); });
  addEventListener("afterprint", () => { if (before) setTheme(before); redraw(); });
  addEventListener("hashchange", () => { const [to, now] = fromAddress(); set({ ...START, ...now }); if (to && $(to)) { section = to; $(to).scrollIntoView(); } });
  if (section) $(section).scrollIntoView();
}
start();
