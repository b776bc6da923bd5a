"""Imports Hugging Face checkpoints as runs, and exports runs as Hugging Face checkpoints.

    qkvflow convert --from_hf path/to/folder --run runs/gpt2
    qkvflow convert --from_hf openai-community/gpt2 --run runs/gpt2 --data.train 'texts/*.txt'
    qkvflow convert --run runs/quickstart --to_hf exported --steps 12

docs/hub.md lists the models that can be imported, and those that can be exported without custom code.
"""

import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.data.hub import download
from qkvflow.data.tokenizers import TOKENIZER_FILES
from qkvflow.errors import UserError
from qkvflow.files import local_path, write_text
from qkvflow.hub.card import Card
from qkvflow.hub.custom import check_block
from qkvflow.hub.families import model_config
from qkvflow.hub.folder import CONFIG, HubFolder, read_json
from qkvflow.hub.tokenizer import OLD_FILES
from qkvflow.hub.write import write_folder
from qkvflow.models import NeuralOdeConfig
from qkvflow.models.levanter_twin import enter, enter_config
from qkvflow.places import Place, is_remote
from qkvflow.progress import Progress
from qkvflow.ranges import Steps
from qkvflow.runs import Run, load_run
from qkvflow.runs.config import FinetuneDataConfig
from qkvflow.runs.directory import location_of
from qkvflow.runs.hub import import_run
from qkvflow.runs.known_loss import warn_if_lost
from qkvflow.runs.load import find_run, stored_config
from qkvflow.runs.made import new_folder, refuse_existing, refuse_target
from qkvflow.tracking import read_metrics
from qkvflow.weights import PerLayerConfig

