"""Laws of run directories: names, locks, reopening, metrics, and what a person sees and does not see."""

import dataclasses
import errno
import io
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.checkpoint import CheckpointerConfig
from levanter.data.text import DatasetComponent, HfDatasetSourceConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.tracker.tracker import NoopConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config import differences, read_config, write_config
from qkvflow.data import DataConfig
from qkvflow.errors import UserError
from qkvflow.progress import Progress
from qkvflow.runs import TrainConfig, load_run, prepare_run
from qkvflow.runs.checkpoints import checkpoint_steps, clean_up
from qkvflow.runs.config import RunTrainerConfig
from qkvflow.runs.directory import run_id
from qkvflow.runs.disk import disk_errors_are_told
from qkvflow.tracking import JsonlConfig, JsonlTracker, read_metrics, start_trackers


def _config(base: Path, **trainer) -> TrainConfig:
    trainer = {"id": "a", "num_train_steps": 10, **trainer}
    return TrainConfig(model=Gpt2Config(), trainer=RunTrainerConfig(**trainer), run_dir=str(base))


def _start(base: Path, *steps: int) -> Path:
    """A run directory with complete checkpoints of the given steps."""
    config = _config(base)
    with prepare_run(config) as run:
        run.config = dataclasses.replace(run.config, vocab_size=257)
        run.commit()
    for step in steps:
        _checkpoint(base / "a", step)
    return base / "a"


def _checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"step": step, "timestamp": "2030-01-01"}))


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize(
    ("given", "path", "name"),
    [
        (None, "configs/quickstart.yaml", "quickstart"),
        (None, "/home/me/configs/wikitext103/small.yaml", "wikitext103-small"),
        (None, "elsewhere/my run.yaml", "my-run"),
        ("mine", "configs/quickstart.yaml", "mine"),
    ],
)
def test_a_run_is_named_after_its_configuration(given, path, name):
    assert run_id(given, path) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a b", "-a", "a\n"])
def test_unsafe_names_are_refused(name):
    with pytest.raises(UserError, match=r"trainer\.id"):
        run_id(name, None)
    with pytest.raises(UserError, match="no name"):
        run_id(None, None)


def test_a_new_run_is_made_and_its_configuration_reads_back(tmp_path):
    run = _start(tmp_path / "deep" / "er")
    stored = read_config(run / "config.yaml", TrainConfig)
    assert stored == dataclasses.replace(_config(tmp_path / "deep" / "er").settled(), vocab_size=257)


def test_what_an_earlier_start_settled_is_kept(tmp_path):
    _start(tmp_path, 3, 7)
    with prepare_run(_config(tmp_path)) as run:
        assert (run.config.vocab_size, run.last_step, run.changes) == (257, 7, {})


def test_a_start_that_fails_leaves_nothing(tmp_path):
    def start():
        with prepare_run(_config(tmp_path)) as run:
            run.directory.log.write_text("x")
            raise UserError("later")

    with pytest.raises(UserError, match="later"):
        start()
    assert not (tmp_path / "a").exists()


def test_a_start_that_was_killed_is_begun_again(tmp_path):
    (tmp_path / "a").mkdir()
    for name in (".probe", ".lock", "config.tmp", "train.log"):
        (tmp_path / "a" / name).touch()
    with prepare_run(_config(tmp_path)) as run:
        assert run.last_step == -1


