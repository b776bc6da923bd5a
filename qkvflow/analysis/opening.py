"""Shared by the analysis programs: opening a run, encoding user texts, writing to its `analysis/` folder."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import haliax as hax
import numpy as np
from levanter.tokenizers import MarinTokenizer
from matplotlib.figure import Figure

import qkvflow as qkvflow  # registers the models
from qkvflow.analysis import figures
from qkvflow.analysis.reading import Reading, read, sequence
from qkvflow.axes import CONTROL
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.errors import UserError
from qkvflow.files import is_unicode, local_path
from qkvflow.generation.vocabulary import Vocabulary
from qkvflow.progress import Progress
from qkvflow.runs import load_run
from qkvflow.runs.disk import write_a_trial
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.runs.load import Run


@dataclass(frozen=True)
class EncodedText:
    """A user's text as the model sees it.

    Attributes:
        labels: the text of each token; together they are the text (bytes that are not a character on their own are
            shown as \\xE2).
    """

    text: str
    ids: np.ndarray
    labels: tuple[str, ...]


@contextlib.contextmanager
def opened(path: str, checkpoint_step: int | None) -> Iterator[tuple[Run, Progress]]:
    """A loaded run and the program's progress; library output is kept off the terminal."""
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase(f"Loading {path}"):
            run = load_run(path, checkpoint_step)
        yield run, progress


def encode(run: Run, reading: Reading, text: str) -> EncodedText:
    """The tokens of a text, without special tokens.

    Raises:
        UserError: a text without tokens, longer than the context, or with bytes that are not UTF-8.
    """
    if not is_unicode(text):
        raise UserError("The text contains bytes or half characters that are not UTF-8.")
    ids = run.tokenizer.encode(text)
    tokens = sequence(reading, np.asarray(ids, np.int64))
    return EncodedText(text, np.asarray(tokens.array), labels(run.tokenizer, ids))


def texts_of(
    run: Run, texts: Sequence[str] | None, length: int = 64, *, control: Sequence[float] | None = None
) -> tuple[Reading, list[EncodedText]]:
    """The run's model as a `Reading`, and the texts, by default the beginning of the run's validation text. All
    texts are checked before anything is computed.

    Args:
        control: control signal at all tokens; zero by default.

    Raises:
        UserError: a control or a text that does not fit.
    """
    signal = None if control is None else hax.named(np.asarray(control, np.float32), CONTROL)
    reading = read(run.model, control=signal)
    if texts:
        return reading, [encode(run, reading, text) for text in texts]
    ids = validation_texts(run, 1, length)[0]
    text = run.tokenizer.decode([int(i) for i in ids])
    return reading, [EncodedText(text, ids, labels(run.tokenizer, ids))]


def validation_texts(run: Run, count: int, length: int) -> np.ndarray:
    """The first `length` tokens of the first `count` sequences of the run's validation text, or of all if there are
    fewer, int [sequences, length].

    Raises:
        UserError: the run has no validation text, or a single sequence where several are wanted.
    """
    evaluator = RunEvaluator(run, batch_size=count)
    tokens = np.asarray(evaluator.example().tokens.rearrange(("batch", "position")).array)[:count, :length]
    if len(tokens) < min(count, 2):
        raise UserError(
            f"the validation text of {run.directory} has a single sequence, but intervals need two: leave them out with"
            " --texts 0"
        )
    return tokens


def output_folder(run: Run, out: str | None) -> Path:
    """`out`, or `<run>/analysis`, or `analysis/<id>` here for a run in a bucket; created if missing."""
    own = run.path / "analysis" if run.directory.mirror is None else Path("analysis", run.path.name)
    folder = own if out is None else local_path(out)
    with writing(f"the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_a_trial(folder)  # before any work, since results are written after it
    return folder


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Tells errors of the file system.

    Args:
        what: is written, such as `report.html`.

    Raises:
        UserError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {what}: {error.strerror or error}. Choose another place with --out") from None


def output_file(run: Run, out: str | None, name: str) -> Path:
    """`out`, or `name` in the folder of `output_folder`; its folder is created if missing."""
    if out is None:
        return output_folder(run, None) / name
    path = local_path(out)
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a file, such as --out {path / name}")
    return output_folder(run, str(path.parent)) / path.name


def write(folder: Path, name: str, arrays: Mapping[str, np.ndarray], drawn: Mapping[str, Figure]) -> None:
    """`<name>.npz`, and `<name>-<figure>.png` and `.pdf` for each figure."""
    with writing(f"{name} to {folder}"):
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        for title, figure in drawn.items():
            figures.save(figure, folder / f"{name}-{title}")


def labels(tokenizer: MarinTokenizer, ids: Sequence[int] | np.ndarray) -> tuple[str, ...]:
    """What each token of a text adds to it; bytes that are not text on their own as \\xE2."""
    vocabulary, tokens = Vocabulary(tokenizer), [int(token) for token in ids]
    found = [label(vocabulary, token) for token in tokens]
    if found[0] == vocabulary.text(tokens[0]):  # text, which some tokenizers write differently at the start
        found[0] = vocabulary.decode(tokens[:1])
    return tuple(found)


def label(vocabulary: Vocabulary, token: int) -> str:
    """What a token adds after other text; bytes that are not text on their own as \\xE2."""
    raw = vocabulary.bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02X}" for byte in raw)
