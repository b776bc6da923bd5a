"""What mkdocs does besides: pages from files that live elsewhere, notebooks and modules as pages, formulas as MathML.

The start page is the README; changelog and contributing are the files of the repository. The reference has a page for
each package, with all its modules. Links from docs/ to files outside of it lead to copies in the site. Formulas need no
script of the network: MathML is part of every browser.
"""

import ast
import json
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "qkvflow"
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
_OUTSIDE = re.compile(r"(\]\()\.\./((?:experiments|qkvflow|tests|configs)/[^)#\s]*)")
_NOTEBOOK = re.compile(r"(\]\([^):\s]*)\.ipynb(\)|#)")  # a page of the site, a file elsewhere
_FIRST = (
    "models",
    "weights",
    "blocks",
    "depth",
    "lens",
    "runs",
    "training",
    "generation",
    "serving",
    "analysis",
    "data",
)
_TO_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation gets all pages of the reference, the most used first."""
    names = sorted(set(reference()) - {"index"}, key=lambda name: (_FIRST.index(name) if name in _FIRST else 99, name))
    pages = next(entry["Reference"] for entry in config.nav or [] if "Reference" in entry)
    pages += [{name: f"reference/{name}.md"} for name in names]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures that docs/ does not hold."""
    added: dict[str, str | bytes] = {name: _page((ROOT / source).read_text()) for name, source in PAGES.items()}
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            added[file.src_uri.replace(".ipynb", ".md")] = from_notebook(json.loads(file.content_string))
    added |= {f"reference/{name}.md": text for name, text in reference().items()}
    texts = [*added.values(), *(file.content_string for file in files if file.src_uri.endswith(".md"))]
    outside = {path for text in texts if isinstance(text, str) for _, path in _OUTSIDE.findall(text)}
    outside |= {path for text in texts if isinstance(text, str) for path in re.findall(r"\]\(repo/([^)#\s]*)", text)}
    for path in sorted(outside):
        source = ROOT / path
        if source.suffix == ".md":  # with its pictures
            added[f"repo/{path}"] = _bare_links(source.read_text(), source)
            pictures = sorted(source.parent.glob("*.png"))
        else:
            pictures = [source] if source.is_file() else []
        added |= {f"repo/{p.relative_to(ROOT).as_posix()}": p.read_bytes() for p in pictures}
    for name, content in added.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    """Links to files outside of docs/ lead to their copies, those to notebooks to their pages; lists of files come last
    in the search."""
    if page.file.src_uri == "code.md" or page.file.src_uri.startswith("repo/"):
        page.meta["search"] = {"boost": 0.1}
    markdown = _NOTEBOOK.sub(r"\1.md\2", markdown)
    return _OUTSIDE.sub(r"\1repo/\2", markdown)


def on_page_content(html: str, **_) -> str:
    """LaTeX becomes MathML."""
    html = re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>', lambda m: _math(m[1], "inline"), html, flags=re.DOTALL
    )
    return re.sub(
        r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', lambda m: _math(m[1], "block"), html, flags=re.DOTALL
    )


def on_post_page(output: str, page: Page, **_) -> str:
    """The script that lets search work from files is our own copy, not one of the network."""
    return output.replace("https://unpkg.com/iframe-worker/shim", get_relative_url("assets/worker.js", page.url))


def on_post_template(output_content: str, **_) -> str:
    """The page of missing pages needs no search from files."""
    return output_content.replace('<script src="https://unpkg.com/iframe-worker/shim"></script>', "")


def reference() -> dict[str, str]:
    """The pages of the reference, by name: one for each package, one for the single modules, and an index."""
    packages = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent.parent == PACKAGE)
    pages = {folder.name: _package_page(folder) for folder in packages}
    singles = sorted(path for path in PACKAGE.glob("*.py") if not path.name.startswith("__"))
    pages["modules"] = "# Single modules\n\n" + "\n\n".join(f"::: qkvflow.{path.stem}" for path in singles) + "\n"
    rows = [
        f"| [`{_dotted(folder)}`]({folder.name}.md) | {_first_line(folder / '__init__.py')} |" for folder in packages
    ]
    rows += [f"| [`qkvflow.{path.stem}`][qkvflow.{path.stem}] | {_first_line(path)} |" for path in singles]
    head = "# Reference\n\n`import qkvflow` registers `type: neuralode` with Levanter. " + _exports(PACKAGE)
    pages["index"] = f"{head}\n\n## Packages and modules\n\n| module | |\n|---|---|\n" + "\n".join(rows) + "\n"
    return pages


def exported(folder: Path) -> dict[str, str]:
    """The public names of a package that come from its modules: name -> dotted path of what it is."""
    found = {}
    for node in ast.parse((folder / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qkvflow"):
            for alias in node.names:
                name = alias.asname or alias.name
                if not name.startswith("_") and f"{node.module}.{alias.name}" != "qkvflow.interrupts.imports_begin":
                    found[name] = f"{node.module}.{alias.name}"
    return dict(sorted(found.items()))


def _package_page(folder: Path) -> str:
    names = _exports(folder)
    modules = [path for path in sorted(folder.rglob("*.py")) if not path.name.startswith("__")]
    head = f"# {_dotted(folder)}\n\n{_first_line(folder / '__init__.py')}\n\n"
    return head + names + "\n\n".join(f"::: {_dotted(path.with_suffix(''))}" for path in modules) + "\n"


def _exports(folder: Path) -> str:
    names = exported(folder)
    if not names:
        return ""
    links = ", ".join(
        f"[`{name}`][{path}]" if path != f"{_dotted(folder)}.{name}" else f"[`{name}`]({name}.md)"
        for name, path in names.items()
    )
    return f"Exports {links}.\n\n"


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).parts)


def _first_line(path: Path) -> str:
    return (
        (ast.get_docstring(ast.parse(path.read_text())) or "")
        .partition("\n\n")[0]
        .replace("\n", " ")
        .replace("|", "\\|")
    )


def from_notebook(notebook: dict) -> str:
    """A notebook without outputs as a page: text as it is, code in fences."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def _math(latex: str, display: str) -> str:
    unescaped = latex.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return convert(unescaped.strip(), display=display)


def _page(text: str) -> str:
    """A file of the root as a page of docs/: its links, seen from there."""
    for source, page in _TO_PAGES.items():
        text = text.replace(f"]({source})", f"]({page})")
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\[([^]]*)\]\((?:configs/[^)]*|CITATION\.cff|LICENSE)\)", r"`\1`", text)


def _bare_links(text: str, source: Path) -> str:
    """Of a page that is shown where its neighbours are not: links stay that lead to pictures beside it."""

    def keep(match: re.Match) -> str:
        target = match[2].split("#")[0]
        is_picture = target.endswith(".png") and (source.parent / target).is_file() and "/" not in target
        return match[0] if is_picture or "://" in target or not target else match[1]

    return re.sub(r"\[([^]]*)\]\(([^)\s]*)\)", keep, text)
