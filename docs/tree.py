"""Writes docs/code.md: the tree of the project with one line for each file, its module's own first sentence.

    python docs/tree.py

`make check` says when it is out of date.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "code.md"
_OTHERS = {
    "qkvflow_command.py": "the command `qkvflow`, beside the package, which imports JAX",
    "setup.py": "the packages of a wheel, which carries `configs/` too; the rest is in pyproject.toml",
    "tests/": "tests, in the package's folders; support: shared helpers, golden: arrays of the official code",
    "configs/": "configurations, each parsed and built by a test",
    "docs/": "what you read here",
    "constraints.txt": "the exact versions of all dependencies",
}
_HEAD = """# The code

The equation is the architecture: `weights` say what W(t) is, `blocks` what B is, `depth` how to travel from t = 0
to t = 1. These three packages never import each other; they meet in `models`. Levels, each importing only from earlier
ones: `axes`, `time` < `weights`, `blocks`, `depth` < `models` < `runs` < programs < `experiments`
(tests/test_floors.py).

| to add | look at |
|---|---|
| a block B(x; W) | `qkvflow/blocks/config.py`, then `gpt2.py` |
| weights W(t) | `qkvflow/weights/config.py`, then `galerkin.py` |
| a solver | `qkvflow/depth/solvers.py` |
| an input of blocks | `qkvflow/blocks/inputs.py` |
| a study | `experiments/README.md` |

"""


def tree() -> str:
    """The whole page."""
    lines = []
    for package in ("qkvflow", "experiments"):
        lines += _folder(ROOT / package, 0)
    lines += [f"{name:<28} {text}" for name, text in _OTHERS.items()]
    return _HEAD + "```\n" + "\n".join(lines) + "\n```\n"


def _folder(folder: Path, depth: int) -> list[str]:
    indent = "  " * depth
    lines = [f"{indent + folder.name + '/':<28} {_sentence(folder / '__init__.py')}".rstrip()]
    modules = sorted(path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py"))
    lines += [f"{indent + '  ' + path.name:<28} {_sentence(path)}".rstrip() for path in modules]
    for inner in sorted(path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))):
        lines += _folder(inner, depth + 1)
    return lines


def _sentence(path: Path) -> str:
    if not path.is_file():
        return ""
    return next(iter((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()), "")


if __name__ == "__main__":
    TARGET.write_text(tree(), encoding="utf-8")