@pytest.mark.parametrize("name", ["train.jsonl", "train.log.txt", "notes.md", "training.log"])
def test_files_of_a_stranger_are_no_empty_run(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text("mine")
    with pytest.raises(UserError, match=f"not empty: it contains {name}"), prepare_run(_config(tmp_path)):
        pass
    assert _files(tmp_path / "a") == {str(tmp_path / "a" / name): b"mine"}


def test_starts_at_once_take_nothing_from_each_other(tmp_path):
    """Each is either alone in the folder until it ends, or is refused for the one that is."""
    rounds, inside, told = 25, [], []

    def start(number: int) -> None:
        for turn in range(rounds):
            barrier.wait()
            try:
                with prepare_run(_config(tmp_path)) as run:
                    inside.append(number)
                    own = run.directory.path / "tokenizer" / str(number)
                    own.parent.mkdir()  # another's would be there already
                    own.write_text("x")
                    time.sleep(0.002 * (turn % 3))
                    assert own.read_text() == "x"
                    assert inside.pop() == number
                    raise UserError("it fails before it is a run")
            except UserError as error:
                told.append(str(error))
            except BaseException as error:
                told.append(repr(error))

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=start, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [text for text in told if not re.search("is training in|it fails before", text)]
    assert len(told) == 2 * rounds
    assert sum("it fails" in text for text in told) >= rounds
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("a", ".lock")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("~nobodyknows/x", "no home folder of that user"),
        ("x" * 300, "too long for a path"),
        ("t\udce9l", "not UTF-8"),
        ("hdfs://x/y", "neither a local folder nor a bucket"),
    ],
)
def test_folders_that_cannot_be_are_refused(name, words):
    with pytest.raises(UserError, match=words), prepare_run(dataclasses.replace(_config(Path()), run_dir=name)):
        pass


def test_folders_that_only_look_like_checkpoints_are_none(tmp_path):
    run = _start(tmp_path, 3)
    for name in ("step-²", "step-٣", "step-07", "step-1e3", "step-", "step--4", "step-9" * 20):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "metadata.json").write_text("{}")
    assert checkpoint_steps(run / "checkpoints") == [3]
    clean_up(run / "checkpoints")
    with prepare_run(_config(tmp_path)) as again:
        assert again.last_step == 3


def test_a_vocabulary_of_nothing_in_the_file_of_a_run_is_refused(tmp_path):
    run = _start(tmp_path, 3)
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("vocab_size: 257", "vocab_size: 0"))
    with pytest.raises(UserError, match="`vocab_size` must be at least 1, but is 0"):
        load_run(run)


def test_files_of_wandb_go_into_the_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_DIR", raising=False)
    seen = []

    class Wandb(NoopConfig):
        def init(self, run_id):
            seen.append(os.environ["WANDB_DIR"])
            return super().init(run_id)

    (tmp_path / "run").mkdir()
    start_trackers(tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "tensorboard", -1, Wandb(), "a")
    assert "WANDB_DIR" not in os.environ
    monkeypatch.setenv("WANDB_DIR", "mine")
    start_trackers(tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "tensorboard", -1, Wandb(), "a")
    assert seen == [str(tmp_path / "run"), "mine"]


def test_a_different_configuration_is_refused_with_its_keys(tmp_path):
    run = _start(tmp_path, 3)
    before = _files(run)
    given = dataclasses.replace(_config(tmp_path, seed=5), model=Gpt2Config(num_layers=3), z_loss_weight=0.5)
    with pytest.raises(UserError) as error, prepare_run(given):
        pass
    for words in ("trainer.seed: 0 before, 5 now", "model.num_layers: 12 before, 3 now", "z_loss_weight"):
        assert words in str(error.value)
    assert "--trainer.id" in str(error.value)
    assert "--accept_changes true" in str(error.value)
    assert _files(run) == before


def test_the_order_of_components_must_remain(tmp_path):
    """Levanter's mixture draws by their positions; those of the hub have no files to compare."""
    parts = {name: DatasetComponent(source=HfDatasetSourceConfig(id=f"texts/{name}")) for name in ("a", "b")}
    given = dataclasses.replace(_config(tmp_path), data=DataConfig(components=parts))
    with prepare_run(given) as run:
        run.config = dataclasses.replace(run.config, vocab_size=257)
        run.commit()
    _checkpoint(tmp_path / "a", 3)
    with prepare_run(given) as run:
        assert run.changes == {}
    turned = dataclasses.replace(given, data=DataConfig(components=dict(reversed(parts.items()))))
    with pytest.raises(UserError, match=r"data\.components: 'a, b' before, 'b, a' now"), prepare_run(turned):
        pass
    with prepare_run(dataclasses.replace(turned, accept_changes=True)) as run:
        assert run.changes == {"data.components": ("a, b", "b, a")}


def test_keys_that_cannot_change_numbers_may_differ(tmp_path):
    _start(tmp_path)
    given = _config(tmp_path, steps_per_eval=3, tracker=NoopConfig(), log_dir=Path("x"), require_accelerator=None)
    with prepare_run(given) as run:
        assert run.changes == {}


