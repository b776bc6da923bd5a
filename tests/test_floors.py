"""The floors of the house: lower modules never import higher ones, and the three rooms do not know each other."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "qkvflow"
ROOMS = {"weights", "blocks", "depth"}
PROGRAMS = {"train_lm", "finetune_lm", "eval_lm", "describe", "sample_lm", "serve_lm", "analysis"}
# Each part may import from qkvflow only what is listed here.
MAY_IMPORT = {
    "errors": set(),
    "axes": set(),
    "time": {"axes"},
    "units": set(),
    "weights": {"axes", "time", "errors"},
    "blocks": {"axes", "errors"},
    "depth": {"axes", "time", "errors"},
    "models": {"axes", "time", "errors", *ROOMS},
    "generation": {"axes", "errors", "models", "blocks", "depth", "data", "runs"},
    "serving": {"errors", "generation"},
    "official": {"axes", "errors", "models", *ROOMS},
    "data": {"axes", "errors"},
    "cli": {"errors", "models"},
    "tracking": {"errors"},
    "progress": {"errors"},
    "runs": {"axes", "errors", "weights", "models", "official", "data", "cli", "tracking", "units"},
    "training": {"axes", "errors", "weights", "models", "data", "cli", "tracking", "progress", "runs"},
    "meshes": {"errors", "cli", "runs", "training", "units"},
    "__init__": {"models", "generation"},
}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "qkvflow" else [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("qkvflow.")}
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[str(p.relative_to(PACKAGE)) for p in MODULES])
def test_imports_go_downwards(path):
    part = part_of(path)
    others = imports(path) - {part}
    if part in PROGRAMS:
        assert not others & PROGRAMS
    else:
        assert part in MAY_IMPORT, f"say in this test where {part} stands"
        assert others <= MAY_IMPORT[part], f"{part} must not import {others - MAY_IMPORT[part]}"


@pytest.mark.parametrize("path", MODULES, ids=[str(p.relative_to(PACKAGE)) for p in MODULES])
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 400


def test_depth_knows_no_language_model():
    for path in (PACKAGE / "depth").glob("*.py"):
        assert "levanter" not in path.read_text()


def test_readme_shows_every_file():
    """README's tree has a line for each module, with the module's own first sentence."""
    readme = (PACKAGE.parent / "README.md").read_text()
    for path in MODULES:
        if path.name == "__init__.py":
            continue
        sentence = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        assert f"{path.name} " in readme, path.name
        assert sentence in readme, f"{path}: {sentence}"
