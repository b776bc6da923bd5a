"""A checkpoint that changed after it was written is never used, never deleted, and never passed over in silence."""

import json
import random
import shutil

import pytest
import yaml
from levanter.checkpoint import discover_latest_checkpoint
from support.training import STEPS, assert_same, losses, parameters

from qkvflow.checksums import CHECKSUMS, damage_of
from qkvflow.errors import Notice, UserError
from qkvflow.runs import load_run
from qkvflow.runs.checkpoints import checkpoint_steps

pytestmark = [pytest.mark.slow, pytest.mark.program]


def _copy(training, undisturbed, name):
    """A copy of the undisturbed run, with checkpoints 2, 4, 6 and 7 of 8 steps."""
    run = shutil.copytree(undisturbed, training.path(name))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"]["id"] = name
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def _flip(checkpoint, seed=0):
    """Flips a single bit in the largest of the checkpoint's data files."""
    file = max((path for path in checkpoint.glob("d/*")), key=lambda path: path.stat().st_size)
    data, where = bytearray(file.read_bytes()), random.Random(seed)
    data[where.randrange(len(data))] ^= 1 << where.randrange(8)
    file.write_bytes(data)
    return file


def _content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_checkpoint_has_checksums_of_all_its_files(undisturbed):
    for step in checkpoint_steps(undisturbed / "checkpoints"):
        checkpoint = undisturbed / "checkpoints" / f"step-{step}"
        named = set(json.loads((checkpoint / CHECKSUMS).read_text()))
        assert named == set(_content(checkpoint)) - {CHECKSUMS, "metadata.json"}
        assert any(name.startswith("d/") for name in named)
        assert damage_of(checkpoint) is None


@pytest.mark.parametrize("what", ["flip", "cut", "gone", "checksums"])
def test_each_kind_of_damage_is_seen_and_the_file_is_named(training, undisturbed, tmp_path, what):
    checkpoint = shutil.copytree(undisturbed / "checkpoints" / "step-7", tmp_path / "step-7")
    file = _flip(checkpoint)
    if what == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    if what == "gone":
        file.unlink()
    if what == "checksums":
        file = checkpoint / CHECKSUMS
        file.write_text(file.read_text()[:-20])
    assert file.name in (damage_of(checkpoint) or "")


def test_any_single_bit_of_data_is_seen(undisturbed, tmp_path):
    for seed in range(20):
        checkpoint = shutil.copytree(undisturbed / "checkpoints" / "step-7", tmp_path / f"{seed}")
        _flip(checkpoint, seed)
        assert "sha256 differs" in (damage_of(checkpoint) or "")


def test_a_run_continues_from_the_last_good_checkpoint_and_keeps_the_damaged_one(training, undisturbed, capfd):
    run = _copy(training, undisturbed, "damaged")
    newest = run / "checkpoints" / "step-7"
    file = _flip(newest)
    before = _content(newest)
    training.run("damaged")
    told = capfd.readouterr().err
    assert all(word in told for word in (file.name, "step-7", "resumes from step-6", str(run / "damaged")))
    assert sorted(losses(run)) == list(range(STEPS))
    assert_same(run, undisturbed)
    assert _content(run / "damaged" / "step-7") == before
    assert damage_of(newest) is None  # the run made it again
    # A second time: nothing that is kept is overwritten, and Levanter sees none of it.
    _flip(newest)
    training.run("damaged")
    assert _content(run / "damaged" / "step-7") == before
    assert (run / "damaged" / "step-7.2").is_dir()
    assert discover_latest_checkpoint(str(run / "checkpoints")) == str(newest)


def test_several_damaged_checkpoints_are_passed_over(training, undisturbed):
    run = _copy(training, undisturbed, "several")
    for step in (4, 6, 7):
        _flip(run / "checkpoints" / f"step-{step}")
    training.run("several")
    assert sorted(path.name for path in (run / "damaged").iterdir()) == ["step-4", "step-6", "step-7"]
    assert_same(run, undisturbed)


def test_without_any_good_checkpoint_nothing_is_touched(training, undisturbed):
    run = _copy(training, undisturbed, "hopeless")
    for step in checkpoint_steps(run / "checkpoints"):
        _flip(run / "checkpoints" / f"step-{step}")
    before = _content(run)
    with pytest.raises(UserError, match=r"(?s)all are damaged.*step-7.*step-2.*trainer\.id"):
        training.run("hopeless")
    with pytest.raises(UserError, match="all are damaged"):
        load_run(run)
    assert _content(run) == before


