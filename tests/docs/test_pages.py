"""What README and docs/ say: links lead somewhere, programs in Python run, commands exist, the reference is whole."""

import ast
import importlib
import itertools
import re
import runpy
import shlex
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest
import yaml

import qkvflow
from qkvflow.cli import parse
from qkvflow.cli.keys import sections
from qkvflow.config.yaml_file import shipped
from qkvflow.runs.config import TrainConfig
from qkvflow_command import COMMANDS, train_words

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
MADE = {"index.md", "changelog.md", "contributing.md"}  # by docs/hooks.py, from the files of the root


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(path):
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        if file.startswith("tutorials/") or path.parent.name == "tutorials":
            found = found.with_suffix(".ipynb") if not found.exists() else found  # a page of the site
        if path.parent == DOCS and file in MADE:
            continue
        if not found.exists() or (anchor and anchor not in anchors(found.read_text())):
            dead.append(target)
    assert not dead


WRITTEN = [*PAGES, *sorted((ROOT / "experiments").rglob("*.md"))]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_markdown_reads_as_it_is_meant(path):
    """No wrapped line begins like an item of a list ("= 64 /\\n256. The"), and rows have the cells of their head."""
    lines = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE).split("\n")
    number, wrong = 0, []  # of the last item of a numbered list
    for i, (before, line) in enumerate(itertools.pairwise(["", *lines])):
        if item := re.match(r" *(\d+)[.)] ", line):
            if before.strip() and (number == 0 or int(item[1]) != number + 1):
                wrong.append(line)
            number = int(item[1])
        elif not line.strip():
            number = 0
        if re.fullmatch(r"[ |:-]+\|[ |:-]*", line) and "-" in line:
            rows = itertools.takewhile(lambda row: row.lstrip().startswith("|"), [before, *lines[i:]])
            wrong += [row for row in rows if len(cells(row)) != len(cells(line))]
    assert not wrong


def cells(row: str) -> list[str]:
    return re.split(r"(?<!\\)\|", row)


def test_the_readme_is_short_and_links_all_guides():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.encode()) <= 9_000
    guides = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert guides <= set(re.findall(r"\(docs/(\w+\.md)\)", readme))


def test_everything_is_in_the_navigation():
    """But for the pages of the reference, which docs/hooks.py makes of what packages there are."""
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"([\w/]+\.md)\b", text.partition("\nnav:")[2]))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    notebooks = {path.relative_to(DOCS).with_suffix(".md").as_posix() for path in DOCS.rglob("*.ipynb")}
    assert named == pages | notebooks | MADE | {"reference/index.md"}


def test_what_qkvflow_exports_is_documented():
    names = [name for name in vars(qkvflow) if not name.startswith("_") and name != "imports_begin"]
    assert "generate" in names
    for name in names:
        assert (getattr(qkvflow, name).__doc__ or "").strip(), name


def test_site_needs_no_network():
    text = "\n".join(path.read_text() for path in (ROOT / "mkdocs.yml", DOCS / "assets" / "site.css"))
    assert "font: false" in text
    assert "http" not in re.sub(r"https?://(?:keepachangelog|semver|openreview|arxiv)\S*", "", text)


def test_recipes_run():
    """One program; the model that it builds is causal and reads as the laws say."""
    scope: dict = {}
    for code in blocks(DOCS / "recipes.md", "python"):
        exec(compile(code, "recipes.md", "exec"), scope)
    model, tokens = scope["model"], scope["tokens"]
    changed = tokens.updated_slice({"position": 7}, hax.named(jax.numpy.array([[100]]), ("batch", "position")))
    one, other = (np.asarray(model(t).rearrange(("batch", "position", "vocab")).array) for t in (tokens, changed))
    np.testing.assert_array_equal(one[:, :7], other[:, :7])
    assert np.abs(one[:, 7] - other[:, 7]).max() > 0
    weights = model.transformer.flow.weights
    start, end, rate = (
        np.asarray(m.attn.c_attn.weight.array)
        for m in (scope["at"](weights, 0.0), scope["block"], scope["rate"](weights, 0.3))
    )
    np.testing.assert_allclose(end, start / 2, rtol=1e-6)
    np.testing.assert_allclose(rate, end - start, rtol=1e-5)
    both = np.asarray(scope["at"](weights, [0.0, 1.0]).attn.c_attn.weight.array)
    np.testing.assert_array_equal(both, np.stack([start, end]))
    fine = model.with_depth(scope["DepthConfig"](solver="dopri8", steps=64))(tokens).array
    errors = [np.abs(_reading(scope, steps) - fine).max() for steps in (32, 64)]
    assert errors[1] < errors[0] / 4  # order 3: about 8
    text = qkvflow.generate(model, tokens, max_new_tokens=4)
    assert bool((text == qkvflow.generate(model, tokens, max_new_tokens=4, use_cache=False)).all())


