"""Builds one HTML file from the parts in `web` and the data: it needs no other files and no network."""

import json
from importlib.resources import files

from qkvflow.analysis.page.numbers import Data

STYLES = ("style.css",)
SCRIPTS = (
    "base.js",
    "chart.js",
    "save.js",
    "state.js",
    "training.js",
    "plane.js",
    "tokens.js",
    "lens.js",
    "attention.js",
    "motion.js",
    "depth.js",
    "main.js",
)


def render(data: Data) -> str:
    """The page. Names and texts stay data: they are passed as JSON and only displayed as text."""
    web = files("qkvflow.analysis.page") / "web"

    def read(names: tuple[str, ...]) -> str:
        return "\n".join((web / name).read_text(encoding="utf-8") for name in names)

    # Inside <script>, "</" could end the script.
    content = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    html = read(("page.html",)).replace("@STYLE@", read(STYLES)).replace("@SCRIPT@", read(SCRIPTS))
    return html.replace("@DATA@", content)