# Not `consolidated.safetensors` and other copies of the same arrays.
_FILES = (CONFIG, "model*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES, *OLD_FILES)


@dataclass
class ConvertConfig:
    """
    Attributes:
        run: the run directory; with `from_hf`, a new one.
        from_hf: a folder with config.json, safetensors and a tokenizer, or a name on the hub, to import as a run.
        to_hf: a new folder for the exported model, which transformers, vLLM and others can load.
        data: with `from_hf`: the text for evaluation and fine-tuning; by default the text that ships with Python. The
            tokenizer comes from the folder.
        steps: with `to_hf`: the depth at which a flow becomes an ordinary model; as trained by default. A model of
            ordinary layers only has its own.
        checkpoint_step: with `to_hf`: N of the checkpoint step-N; the newest by default.
        averaged: with `to_hf`: the average of the parameters over steps (`trainer.model_averaging`), instead of the
            last ones.
    """

    run: str
    from_hf: str | None = None
    to_hf: str | None = None
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    steps: Steps | None = None
    checkpoint_step: int | None = None
    averaged: bool = False


def main(config: ConvertConfig) -> Path | Place:
    """Converts, and says what was written where; returns the new folder."""
    if (config.from_hf is None) == (config.to_hf is None):
        raise UserError("give a direction: either --from_hf FOLDER, which creates the run, or --to_hf FOLDER")
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        return _out(config, progress) if config.from_hf is None else _in(config, config.from_hf, progress)


def _in(config: ConvertConfig, source: str, progress: Progress) -> Path | Place:
    if config.steps is not None or config.checkpoint_step is not None or config.averaged:
        raise UserError(
            "--steps, --checkpoint_step and --averaged only work with --to_hf: a Hugging Face model has one depth, and"
            " one set of parameters. Leave them out"
        )
    if config.data.tokenizer is not None:
        raise UserError(f"--data.tokenizer: the tokenizer comes with {source}. Leave it out")
    config.data.check_files()
    target, path = location_of(config.run), local_path(source)
    refuse_target(target, "--run")
    is_path = path.exists() or source.startswith(("/", "./", "../", "~"))
    if is_path and not HubFolder.is_one(path):
        raise UserError(f"{source} is not a folder with a {CONFIG}, so it has no model in Hugging Face format")
    if not is_path:
        with progress.phase(f"Fetching {source}"):
            path = _fetch(source)
    data = dataclasses.replace(config.data, tokenizer=str(path.resolve()) if is_path else source)
    with progress.phase(f"Reading {source}"):
        import_run(HubFolder(path), target, data)
    print(f"The run is in {target}; use it in any program with --run {target}", flush=True)
    return target


def _fetch(source: str) -> Path:
    """The files of a model of the hub; of one that is not supported, `config.json` alone is fetched."""
    instead = "Give a local folder."
    about = download(source, (CONFIG,), HubFolder.is_one, "model", instead)
    if not HubFolder.is_one(about):
        raise UserError(f"the Hugging Face repository {source} has no {CONFIG}, so it has no model. {instead}")
    model_config(HubFolder(about).settings, source)  # a UserError if it is not supported
    return download(source, _FILES, _has_tokenizer, "model", instead, is_enough=HubFolder.is_whole)


def _has_tokenizer(folder: Path) -> bool:
    """Whether there is a whole model with its tokenizer: others fetch a model alone into the same cache."""
    names = (TOKENIZER_FILES[0], *OLD_FILES)
    return HubFolder.is_whole(folder) and any((folder / name).is_file() for name in names)


def _out(config: ConvertConfig, progress: Progress) -> Path:
    assert config.to_hf is not None
    if config.data != FinetuneDataConfig():
        raise UserError("--data only works with --from_hf. Leave it out")
    if is_remote(config.to_hf):
        raise UserError(
            f"--to_hf must be a local folder, but is {config.to_hf}. Copy the exported folder to the bucket"
        )
    target = local_path(config.to_hf)
    refuse_existing(target, "--to_hf")
    with progress.phase(f"Loading {config.run}"):
        _check_exportable(enter_config(stored_config(find_run(config.run)).model), config)
        run = load_run(config.run, config.checkpoint_step, averaged=config.averaged)
    model = enter(run.model)
    depth, is_stack = model.config.depth, isinstance(model.config.weights, PerLayerConfig)
    is_new_depth = config.steps not in (None, depth.reading_steps)
    trained = None if is_stack and depth.step_size == "residual" else model.config
    ordinary = model.discretise(config.steps)
    if is_new_depth or depth.is_adaptive:
        warn_if_lost(run, ordinary, f"{depth.solver} with {ordinary.config.depth.reading_steps} steps")
    with progress.phase(f"Writing {target}"), new_folder(target, "--to_hf") as made:
        reason = write_folder(ordinary, run.directory.tokenizer, made)
        averaged = "true" if config.averaged else None
        chosen = {"steps": config.steps, "checkpoint_step": config.checkpoint_step, "averaged": averaged}
        words = "".join(f" --{key} {value}" for key, value in chosen.items() if value is not None)
        card = Card(
            name=target.name,
            origin=f"the run `{run.directory.place.name}` after step {run.step}",
            made=f"qkvflow convert --run {shlex.quote(config.run)} --to_hf {shlex.quote(config.to_hf)}{words}",
            trained=trained,
            exported=ordinary.config,
            data=run.config.data,
            losses=_losses(run, config.averaged),
            reason=reason,
            class_name=read_json(made / CONFIG)["architectures"][0],
        )
        write_text(made / "README.md", card.text())
    how = f"with trust_remote_code=True, because {reason}" if reason else "as it is"
    print(f"The model is in {target}; transformers loads it {how}", flush=True)
    return target


def _check_exportable(model: NeuralOdeConfig, config: ConvertConfig) -> None:
    """Raises: UserError: the model has no such depth, or a block that cannot be exported."""
    depth = model.depth
    if isinstance(model.weights, PerLayerConfig) and config.steps not in (None, depth.reading_steps):
        raise UserError(
            f"--steps is {config.steps}, but {config.run} is an ordinary model of {depth.reading_steps} layers, which"
            " has only this depth. Leave --steps out"
        )
    if depth.is_adaptive and config.steps is None:
        raise UserError(
            f"{config.run} chooses its steps itself, but an exported model has one depth: add --steps M, and see its"
            f" loss by qkvflow eval --run {shlex.quote(config.run)} --steps M"
        )
    check_block(model.block)


def _losses(run: Run, averaged: bool) -> dict[str, float]:
    """The last losses of the exported parameters that a run recorded up to its checkpoint."""
    metrics = run.directory.metrics
    records = read_metrics(metrics) if metrics.is_file() else []
    last = {key: value for record in records if record["step"] <= run.step for key, value in record.items()}
    names = {"eval/loss": "eval/ema/loss"} if averaged else {"train/loss": "train/loss", "eval/loss": "eval/loss"}
    return {name: last[key] for name, key in names.items() if isinstance(last.get(key), float)}


if __name__ == "__main__":
    run_program(main, ConvertConfig)