def _reading(scope: dict, steps: int):
    """Logits of the recipes' model by the recipes' solver."""
    return scope["model"].with_depth(scope["DepthConfig"](solver="kutta3", steps=steps))(scope["tokens"]).array


COMMAND_PAGES = [path for path in PAGES if path.name != "CHANGELOG.md"]
WORD = re.compile(r"^(?:\.venv/bin/)?qkvflow (\w+)(.*)$", re.MULTILINE)


@pytest.mark.parametrize("path", COMMAND_PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_exist_and_their_keys_are_keys(path):
    code = "\n".join(blocks(path, "")).replace("\\\n", " ")
    for name, rest in WORD.findall(code):
        assert name in COMMANDS, f"qkvflow {name}"
        cls = _config_class(name)
        for flag in re.findall(r"--([\w.]+)", rest.partition(" # ")[0]):
            _check_flag(name, cls, flag)


def _config_class(name: str) -> type:
    module = importlib.import_module(COMMANDS[name].module)
    return importlib.import_module("typing").get_type_hints(module.main)["config"]


def _check_flag(name: str, cls: type, flag: str) -> None:
    if flag in ("help", "config_path", "key.subkey") or name == "describe":
        return
    parent = flag.rpartition(".")[0]
    owner = {"eval": "data", "lift": "data"}.get(name)
    if owner and parent == owner:  # keys of the run's own data
        cls = TrainConfig
    text = sections(cls, parent) if parent else importlib.import_module("qkvflow.cli.keys").key_table(cls)
    known = f"--{flag} " in text or f"--{flag}\n" in text
    assert known or parent.endswith("axes"), f"qkvflow {name} --{flag}"


def test_the_yaml_of_the_pages_is_read():
    """A `model:` in README and docs is a model, whole configurations are configurations."""
    for path in (ROOT / "README.md", DOCS / "train.md"):
        found = [yaml.safe_load(text) for text in blocks(path, "yaml")]
        assert found
        for content in found:
            keys = [
                w
                for key, value in content.items()
                for w in (f"--{key}", yaml.safe_dump(value, default_flow_style=True).strip("\n. "))
            ]
            assert parse(TrainConfig, keys)[0].model.hidden_dim == 768


def test_configurations_of_the_table_exist():
    readme = (ROOT / "README.md").read_text()
    for pattern in re.findall(r"`configs/([^`]*)`", readme):
        for name in _expanded(pattern):
            assert [p for p in (ROOT / "configs").glob(name)], name
            if "*" not in name:
                assert name.removesuffix(".yaml") in shipped()


def _expanded(pattern: str) -> list[str]:
    choice = re.search(r"\{([^}]*)\}", pattern)
    return [pattern.replace(choice[0], one) for one in choice[1].split(",")] if choice else [pattern]


def test_python_of_the_pages_is_valid():
    for path in PAGES:
        for code in blocks(path, "python"):
            ast.parse(code)


def test_quickstart_words_are_those_of_make():
    make = (ROOT / "Makefile").read_text()
    assert "qkvflow.train_lm " + shlex.join(train_words([])) in make


def test_the_figures_are_drawn_from_the_committed_results(tmp_path):
    """Pixel for pixel, with the pinned matplotlib."""
    runpy.run_path(str(DOCS / "figure.py"))["save"](tmp_path)
    for name in ("flow.png", "depths.png", "anytime.png"):
        assert (tmp_path / name).read_bytes() == (DOCS / "assets" / name).read_bytes()