@pytest.mark.parametrize("trace", [None, "base", "metric", "checkpoint", "damaged"])
def test_before_the_first_step_a_configuration_may_change(tmp_path, trace):
    """A start that found too little memory leaves nothing to continue: the corrected command is a first start."""
    path, given = _start(tmp_path), _config(tmp_path, seed=5)
    if trace in (None, "base"):
        if trace == "base":  # what a fine-tune says before its first step
            (path / "metrics.jsonl").write_text('{"step": 0, "finetune/parameters": 9}\n')
        (path / "artifacts").mkdir()  # of `trainer.log_jaxprs`
        with prepare_run(given) as run:
            assert (run.last_step, run.changes, run.config.vocab_size) == (-1, {}, None)
            (path / "data.json").write_text('{"a.txt": "1"}')
            run.check_data({"a.txt": "2"})
            run.commit()
        assert read_config(path / "config.yaml", TrainConfig).trainer.seed == 5
        assert json.loads((path / "data.json").read_text()) == {"a.txt": "2"}
        assert not (path / "changes.jsonl").exists()
        return
    if trace == "metric":
        (path / "metrics.jsonl").write_text('{"step": 0, "train/loss": 5.5}\n')
    else:
        (path / {"checkpoint": "checkpoints", "damaged": "damaged"}[trace] / "step-3").mkdir(parents=True)
    with pytest.raises(UserError, match=r"trainer\.seed: 0 before, 5 now"), prepare_run(given):
        pass


def _own_files(folder: Path) -> None:
    folder.mkdir()
    for name, content in (("config.yaml", "optimiser: mine\n"), ("notes.md", "mine"), ("base.json", "{}")):
        (folder / name).write_text(content)


def _hand_written_config(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {type: gpt2}\ntrainer: {id: a}\n")


def _zeroed_config(folder: Path) -> None:
    _start(folder.parent)
    (folder / "config.yaml").write_bytes(bytes(100))


def _notes_in_the_run(folder: Path) -> None:
    _start(folder.parent)
    (folder / "notes.md").write_text("mine")


def _vocabulary_in_the_tokenizer(folder: Path) -> None:
    _start(folder.parent)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "merges.txt").write_text("mine")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_own_files, "config.yaml was written by another version or edited by hand"),
        (_hand_written_config, "its config.yaml was not written by a run"),
        (_zeroed_config, "not valid YAML"),
        (_notes_in_the_run, "it contains notes.md"),
        (_vocabulary_in_the_tokenizer, "it contains tokenizer/merges.txt"),
    ],
)
def test_a_folder_with_a_config_yaml_is_not_taken_for_a_run(tmp_path, make, words):
    folder = tmp_path / "a"
    make(folder)
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("mine")
    before = _files(folder)
    with pytest.raises(UserError, match=f"is not a run directory: .*{words}"), prepare_run(_config(tmp_path)) as run:
        run.commit()
    assert _files(folder) == before


@pytest.mark.parametrize("fails", [True, False])
def test_a_start_without_a_step_gives_way_only_to_one_that_is_committed(tmp_path, fails):
    folder = _start(tmp_path)
    (folder / "tokenizer").mkdir()
    for name in ("base.json", "tokenizer/tokenizer.json", "tokenizer/origin.json"):
        (folder / name).write_text("earlier")
    before = _files(folder)

    def start():
        with prepare_run(_config(tmp_path, seed=5)) as run:
            assert not run.directory.base.exists()
            run.directory.tokenizer.mkdir()
            (run.directory.tokenizer / "tokenizer.json").write_text("other")
            if fails:
                raise UserError("there is no file for data.train")
            run.commit()

    if fails:
        with pytest.raises(UserError, match="no file"):
            start()
        assert _files(folder) == before
    else:
        start()
        assert {path.name for path in folder.iterdir()} == {".lock", "config.yaml", "tokenizer"}
        assert (folder / "tokenizer" / "tokenizer.json").read_text() == "other"
        assert [path.name for path in (folder / "tokenizer").iterdir()] == ["tokenizer.json"]


