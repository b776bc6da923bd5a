"""One page on a model's internal dynamics: a single HTML file that needs no network.

    qkvflow report --run runs/quickstart [--compare runs/other ...] [--text "..." ...]

Eigenvalues over t, sensitivity to the tokens of texts, logit lens, attention and motion of the states, each over the
run's checkpoints and compared with shuffled text and untrained models; training curves; the depth sweep, exits and
continuity of `qkvflow eval` if available. Written to `<run>/analysis/report.html`.
"""

import dataclasses
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path, PurePosixPath

import numpy as np

from qkvflow.analysis.opening import EncodedText, label, opened, output_file, texts_of, writing
from qkvflow.analysis.page import findings, render, runs, spectra, texts
from qkvflow.analysis.page.numbers import Data, Step, rounded
from qkvflow.analysis.reading import Reading, read
from qkvflow.analysis.spectral import families, products, times_of
from qkvflow.checksums import damage_of
from qkvflow.cli import run_program
from qkvflow.config import Text
from qkvflow.errors import Notice, UserError
from qkvflow.generation.vocabulary import Vocabulary
from qkvflow.runs import load_run
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.runs.load import Run

COMFORTABLE = 5  # MB; a browser opens a larger page slowly
MOST_RUNS = 4
_POINTS = 120_000  # eigenvalues of all runs, checkpoints and families combined
_ATTENTION = 1_500_000  # attention values on the whole page


@dataclass
class ReportConfig:
    """
    Attributes:
        run: the run directory, or a Hugging Face folder.
        compare: up to three other run directories, shown in the same charts.
        checkpoint_step: N of the newest checkpoint step-N of `run` to show; the newest by default, as for the others.
        checkpoints: number of checkpoints of each run: the newest and others spread over training.
        times: layer-times of the eigenvalues, `0,0.5,1`, or a number of times spread over [0, 1]; by default the
            training times and others between them. Ordinary layers only have weights at their own times.
        text: texts to analyse, one or several; by default the beginning of the run's validation text.
        outputs: number of tokens that can be selected as the output for the sensitivity.
        k: number of exponents of the whole sequence.
        shuffles: number of shuffled versions of each text to compare with; 0 for none.
        draws: number of untrained models to compare with; 0 for none.
        out: output file; `<run>/analysis/report.html` by default.
        control: control signal for models with control, `[0, 1]`; zero by default.
    """

    run: str
    compare: list[Text] | None = None
    checkpoint_step: int | None = None
    checkpoints: int = 3
    times: int | float | str | list[float] | None = None
    text: list[Text] | None = None
    outputs: int = 3
    k: int = 6
    shuffles: int = 2
    draws: int = 3
    out: str | None = None
    control: list[float] | None = None


@dataclass(frozen=True)
class _Source:
    """A run and what is shown of it.

    Attributes:
        steps: of its checkpoints; the last is the newest, already loaded in `run`.
        files: what other programs have measured and written.
    """

    run: Run
    path: str
    name: str
    steps: Sequence[int]
    times: Sequence[float]
    reading: Reading
    texts: Sequence[EncodedText]
    files: Data

    def at(self, step: int) -> tuple[Run, Reading]:
        if step == self.run.step:
            return self.run, self.reading
        run = load_run(self.path, step)
        return run, dataclasses.replace(read(run.model), inputs=self.reading.inputs)


def main(config: ReportConfig) -> Path:
    """Computes and writes the page; returns its path."""
    for name, least in (("k", 1), ("draws", 0), ("shuffles", 0), ("checkpoints", 1), ("outputs", 1)):
        if getattr(config, name) < least:
            raise UserError(f"{name} must be at least {least}, got {getattr(config, name)}")
    paths = [config.run, *(config.compare or [])]
    if len(paths) > MOST_RUNS:
        raise UserError(f"the page compares at most {MOST_RUNS} runs, got {len(paths)}: remove some from --compare")
    times = times_of(config.times)
    with opened(config.run, config.checkpoint_step) as (first, progress):
        opened_runs = [first]
        for path in paths[1:]:
            with progress.phase(f"Loading {path}"):
                opened_runs.append(load_run(path))
        target = output_file(first, config.out, "report.html")
        sources = _sources(opened_runs, paths, times, config)
        total = sum(_count(source, config) for source in sources)
        with progress.count("Analysing") as tick:
            done = 0

            def step() -> None:
                nonlocal done
                done += 1
                tick(min(done, total), total)

            data: Data = {
                "made": _made(config),
                "runs": [_run_data(source, sources, config, step) for source in sources],
            }
            tick(total, total)
        data["opening"] = findings.opening(data["runs"])
        html = render(data)
        with writing(str(target)):
            target.write_text(html, encoding="utf-8")
        size = len(html.encode()) / 1e6
        if size > COMFORTABLE:
            hint = "use shorter or fewer texts, fewer --checkpoints, or fewer runs in --compare"
            warnings.warn(Notice(f"the page has {size:.1f} MB, and a browser opens it slowly: {hint}"), stacklevel=2)
    print(f"Written to {target} ({size:.2f} MB): open it in a browser")
    return target


