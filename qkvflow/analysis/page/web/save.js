/* Every figure can be kept: as PNG, as SVG, and its numbers as CSV. */
const STYLED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "font-weight", "text-anchor"];
function standalone(node) { /* a copy that carries its own styles, on the card's colour */
  const copy = node.cloneNode(true), box = node.viewBox.baseVal;
  const own = [node, ...node.querySelectorAll("*")], copies = [copy, ...copy.querySelectorAll("*")];
  own.forEach((n, i) => { const style = getComputedStyle(n); copies[i].removeAttribute("class"); if (n.tagName === "image") return; for (const key of STYLED) copies[i].setAttribute(key, style.getPropertyValue(key)); copies[i].removeAttribute("style"); });
  const edge = 10, width = box.width + 2 * edge, height = box.height + 2 * edge;
  copy.setAttribute("xmlns", SVG); copy.setAttribute("viewBox", `${-edge} ${-edge} ${width} ${height}`); copy.setAttribute("width", width); copy.setAttribute("height", height); copy.removeAttribute("tabindex");
  const back = svg("rect", { x: -edge, y: -edge, width, height, fill: heat(0).back });
  copy.prepend(back);
  return copy;
}
function pictured(host) { /* tokens and tables as SVG: each cell a rectangle and its text, where it stands */
  const scrolled = host.scrollLeft; host.scrollLeft = 0;
  const cells = [...host.querySelectorAll(".token, td, th, .whose")], base = host.getBoundingClientRect();
  const boxes = cells.map(c => c.getBoundingClientRect());
  const right = Math.max(...boxes.map(b => b.right - base.left), 10), low = Math.max(...boxes.map(b => b.bottom - base.top), 10);
  const root = svg("svg", { viewBox: `0 0 ${Math.ceil(right) + 8} ${Math.ceil(low) + 8}` });
  cells.forEach((cell, i) => {
    const style = getComputedStyle(cell), b = [...cell.getClientRects()][0] || boxes[i];
    if (cell.style.background) svg("rect", { x: b.left - base.left, y: b.top - base.top, width: b.width, height: b.height, fill: style.backgroundColor }, root);
    svg("text", { x: b.left - base.left + parseFloat(style.paddingLeft), y: b.top - base.top + b.height / 2 + 4.5, class: "mono", style: `fill: ${style.color}`, "font-weight": style.fontWeight }, root, cell.textContent.replace(/\n/g, ""));
  });
  root.style.cssText = "position: absolute; left: -99999px"; document.body.append(root);
  const copy = standalone(root); root.remove(); host.scrollLeft = scrolled; return copy;
}
function download(name, kind, content) {
  const link = el("a", { download: `${name}.${kind}`, href: URL.createObjectURL(content) });
  document.body.append(link); link.click(); link.remove(); setTimeout(() => URL.revokeObjectURL(link.href), 5000);
}
const quoted = v => v === null || v === undefined ? "" : typeof v === "number" ? String(v) : '"' + String(v).replace(/"/g, '""') + '"';
const csv = rows => rows.map(r => r.map(quoted).join(",")).join("\r\n") + "\r\n";
const svgText = node => legal(new XMLSerializer().serializeToString(node));
function png(node, done) {
  const image = new Image(), width = +node.getAttribute("width"), height = +node.getAttribute("height"), factor = Math.min(2, 8000 / Math.max(width, height));
  image.onload = () => {
    const canvas = el("canvas", { width: width * factor, height: height * factor });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height); canvas.toBlob(done, "image/png");
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svgText(node));
}
/* get: () => {svg, csv}: what is shown now. */
function saveMenu(name, get) {
  const box = el("details", {}), menu = el("div", { className: "save" }, box);
  const button = (kind, act) => el("button", { type: "button", "aria-label": `${name} as ${kind}`, onclick: act }, kind);
  const file = name.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60);
  box.append(el("summary", { "aria-label": `save ${name}` }, "save"),
    button("PNG", () => png(get().svg(), blob => download(file, "png", blob))),
    button("SVG", () => download(file, "svg", new Blob([svgText(get().svg())], { type: "image/svg+xml" }))),
    button("CSV", () => download(file, "csv", new Blob([csv(get().csv())], { type: "text/csv" }))));
  return menu;
}
