"""Each tutorial runs from its first cell to its last, as it stands but for its settings, in an empty folder."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
SIZE = "--model.hidden_dim 16 --trainer.train_batch_size 4 --trainer.max_eval_batches 1"
GPT2 = "{type: gpt2, hidden_dim: 16, num_heads: 4, num_layers: 2, max_seq_len: 64}"
HYBRID = (
    "{type: neuralode, max_seq_len: 64, hidden_dim: 16, prelude_layers: 1, coda_layers: 1, weights: {type: constant},"
    " block: {type: gpt2, num_heads: 2}, depth: {steps: 2, endpoint: left}, control: {dim: 2, alpha: 0.1}}"
)
# Smaller values of the settings in the first code cell of each.
SMALL = {
    "1_train": {"STEPS": 4, "SIZE": SIZE},
    "2_depths": {"STEPS": 4, "SIZE": SIZE, "DEPTHS": "3,6", "BATCHES": 1},
    "3_lift": {"STEPS": 4, "HEALING": 3, "LAYERS": 6, "MODEL": GPT2.replace("layers: 2", "layers: 6"), "BATCHES": 1},
    "4_control": {"STEPS": 4, "MODEL": HYBRID, "DOCUMENTS": 40, "TOKENS": 4},
    "5_analyse": {"STEPS": 4, "SIZE": SIZE, "GPT2": GPT2, "EXPONENTS": 2},
    "6_scale": {"STEPS": 2},
}


def code(notebook: Path) -> list[str]:
    """The code cells."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def settings(cell: str) -> dict[str, ast.expr]:
    return {node.targets[0].id: node.value for node in ast.parse(cell).body if isinstance(node, ast.Assign)}


def as_python(cells: list[str], values: dict) -> str:
    """A program that does what Jupyter would: `!command` with `{name}` in it is run by a shell."""
    head = [cells[0], *(f"{name} = {value!r}" for name, value in values.items())]
    shell = lambda m: f"{m[1]}_shell(f{m[2]!r})"  # noqa: E731
    body = [re.sub(r"^( *)!(.*)$", shell, cell, flags=re.MULTILINE) for cell in cells[1:]]
    return "import subprocess\n_shell = lambda line: subprocess.run(line, shell=True, check=True)\n" + "\n".join(
        [*head, *body]
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorials_are_kept_without_outputs(path):
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert notebook["cells"][0]["source"][0].startswith("# ")
    names = settings(code(path)[0])
    assert set(SMALL[path.stem]) <= set(names), "the test makes small what the first cell sets"
    used = "\n".join(code(path)[1:])
    assert all(re.search(rf"\b{name}\b", used + code(path)[0].split(name, 1)[1]) for name in names)


def test_every_tutorial_has_small_settings():
    assert [path.stem for path in NOTEBOOKS] == list(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorials_run(path, tmp_path):
    command = tmp_path / "bin" / "qkvflow"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "qkvflow_command.py"} "$@"\n')
    command.chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "tutorial.py").write_text(as_python(code(path), SMALL[path.stem]))
    environment = os.environ | {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "Agg",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "tutorial.py")],
        cwd=tmp_path / "work",
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