def _sources(opened_runs: list[Run], paths: list[str], times, config: ReportConfig) -> list[_Source]:
    """The runs with their texts, times and checkpoints, all checked before computation begins."""
    if times is not None and not any(spectra.has_weights_between(run.model) for run in opened_runs):
        products(opened_runs[0].model, "qk", times)  # the error names the unknown times
    first_reading, first_texts = texts_of(opened_runs[0], config.text, control=config.control)
    chosen, sources = [text.text for text in first_texts], []
    for run, path, name in zip(opened_runs, paths, _names(opened_runs), strict=True):
        control = config.control if not sources else _heard(run, config.control)
        reading, own = (first_reading, first_texts) if not sources else texts_of(run, chosen, control=control)
        steps = [s for s in _spread(_earlier(run), config.checkpoints - 1) if _is_good(run, s)]
        own_times = spectra.layer_times(run.model, times)
        products(run.model, "qk", own_times)  # rejects times outside [0, 1]
        sources.append(_Source(run, path, name, [*steps, run.step], own_times, reading, own, _files(run)))
    return sources


def _files(run: Run) -> Data:
    """Its curves, and its evaluations at other depths, with exits, with other speeds, and as an ODE."""
    return {
        "curves": runs.curves(run),
        "sweep": runs.depth_sweep(run),
        "exits": runs.exits(run),
        "anytime": runs.anytime(run),
        "continuity": runs.continuity(run),
    }


