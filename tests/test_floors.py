"""The floors of the house: lower modules never import higher ones, and the three rooms do not know each other."""

import ast
import importlib.util
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "qkvflow"
ROOMS = {"weights", "blocks", "depth"}
PROGRAMS = {"train_lm", "finetune_lm", "eval_lm", "describe", "sample_lm", "serve_lm", "convert", "lift", "analysis"}
# Each part may import from qkvflow only what is listed here.
# What knows nothing of models.
GROUND = {"errors", "units", "files", "places", "checksums", "locks", "ranges", "named", "inside", "interrupts"}
MAY_IMPORT = {
    "errors": set(),
    "units": set(),
    "ranges": {"errors"},
    "named": set(),
    "inside": {"errors"},
    "interrupts": set(),
    "locks": set(),
    "files": {"errors"},
    "places": {"files"},
    "checksums": {"places"},
    "axes": set(),
    "time": {"axes", "errors"},
    "weights": {"axes", "time", *GROUND},
    "blocks": {"axes", *GROUND},
    "depth": {"axes", "time", *GROUND},
    "models": {"axes", "time", *GROUND, *ROOMS},
    "official": {"axes", *GROUND, "models", *ROOMS},
    "config": GROUND,
    "data": {"axes", *GROUND},
    "hub": {*GROUND, "models", *ROOMS, "config", "data"},
    "tracking": GROUND,
    "progress": GROUND,
    "runs": {"axes", *GROUND, "weights", "models", "official", "config", "data", "tracking", "hub"},
    "training": {"axes", *GROUND, "weights", "models", "config", "data", "tracking", "progress", "runs"},
    "generation": {"axes", *GROUND, "models", "blocks", "depth", "data", "runs"},
    "serving": {*GROUND, "generation"},
    "lens": {"axes", *GROUND, "models", "blocks", "depth"},
    "evaluation": {*GROUND, "blocks", "depth", "models", "progress", "runs", "generation"},
    "meshes": {*GROUND, "models", "config", "runs", "training", "generation"},
    "cli": {*GROUND, "config"},  # above all that works: nothing but programs speaks to a terminal
    "__init__": {"interrupts", "models", "generation"},
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
    if path.name == "__main__.py":  # the program of a package
        part = "train_lm"
    others = imports(path) - {part}
    if part in PROGRAMS:
        assert not others & PROGRAMS
    else:
        assert part in MAY_IMPORT, f"say in this test where {part} stands"
        assert others <= MAY_IMPORT[part], f"{part} must not import {others - MAY_IMPORT[part]}"


NAMES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in MODULES}


def modules_imported(path: Path) -> set[str]:
    """Names of the modules that a module imports anywhere, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name if (name := f"{node.module}.{a.name}") in NAMES else node.module for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found & set(NAMES)


def test_no_module_imports_itself_through_others():
    graph = {name: modules_imported(path) - {name} for name, path in NAMES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_the_floors_have_an_order():
    TopologicalSorter(MAY_IMPORT).prepare()


@pytest.mark.parametrize("path", MODULES, ids=[str(p.relative_to(PACKAGE)) for p in MODULES])
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", MODULES, ids=[str(p.relative_to(PACKAGE)) for p in MODULES])
def test_only_programs_write_to_the_terminal(path):
    """What is below them returns what is to be said, writes to a stream that it is given, or warns (`Notice`)."""
    if part_of(path) in PROGRAMS | {"cli"} or path.name == "__main__.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Name) and node.id == "print"), f"{path}:{node.lineno}"
        stream = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys"
        assert not (stream and node.attr in ("stdout", "stderr")), f"{path}:{node.lineno}"


def test_depth_knows_no_language_model():
    for path in (PACKAGE / "depth").glob("*.py"):
        assert "levanter" not in path.read_text()


def test_the_tree_in_the_docs_is_that_of_the_code():
    spec = importlib.util.spec_from_file_location("tree", PACKAGE.parent / "docs" / "tree.py")
    tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tree)
    assert tree.TARGET.read_text() == tree.tree(), "out of date: run `python docs/tree.py`"