def test_accepted_changes_are_recorded(tmp_path):
    path = _start(tmp_path, 3)
    given = dataclasses.replace(_config(tmp_path, num_train_steps=20), accept_changes=True)
    with prepare_run(given) as run:
        run.commit()
    record = json.loads((path / "changes.jsonl").read_text())
    assert record["changed"] == {"trainer.num_train_steps": {"from": 10, "to": 20}}
    assert record["after_step"] == 3
    assert read_config(path / "config.yaml", TrainConfig).trainer.num_train_steps == 20


def test_a_finished_run_is_refused_and_untouched(tmp_path):
    run = _start(tmp_path, 3, 9)
    before = _files(run)
    words = r"finished.*num_train_steps 20.*accept_changes.*trainer\.id"
    with pytest.raises(UserError, match=words), prepare_run(_config(tmp_path)):
        pass
    assert _files(run) == before


def test_places_that_cannot_be_written_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"), prepare_run(_config(tmp_path / "file")):
        pass
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"not a run directory.*thesis\.tex"), prepare_run(_config(tmp_path)):
        pass
    for number, words in ((errno.ENOSPC, "full"), (errno.EROFS, "Read-only")):

        def fail(descriptor, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(UserError, match=words), prepare_run(_config(tmp_path / "b")):
            pass


def test_a_disk_without_room_for_two_checkpoints_is_refused(tmp_path):
    with prepare_run(_config(tmp_path)) as run:
        run.require_space(1)
        with pytest.raises(UserError, match=r"two checkpoints of this model take 2e\+03 TB"):
            run.require_space(10**15)


def test_a_run_with_a_checkpoint_needs_room_for_one_more(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1.6))
    with prepare_run(_config(tmp_path / "new")) as run, pytest.raises(UserError, match="two checkpoints"):
        run.require_space(1)
    _start(tmp_path / "begun", 3)
    with prepare_run(_config(tmp_path / "begun")) as run:
        run.require_space(1)
        with pytest.raises(UserError, match="the next checkpoint takes 2 B"):
            run.require_space(2)


def test_only_the_first_process_writes_an_extra_file_of_metrics(tmp_path, monkeypatch):
    config = JsonlConfig(str(tmp_path / "mine.jsonl"))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    config.init("run").log({"x": 1.0}, step=0)
    assert not (tmp_path / "mine.jsonl").exists()
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    config.init("run").finish()
    assert (tmp_path / "mine.jsonl").exists()


def test_a_disk_that_becomes_full_is_told(tmp_path):
    def save():
        with disk_errors_are_told(tmp_path):
            raise ValueError("RESOURCE_EXHAUSTED: write failed [No space left on device]")

    with pytest.raises(UserError, match="is full"):
        save()


def test_a_run_directory_belongs_to_one_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from qkvflow.locks import locked\n"
        "with locked(Path(sys.argv[1]), wait=False): print('held', flush=True); sys.stdin.read()"
    )
    with prepare_run(_config(tmp_path)):
        second = prepare_run(_config(tmp_path))
        with pytest.raises(UserError, match="this process"):
            second.__enter__()
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a" / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with (
        pytest.raises(UserError, match=f"another process .number {other.pid}"),
        prepare_run(_config(tmp_path)),
    ):
        pass
    other.kill()
    other.wait()
    with prepare_run(_config(tmp_path)):
        pass


def test_only_complete_checkpoints_count_and_the_rest_is_mended(tmp_path):
    for step in (3, 12, 100):
        _checkpoint(tmp_path, step)
    folder = tmp_path / "checkpoints"
    (folder / "step-100" / "metadata.json").write_text("")
    (folder / "step-200").mkdir()
    assert checkpoint_steps(folder) == [3, 12, 100]
    clean_up(folder)
    assert json.loads((folder / "step-100" / "metadata.json").read_text())["step"] == 100
    assert checkpoint_steps(folder) == [3, 12, 100]
    assert not (folder / "step-200").exists()


def test_reading_a_run_that_is_not_there_says_what_is(tmp_path):
    run = _start(tmp_path)
    with pytest.raises(UserError, match=rf"no run .*runs in {tmp_path}: {run}"):
        load_run(tmp_path / "b")
    with pytest.raises(UserError, match=f"not a run directory.*{run}"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="no checkpoint yet"):
        load_run(run)
    _checkpoint(run, 3)
    with pytest.raises(UserError, match="no checkpoint of step 4; available: 3"):
        load_run(run, checkpoint_step=4)