def _run_data(source: _Source, sources: list[_Source], config: ReportConfig, step: Step) -> Data:
    run = source.run
    points = max(1, _POINTS // sum(3 * (len(s.steps) + 1) for s in sources))
    rooms = _attention_rooms(sources)
    data = runs.describe_run(run, source.name) | {
        **source.files,
        "times": rounded(source.times, 4),
        "trained_times": rounded(spectra.spectral.training_times(run.model), 4),
        "texts": [texts.describe_text(text) for text in source.texts],
        "fresh": _fresh(source, config, points, step) if config.draws else None,
    }
    data["snapshots"] = []
    for n in source.steps:
        data["snapshots"].append(_snapshot(source, n, config, data, points, rooms[n == run.step], step))
    data["conclusions"] = {
        "training": findings.of_training(data["curves"], data["uniform"]),
        "depth": findings.of_depth(data["sweep"], data["exits"], data["anytime"]),
    }
    data["vocabulary"] = _vocabulary(run, data)
    return data


def _snapshot(
    source: _Source, n: int, config: ReportConfig, own: Data, points: int, attention: bool, step: Step
) -> Data:
    """All data about one checkpoint."""
    run, reading = source.at(n)
    found: Data = {"step": n, "spectra": spectra.spectra(run.model, source.times, points, step), "texts": []}
    fresh = own["fresh"]
    for family, entry in found["spectra"].items():
        band = fresh and fresh["spectra"][family]["band"]
        entry["conclusion"] = findings.of_spectra(family, entry, band, source.times)
    for number, text in enumerate(source.texts):
        outputs = texts.output_positions(len(text.ids), config.outputs)
        data = texts.text_data(reading, text.ids, outputs, config.k, attention, step)
        data["shuffled"] = [
            texts.null_data(reading, np.append(order.permutation(text.ids[:-1]), text.ids[-1]), config.k, step)
            for order in map(np.random.default_rng, range(config.shuffles))
        ]
        untrained = fresh and fresh["texts"][number]
        describe, shuffled = own["texts"][number], data["shuffled"]
        data["conclusions"] = {
            "tokens": findings.of_tokens(data, text.labels, shuffled),
            "lens": findings.of_lens(data, describe, shuffled, untrained),
            "echo": findings.echo(data, describe, own["tied"], own["around"]),
            "motion": findings.of_motion(data, shuffled, untrained),
            "attention": findings.of_attention(data, texts.uniform_places(len(text.ids)), untrained),
        }
        found["texts"].append(data)
    return found


def _fresh(source: _Source, config: ReportConfig, points: int, step: Step) -> Data:
    """The same data for untrained models with the same configuration."""
    found: Data = {"spectra": spectra.untrained(source.run, source.times, config.draws, points, step)}
    reading = dataclasses.replace(read(spectra.fresh_model(source.run)), inputs=source.reading.inputs)
    found["texts"] = [texts.null_data(reading, text.ids, config.k, step) for text in source.texts]
    return found


def _attention_rooms(sources: list[_Source]) -> dict[bool, bool]:
    """Whether the page has room for the attention maps of the newest checkpoints (True) and of the others (False)."""

    def size(source: _Source) -> int:
        heads = getattr(source.run.config.model, "num_heads", None) or source.reading.model.config.block.num_heads
        return sum(source.reading.steps * heads * len(t.ids) * (len(t.ids) + 1) // 2 for t in source.texts)

    return {
        True: sum(map(size, sources)) <= _ATTENTION,
        False: sum(size(s) * len(s.steps) for s in sources) <= _ATTENTION,
    }


def _vocabulary(run: Run, data: Data) -> dict[str, str]:
    """The text of each token that the lens shows."""
    ids = {i for s in data["snapshots"] for t in s["texts"] for row in t["lens"]["top"] for top in row for i in top}
    vocabulary = Vocabulary(run.tokenizer)
    return {str(i): label(vocabulary, i) for i in sorted(ids)}


def _count(source: _Source, config: ReportConfig) -> int:
    """How often `step` is called for one run."""
    kinds, number = len(families(source.run.model)), len(source.texts)
    each = sum(len(texts.output_positions(len(t.ids), config.outputs)) + 2 + config.shuffles for t in source.texts)
    return len(source.steps) * (kinds + each) + (kinds + number if config.draws else 0)


def _earlier(run: Run) -> list[int]:
    """The checkpoints before the loaded one."""
    steps = [] if run.directory.hub is not None else checkpoint_steps(run.directory.checkpoints)
    return [step for step in steps if step < run.step]


def _is_good(run: Run, step: int) -> bool:
    """Whether a checkpoint is intact; the page leaves out damaged ones."""
    what = damage_of(run.directory.checkpoints / f"step-{step}")
    if what is not None:
        warnings.warn(Notice(f"the checkpoint step-{step} of {run.directory} is left out: {what}"), stacklevel=2)
    return what is None


def _spread(steps: list[int], count: int) -> list[int]:
    """`count` of them, evenly spread and including the first."""
    if count <= 0 or not steps:
        return []
    return [steps[i * len(steps) // count] for i in range(count)] if len(steps) > count else steps


def _made(config: ReportConfig) -> Data:
    """How the page was made: the command, without default values."""
    words = ["python", "-m", "qkvflow.analysis.report"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        words.append(f"--{field.name}")
        if field.name in ("text", "compare"):
            words += value
        else:
            words.append(",".join(map(str, value)) if field.name == "times" and isinstance(value, list) else str(value))
    return {
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "version": version("qkvflow"),
        "command": shlex.join(words),
        "shuffles": config.shuffles,
        "draws": config.draws,
    }


def _heard(run: Run, control: list[float] | None) -> list[float] | None:
    """The control for a run in the comparison: None for a model without control."""
    return control if getattr(run.model.config, "control", None) is not None else None


def _names(opened_runs: list[Run]) -> list[str]:
    """The folder names, with enough of each path to make them unique."""
    paths = [PurePosixPath(str(run.directory.place.resolved())) for run in opened_runs]
    for depth in range(1, max(len(p.parts) for p in paths) + 1):
        names = ["/".join(p.parts[-depth:]) for p in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]  # the same run twice


if __name__ == "__main__":
    run_program(main, ReportConfig)