def test_reading_a_run_falls_back_with_a_warning_and_an_explicit_step_is_refused(training, undisturbed):
    run = _copy(training, undisturbed, "read")
    file = _flip(run / "checkpoints" / "step-7")
    before = _content(run)
    with pytest.warns(Notice, match=rf"{file.name}.*Using step-6"):
        loaded = load_run(run)
    assert loaded.step == 6
    with pytest.raises(UserError, match=rf"step-7 is damaged.*{file.name}.*choose another: 2, 4, 6"):
        load_run(run, checkpoint_step=7)
    assert load_run(run, checkpoint_step=4).step == 4
    assert _content(run) == before


def test_torn_or_changed_metadata_hides_no_checkpoint(training, undisturbed):
    run = _copy(training, undisturbed, "metadata")
    metadata = run / "checkpoints" / "step-6" / "metadata.json"
    shutil.rmtree(run / "checkpoints" / "step-7")
    for text in ("", metadata.read_text().replace("6", "2"), '{"step": 6, "timestamp": "x"}'):
        metadata.write_text(text)
        assert load_run(run).step == 6
    training.run("metadata")
    assert json.loads(metadata.read_text())["step"] == 6
    assert_same(run, undisturbed)


def test_a_checkpoint_without_checksums_loads_as_before(training, undisturbed):
    run = _copy(training, undisturbed, "old")
    shutil.rmtree(run / "checkpoints" / "step-7")
    for step in checkpoint_steps(run / "checkpoints"):
        (run / "checkpoints" / f"step-{step}" / CHECKSUMS).unlink()
    assert load_run(run).step == 6
    training.run("old")
    assert_same(run, undisturbed)


def test_a_run_begins_from_a_good_checkpoint_of_another(training, undisturbed, capfd):
    source = _copy(training, undisturbed, "source")
    file = _flip(source / "checkpoints" / "step-7")
    folder = source / "checkpoints"
    with pytest.raises(UserError, match=f"step-7 is damaged.*{file.name}"):
        training.run("second", initialize_from=str(folder / "step-7"))
    assert not training.path("second").exists()
    second = training.run("second", initialize_from=str(folder))
    assert "Using step-6" in capfd.readouterr().err
    assert sorted(losses(second)) == [7]
    for got, want in zip(parameters(second), parameters(undisturbed), strict=True):
        assert (got == want).all()


def test_a_run_begins_from_nothing_that_is_finished(training, undisturbed):
    with pytest.raises(UserError, match="is after 8 steps, which count, so that none of the 8 is left"):
        training.run("third", initialize_from=str(undisturbed / "checkpoints"))
    begun = training.run("third", 9, initialize_from=str(undisturbed / "checkpoints"))
    assert sorted(losses(begun)) == [8]


def test_changes_that_do_not_fit_the_checkpoint_leave_the_run_as_it_was(training, undisturbed):
    run = _copy(training, undisturbed, "kept")
    before = {name: (run / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    wider = training.raw("kept")["model"] | {"hidden_dim": 32}
    with pytest.raises(UserError, match="cannot be loaded"):
        training.run("kept", 9, model=wider, accept_changes=True)
    assert {name: (run / name).read_bytes() for name in before} == before
    assert not (run / "changes.jsonl").exists()
    assert load_run(run).step == 7
    training.run("kept", 9, accept_changes=True)
    assert sorted(losses(run)) == [*range(9)]
    assert (run / "changes.jsonl").exists()
    assert not yaml.safe_load((run / "config.yaml").read_text())["accept_changes"], "asked for again each time"


def test_only_the_beginning_of_a_run_needs_what_it_begins_from(training, undisturbed):
    source = _copy(training, undisturbed, "for_a_while") / "checkpoints"
    begun = training.run("fourth", 9, initialize_from=str(source))
    shutil.rmtree(source.parent)
    with pytest.raises(UserError, match=r"initialize_from` is .*, which has no checkpoint"):
        training.run("fifth", 9, initialize_from=str(source))
    assert not training.path("fifth").exists()
    training.run("fourth", 10, initialize_from=str(source), accept_changes=True)
    assert sorted(losses(begun)) == [8, 9]


def test_evaluation_says_that_it_took_an_older_checkpoint(training, undisturbed, capfd):
    from qkvflow.eval_lm import EvalConfig, main

    run = _copy(training, undisturbed, "evaluated")
    _flip(run / "checkpoints" / "step-7")
    main(EvalConfig(run=str(run), max_eval_batches=1))
    assert "warning: the checkpoint" in capfd.readouterr().err