def test_differences_ignore_order_and_defaults(tmp_path):
    assert differences(_config(tmp_path), _config(tmp_path), ()) == {}


def test_an_interval_of_nothing_is_written_and_read_back(tmp_path):
    config = _config(tmp_path, checkpointer=CheckpointerConfig(save_interval=timedelta(0)))
    write_config(tmp_path / "config.yaml", config)
    assert read_config(tmp_path / "config.yaml", TrainConfig) == config


def test_metrics_of_a_step_make_one_record(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log({"train/loss": np.float32(1.5), "n": np.int64(3)}, step=0)
    tracker.log({"eval": {"loss": jnp.array(2.0)}}, step=0)
    tracker.log({"train/loss": float("nan"), "other": float("-inf"), "histogram": np.ones(3)}, step=1)
    tracker.flush()
    tracker.log({"late": True}, step=1)
    tracker.finish()
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines] == [0, 1]
    first, second = read_metrics(tmp_path / "m.jsonl")
    assert first == {"step": 0, "train/loss": 1.5, "n": 3, "eval/loss": 2.0}
    assert math.isnan(second.pop("train/loss"))
    assert second == {"step": 1, "other": -math.inf, "late": True}


def test_a_resumed_run_has_every_step_once(tmp_path):
    path = tmp_path / "m.jsonl"
    tracker = JsonlTracker(path)
    for step in range(6):
        tracker.log({"loss": step}, step=step)
    tracker.flush()
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    assert [record["step"] for record in read_metrics(path)] == list(range(6))
    resumed = JsonlTracker(path, last_step=2)
    for step in range(3, 8):
        resumed.log({"loss": -step}, step=step)
    resumed.log({"loss": 0}, step=2)
    resumed.finish()
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(s, s if s < 3 else -s) for s in range(8)]
    JsonlTracker(path, last_step=-1).finish()
    assert read_metrics(path) == []


def test_tensorboard_has_the_metrics_and_no_other_folders(tmp_path):
    tracker = start_trackers(tmp_path / "m.jsonl", tmp_path / "tb", -1, (), "a")
    tracker.log_hyperparameters({"a": 1})
    for step in range(3):
        tracker.log({"train/loss": step / 2}, step=step)
    tracker.finish()
    assert [path.name[:6] for path in (tmp_path / "tb").iterdir()] == ["events"]
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert len(read_metrics(tmp_path / "m.jsonl")) == 3


def test_a_tracker_that_cannot_start_is_named(tmp_path):
    class Broken(NoopConfig):
        def init(self, run_id):
            raise RuntimeError("no key")

    with pytest.raises(UserError, match=r"trainer\.tracker.*Broken.*no key"):
        start_trackers(tmp_path / "m.jsonl", tmp_path / "tb", -1, Broken(), "a")


def test_library_output_goes_to_the_log(tmp_path, capfd):
    with quiet_libraries() as quiet:
        logging.getLogger("another.package").warning("early")
        quiet.log_to(tmp_path / "log")
        logging.getLogger("another.package").info("late")
        os.write(2, b"from C++\n")
        print("a warning", file=sys.stderr)
        quiet.terminal.write("for people\n")
    print("afterwards", file=sys.stderr)
    assert capfd.readouterr().err == "for people\nafterwards\n"
    log = (tmp_path / "log").read_text()
    assert [word in log for word in ("early", "late", "from C++", "a warning", "people")] == [True] * 4 + [False]


def test_an_unexpected_error_shows_what_was_caught_before_there_was_a_log(capfd):
    def fail():
        with quiet_libraries():
            os.write(2, b"the cause\n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "the cause" in capfd.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal()])
def test_progress_shows_step_loss_speed_time_and_validation(stream):
    progress = Progress(stream)
    with progress.phase("Preparing data"):
        pass
    progress.start(0, 4)
    for done in range(1, 5):
        progress.step(done, 2.0 / done, 1000.0)
    progress.validation(4, 1.5, 3.0)
    progress.close()
    text = stream.getvalue()
    assert text.startswith("Preparing data ...")
    assert "step 4/4  loss 0.500  1,000 tokens/s  00:00 left" in text
    assert "step 4  validation loss 1.500  perplexity 4.48  (unigram 3.00)\n" in text
    assert text.endswith("\n")
