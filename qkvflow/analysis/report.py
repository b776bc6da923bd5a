"""One page that shows a model's inner dynamics: a single HTML file that needs no network.

    python -m qkvflow.analysis.report --run runs/quickstart [--compare runs/other ...] [--text "..." ...]

Training curves, parameters, eigenvalues over t, sensitivity to the tokens of texts, logit lens, motion of the states,
and the depth sweep and the continuity of `eval_lm` where there are some. Written to `<run>/analysis/report.html`.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from qkvflow.analysis import page
from qkvflow.analysis.opening import label, opened, output_file, texts_of
from qkvflow.cli import run_program
from qkvflow.config import Text
from qkvflow.errors import UserError
from qkvflow.runs import load_run
from qkvflow.runs.load import Run

LARGEST = 5_000_000  # bytes of a page


@dataclass
class ReportConfig:
    """
    Attributes:
        run: the run directory.
        compare: other run directories, shown beside it.
        checkpoint_step: N of the checkpoint step-N of `run`; the newest by default, as for the others.
        text: texts to look at, several may be given; by default the beginning of the run's validation text.
        k: exponents of the whole sequence.
        draws: of fresh models to compare spectra with; 0 for none.
        out: the file; `<run>/analysis/report.html` by default.
        control: that models with control hear, `[0, 1]`; zero by default.
    """

    run: str
    compare: list[Text] | None = None
    checkpoint_step: int | None = None
    text: list[Text] | None = None
    k: int = 6
    draws: int = 3
    out: str | None = None
    control: list[float] | None = None


def main(config: ReportConfig) -> Path:
    """Computes and writes the page; returns its path."""
    for name, least in (("k", 1), ("draws", 0)):
        if getattr(config, name) < least:
            raise UserError(f"{name} must be at least {least}, got {getattr(config, name)}")
    with opened(config.run, config.checkpoint_step) as (first, progress):
        runs = [first]
        for path in config.compare or []:
            with progress.phase(f"Loading {path}"):
                runs.append(load_run(path))
        target = output_file(first, config.out, "report.html")
        # All texts are checked for all runs before the work begins.
        first_texts = texts_of(first, config.text, control=config.control)
        chosen = [text.text for text in first_texts[1]]
        texts = [first_texts, *(texts_of(run, chosen, control=_heard(run, config.control)) for run in runs[1:])]
        total = len(runs) * (3 + 4 * len(chosen))
        with progress.count("Analysing") as tick:
            done = 0

            def step() -> None:
                nonlocal done
                done += 1
                tick(done, total)

            data = {
                "runs": [
                    _run_data(run, name, *own, config, step)
                    for run, name, own in zip(runs, _names(runs), texts, strict=True)
                ]
            }
            tick(total, total)
        html = page.render(data)
        if len(html.encode()) > LARGEST:
            raise UserError(
                f"the page would have {len(html.encode()) / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}: give shorter or"
                " fewer texts, or compare fewer runs"
            )
        target.write_text(html, encoding="utf-8")
    print(f"Written to {target} ({len(html.encode()) / 1e6:.2f} MB): open it in a browser")
    return target


def _run_data(run: Run, name: str, reading, texts, config: ReportConfig, step) -> page.Data:
    def decode(token: int) -> str:
        return label(run.tokenizer, token)

    return page.describe_run(run, name) | {
        "curves": page.curves(run),
        "spectra": page.spectra(run, config.draws, step),
        "texts": [page.text_data(reading, text, decode, config.k, step) for text in texts],
        "sweep": page.depth_sweep(run),
        "continuity": page.continuity(run),
    }


def _heard(run: Run, control: list[float] | None) -> list[float] | None:
    """The control for a run that is compared: none for a model that hears none."""
    return control if getattr(run.model.config, "control", None) is not None else None


def _names(runs: list[Run]) -> list[str]:
    """The folders' names, with as much of the path as tells them apart."""
    paths = [PurePosixPath(str(run.directory.place.resolved())) for run in runs]
    for depth in range(1, max(len(p.parts) for p in paths) + 1):
        names = ["/".join(p.parts[-depth:]) for p in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]  # the same run twice


if __name__ == "__main__":
    run_program(main, ReportConfig)
