"""Laws of fine-tuning: it starts where its base is, trains what it says, stores no more, resumes exactly."""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
import tensorstore as ts
import yaml

from qkvflow import official
from qkvflow.cli import parse
from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.finetune_lm import main
from qkvflow.models import lora
from qkvflow.runs import load_run
from qkvflow.runs.base import fingerprint
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.runs.config import FinetuneConfig, TrainConfig
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.runs.load import RunBase
from qkvflow.tracking import read_metrics
from qkvflow.train_lm import main as train
from qkvflow.training.finetune import settle

pytestmark = pytest.mark.program
SLOW = pytest.mark.slow

MODES = {
    "flow": {"type": "flow"},
    "full": {"type": "full"},
    "lora": {"type": "lora", "r": 2, "alpha": 4.0, "dropout": 0.1, "train_embeddings": True},
}


def _settings(base: Path, name: str, steps: int) -> dict:
    return {
        "data": {"cache_dir": str(base / "cache")},
        "optimizer": {"learning_rate": 1e-2, "warmup": 2},
        "run_dir": str(base / "runs"),
        "trainer": {
            "id": name,
            "train_batch_size": 4,
            "num_train_steps": steps,
            "steps_per_eval": 100,
            "max_eval_batches": 2,
            "checkpointer": {"keep": None, "save_interval": None},
        },
    }


def _train_base(base: Path, name: str, model: dict, steps: int = 12, **trainer) -> Path:
    raw = _settings(base, name, steps)
    raw["trainer"] |= trainer
    return train(decode(TrainConfig, {**raw, "model": model}))


FLOW = {
    "type": "neuralode",
    "hidden_dim": 16,
    "max_seq_len": 32,
    "block": {"type": "gpt2", "num_heads": 2, "mlp_scale": 2, "resid_pdrop": 0.1},
    "weights": {"type": "generated", "time_embed_dim": 4, "sinusoidal_dim": 4},
    "depth": {"steps": 3},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a finished run, `runs/flow`."""
    folder = tmp_path_factory.mktemp("finetune")
    _train_base(folder, "flow", FLOW)
    return folder


def _raw(base: Path, name: str, mode: str | dict = "lora", steps: int | None = 3, train_steps: int = 3, **keys) -> dict:
    mode = MODES[mode] if isinstance(mode, str) else mode
    raw = _settings(base, name, train_steps) | {"run": str(base / "runs" / "flow"), "steps": steps, "mode": mode}
    trainer = raw["trainer"] | keys.pop("trainer", {})
    return raw | {"trainer": trainer} | keys


def _finetune(raw: dict) -> Path:
    return main(decode(FinetuneConfig, raw))


def _loss(run: Path, model=None) -> float:
    loaded = load_run(run)
    return RunEvaluator(loaded, max_batches=2).loss(model or loaded.model)


def _arrays(model) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves if eqx.is_array(x)}


@pytest.fixture(scope="module")
def tuned(base) -> Callable[[str], Path]:
    """A fine-tune by a mode, at another depth than the base's."""
    return functools.cache(lambda mode: _finetune(_raw(base, f"tuned-{mode}", mode, steps=5)))


def test_a_base_that_grew_is_tuned_at_its_last_depth(base):
    grew = {**FLOW, "depth": {"steps": {"grow": {"0.0": 1, "0.5": 3}}}}
    _train_base(base, "grew", grew, steps=4)
    run = _finetune(_raw(base, "tuned-grew", "flow", steps=None, train_steps=1) | {"run": str(base / "runs" / "grew")})
    records = read_metrics(run / "metrics.jsonl")
    assert load_run(run).model.config.depth.steps == 3
    assert records[0]["finetune/eval_loss_before"] == pytest.approx(_loss(base / "runs" / "grew"), abs=1e-4)


@pytest.mark.parametrize("mode", ["lora", *(pytest.param(m, marks=SLOW) for m in ("flow", "full"))])
def test_it_starts_where_the_base_is(base, tuned, mode):
    first = read_metrics(tuned(mode) / "metrics.jsonl")[0]
    source = load_run(base / "runs" / "flow")
    at_five = source.model.with_depth(source.model.config.depth.on_grid(5))  # what `eval_lm --steps 5` reads
    assert first["finetune/eval_loss_before"] == pytest.approx(_loss(source.path, at_five), abs=1e-4)
    assert first["step"] == 0
    loaded = load_run(tuned(mode))
    assert loaded.model.config.depth.steps == 5
    assert loaded.model.config.weights.get_choice_name(type(loaded.model.config.weights)) == (
        "generated" if mode == "flow" else "per_layer"
    )
    assert fingerprint(loaded.model) != fingerprint(source.model.discretise(5))


@SLOW
def test_at_its_own_depth_it_gives_the_pretrained_loss(base):
    raw = _raw(base, "own-depth", "lora", steps=None, train_steps=1, optimizer={"learning_rate": 0.0})
    run = _finetune(raw)
    pretrained = read_metrics(base / "runs" / "flow" / "metrics.jsonl")[-1]["eval/loss"]
    metrics = read_metrics(run / "metrics.jsonl")[0]
    assert metrics["finetune/eval_loss_before"] == pytest.approx(pretrained, abs=1e-4)
    # A step of length zero later it is the base still, bit for bit once merged.
    expected = _arrays(load_run(base / "runs" / "flow").model.discretise())
    got = _arrays(load_run(run).model)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_only_lora_and_the_embeddings_change(base, tuned):
    expected = _arrays(load_run(base / "runs" / "flow").model.discretise(5))
    got = _arrays(load_run(tuned("lora"), merge=False).model)
    wrapped = {name.replace(".wrapped", ""): array for name, array in got.items() if ".lora." not in name}
    assert wrapped.keys() == expected.keys()
    changed = {name for name, array in expected.items() if not np.array_equal(array, wrapped[name])}
    assert {name.split(".")[1] for name in changed} == {"embeddings"}
    assert len(changed) == 2
    terms = [array for name, array in got.items() if ".lora.lora_B." in name]
    assert len(terms) == 4
    assert all(np.abs(array).max() > 0 for array in terms)
    first = read_metrics(tuned("lora") / "metrics.jsonl")[0]
    trained = sum(x.size for name, x in got.items() if ".lora." in name or ".embeddings." in name)
    assert first["finetune/trained_parameters"] == trained
    assert first["finetune/trained_fraction"] == pytest.approx(trained / sum(x.size for x in got.values()))
    # Adam: two numbers for each trained one, a count, and Levanter's learning rate and its count.
    assert first["finetune/optimizer_state_bytes"] == pytest.approx(8 * trained, abs=64)
    assert first["finetune/optimizer_state_bytes_if_all_were_trained"] > first["finetune/optimizer_state_bytes"]


def test_a_lora_run_stores_only_what_it_trained(tuned):
    checkpoint = tuned("lora") / "checkpoints" / "step-2"
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint}/"}).result()
    names = {key.decode() for key in store.list().result()}
    model = {name for name in names if name.startswith("model/")}
    assert model
    assert all("/lora/" in name or name.startswith("model/embeddings/") for name in model)
    record = json.loads((tuned("lora") / "base.json").read_text())
    assert record["checkpoint_step"] == 11
    assert len(record["sha256"]) == 64


def test_merged_is_unmerged_and_stands_alone(base, tuned, tmp_path):
    merged = main(decode(FinetuneConfig, {"run": str(tuned("lora")), "merge": True, "run_dir": str(tmp_path)}))
    assert merged == tmp_path / "tuned-lora-merged"
    shutil.copytree(merged, tmp_path / "elsewhere" / "alone")
    alone, original = load_run(tmp_path / "elsewhere" / "alone"), load_run(tuned("lora"))
    assert fingerprint(alone.model) == fingerprint(original.model)
    unmerged = load_run(tuned("lora"), merge=False).model
    assert any(isinstance(x, lora.LowRankLinear) for x in jax.tree.leaves(unmerged, is_leaf=lora.is_lora_param))
    final = read_metrics(tuned("lora") / "metrics.jsonl")[-1]["eval/loss"]
    assert _loss(alone.path) == pytest.approx(_loss(tuned("lora"), unmerged), abs=1e-5)
    assert _loss(alone.path) == pytest.approx(final, abs=1e-4)
    assert alone.config.trainer.id == "tuned-lora-merged"
    with pytest.raises(UserError, match="already exists"):
        main(decode(FinetuneConfig, {"run": str(tuned("lora")), "merge": True, "run_dir": str(tmp_path)}))
    with pytest.raises(UserError, match="not a LoRA run"):
        main(decode(FinetuneConfig, {"run": str(merged), "merge": True}))


def test_an_unfinished_run_without_metrics_is_merged_to_a_base(base, tuned, tmp_path):
    part = shutil.copytree(tuned("lora"), tmp_path / "part")
    (part / "metrics.jsonl").unlink()
    raw = yaml.safe_load((part / "config.yaml").read_text())
    raw["trainer"]["num_train_steps"] = 1_000
    (part / "config.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match="is unfinished"):
        RunBase.open(part, None)
    merged = main(decode(FinetuneConfig, {"run": str(part), "merge": True, "run_dir": str(tmp_path)}))
    assert RunBase.open(merged, None).step == load_run(tuned("lora")).step


def test_another_configuration_is_not_merged_as_this_one(base, tuned):
    tuned("lora")
    with pytest.raises(UserError, match=r"another configuration:\n.*mode\.r: 2 before, 4 now"):
        _finetune(_raw(base, "tuned-lora", {**MODES["lora"], "r": 4}, steps=5) | {"merge": True})


def test_a_run_that_its_file_names_is_merged(base, tuned, tmp_path):
    whole = tuned("lora")
    raw = _raw(base, "tuned-lora", steps=5, merge=True, config_path="configs/tuned/lora.yaml")
    raw["trainer"]["id"] = None
    merged = _finetune(raw)
    assert merged == whole.with_name("tuned-lora-merged")
    assert fingerprint(load_run(merged).model) == fingerprint(load_run(whole).model)


def test_one_process_merges(base, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for raw in (_raw(base, "in-two", merge=True), {"run": str(base / "runs" / "flow"), "merge": True}):
        with pytest.raises(UserError, match=r"--merge works in one process, but there are 2"):
            _finetune(raw)


def test_a_lora_run_knows_its_base(base, tuned, tmp_path):
    tuned("lora")
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("flow", "tuned-lora"):
        shutil.copytree(base / "runs" / name, moved / name)
    record = json.loads((moved / "tuned-lora" / "base.json").read_text())
    gone = {**record, "path": str(tmp_path / "nowhere")}
    (moved / "tuned-lora" / "base.json").write_text(json.dumps(gone))
    assert fingerprint(load_run(moved / "tuned-lora").model) == fingerprint(load_run(tuned("lora")).model)
    (tmp_path / "nowhere").mkdir()  # something else has the old name
    assert fingerprint(load_run(moved / "tuned-lora").model) == fingerprint(load_run(tuned("lora")).model)
    shutil.move(moved / "flow", moved / "renamed")
    with pytest.raises(UserError, match=r"nowhere is not a run"):
        load_run(moved / "tuned-lora")
    (tmp_path / "nowhere").rmdir()
    with pytest.raises(UserError, match=r"its base is missing.*nowhere"):
        load_run(moved / "tuned-lora")
    forged = {**record, "sha256": "0" * 64}
    (moved / "tuned-lora" / "base.json").write_text(json.dumps(forged))
    with pytest.raises(UserError, match=r"is not the base that this run was made from"):
        load_run(moved / "tuned-lora")


def test_a_start_without_a_step_binds_the_next_one_to_nothing(base, tuned, tmp_path):
    """Neither to its base nor to its tokenizer."""
    other = shutil.copytree(base / "runs" / "flow", tmp_path / "other")
    kept = checkpoint_steps(other / "checkpoints")
    run = Path(shutil.copytree(tuned("lora"), base / "runs" / "unbegun"))
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(run / name, ignore_errors=True)
    (run / "metrics.jsonl").unlink()
    record = json.loads((run / "base.json").read_text())
    (run / "base.json").write_text(json.dumps({**record, "checkpoint_step": 3}))
    (run / "tokenizer" / "origin.json").write_text('{"spec": "another"}')
    _finetune(_raw(base, "unbegun", "lora", train_steps=1, run=str(other)))
    found = json.loads((run / "base.json").read_text())
    assert (found["checkpoint_step"], found["path"]) == (kept[-1], str(other.resolve()))


@SLOW
def test_a_base_of_another_seed_is_refused(base, tuned, tmp_path):
    other = _train_base(base, "impostor", FLOW, seed=1)
    run = shutil.copytree(tuned("lora"), tmp_path / "run")
    record = json.loads((run / "base.json").read_text())
    (run / "base.json").write_text(json.dumps({**record, "path": str(other)}))
    with pytest.raises(UserError, match=r"is not the base that this run was made from"):
        load_run(run)


@SLOW
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 24, 93])
def test_one_run_serves_every_depth(base, steps):
    run = _finetune(_raw(base, f"depth-{steps}", "lora", steps=steps, train_steps=1))
    blocks = load_run(run).model.transformer.blocks
    assert blocks.Block.size == steps  # 93: 1 / (1 / 93) is below 93 in floating point


@SLOW
@pytest.mark.parametrize("mode", MODES)
def test_a_stopped_run_continues_bit_for_bit(base, mode):
    every = {"checkpointer": {"keep": [{"every": 2}], "save_interval": None}}
    whole = _finetune(_raw(base, f"whole-{mode}", mode, train_steps=5, trainer=every))
    broken = shutil.copytree(whole, base / "runs" / f"broken-{mode}")
    shutil.rmtree(broken / "checkpoints" / "step-4")  # as if killed after step 3, when step-2 was the newest
    config = yaml.safe_load((broken / "config.yaml").read_text())
    config["trainer"]["id"] = broken.name
    (broken / "config.yaml").write_text(yaml.safe_dump(config))
    assert checkpoint_steps(broken / "checkpoints") == [2]
    original, away = base / "runs" / "flow", base / "runs" / "away"
    if mode != "lora":  # their checkpoints hold everything, so the base may be gone
        original.rename(away)
    try:
        _finetune(_raw(base, broken.name, mode, train_steps=5, trainer=every))
    finally:
        if away.exists():
            away.rename(original)
    losses = [[(r["step"], r["train/loss"]) for r in read_metrics(p / "metrics.jsonl")] for p in (whole, broken)]
    assert losses[0] == losses[1]
    assert fingerprint(load_run(broken).model) == fingerprint(load_run(whole).model)


@SLOW
def test_levanter_models_are_bases_too(base):
    gpt2 = {"type": "gpt2", "hidden_dim": 16, "num_heads": 2, "num_layers": 2, "max_seq_len": 32}
    source = _train_base(base, "gpt2", gpt2, steps=2)
    raw = _raw(base, "gpt2-lora", "lora", steps=None, train_steps=1, run=str(source))
    run = _finetune(raw)
    before = read_metrics(run / "metrics.jsonl")[0]["finetune/eval_loss_before"]
    assert before == pytest.approx(read_metrics(source / "metrics.jsonl")[-1]["eval/loss"], abs=1e-4)
    assert np.isfinite(_loss(run))
    with pytest.raises(UserError, match="2 layers, which has only this depth"):
        _finetune({**raw, "steps": 3})
    with pytest.raises(UserError, match="ordinary layers"):
        _finetune({**raw, "mode": {"type": "flow"}})


@SLOW
def _official(base: Path, folder: Path) -> dict:
    """A base as the official code's Levanter wrote it: one zarr folder per array."""
    model = load_run(base / "runs" / "flow").model
    for name, array in official.to_arrays(model).items():
        path = folder / "step-10" / "model" / name.replace(".", "/")
        store = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}, "create": True}
        ts.open(store, dtype=array.dtype, shape=array.shape).result().write(array).result()
    return {"path": str(folder / "step-10"), "num_heads": 2, "steps": 3, "block": {"resid_pdrop": 0.1}}


def test_an_official_checkpoint_is_a_base_too(base, tmp_path):
    raw = _raw(base, "from-official", "lora", train_steps=1, run=None, official=_official(base, tmp_path))
    with pytest.raises(UserError, match=r"does not name its tokenizer.*data\.tokenizer"):
        _finetune(raw)
    run = _finetune({**raw, "data": {**raw["data"], "tokenizer": "byte"}})
    before = read_metrics(run / "metrics.jsonl")[0]["finetune/eval_loss_before"]
    assert before == pytest.approx(_loss(base / "runs" / "flow"), abs=1e-4)
    assert np.isfinite(_loss(run))


@SLOW
@pytest.mark.program
def test_an_official_checkpoint_is_a_base_in_a_run_of_several_processes(base, tmp_path):
    """Its arrays are read after the processes have met, which JAX asks for."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    met = {"coordinator_address": address, "num_processes": 1, "process_id": 0}
    raw = _raw(base, "met", "lora", train_steps=1, run=None, official=_official(base, tmp_path))
    raw["data"], raw["trainer"] = raw["data"] | {"tokenizer": "byte"}, raw["trainer"] | {"distributed": met}
    (tmp_path / "met.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "qkvflow.finetune_lm", "--config_path", str(tmp_path / "met.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def _char_tokenizer(folder: Path) -> Path:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = "abcdefghijklmnopqrstuvwxyz .\n"
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)} | {"<unk>": 29}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": "nowhere"}, "no run nowhere"),
        ({"run": None}, "give a base"),
        ({"mode": None}, "`mode` is missing"),
        ({"steps": 0}, "`steps` must be at least 1"),
        ({"vocab_size": 300}, r"`vocab_size` is 300.*vocabulary of 257"),
        ({"data": {"tokenizer": "CHARACTERS"}}, "trained with another one"),
        ({"mode": {"type": "lora", "target_modules": ["q_proj"]}}, r"'q_proj'.*attn\.c_attn"),
        ({"mode": {"type": "lora", "r": 0}}, "`mode.r` must be at least 1"),
        ({"mode": {"type": "lora", "dropout": 1.0}}, "`mode.dropout` must be"),
        ({"mode": {"type": "full"}, "merge": True}, "`merge`"),
        ({"model": {"type": "gpt2"}}, "`model` cannot be set"),
        ({"checkpoint_step": 5}, "no checkpoint of step 5; available: 11"),
        ({"trainer": {"id": "flow"}}, "would write into its base"),
        ({"trainer": {"initialize_from": "x"}}, "initialize_from"),
    ],
)
def test_mistakes_are_told_before_any_work(base, tmp_path, change, words):
    if change.get("data"):
        change = {"data": {"tokenizer": str(_char_tokenizer(tmp_path / "characters"))}}
    raw = _raw(base, "wrong")
    for key, value in change.items():
        raw[key] = {**raw[key], **value} if isinstance(raw.get(key), dict) and key != "mode" and value else value
    caches = sorted((base / "cache").rglob("*"))
    with pytest.raises(UserError, match=words):
        _finetune(raw)
    assert not (base / "runs" / "wrong").exists()
    assert sorted((base / "cache").rglob("*")) == caches


def test_an_unfinished_base_is_refused_unless_its_checkpoint_is_named(base, tmp_path):
    unfinished = shutil.copytree(base / "runs" / "flow", tmp_path / "unfinished")
    config = yaml.safe_load((unfinished / "config.yaml").read_text())
    config["trainer"]["num_train_steps"] = 100
    (unfinished / "config.yaml").write_text(yaml.safe_dump(config))
    raw = _raw(base, "from-unfinished", train_steps=1, run=str(unfinished))
    with pytest.raises(UserError, match=r"unfinished.*step-11, after 12 of 100 steps.*--checkpoint_step 11"):
        _finetune(raw)
    named, _, _ = settle(decode(FinetuneConfig, {**raw, "checkpoint_step": 11}))
    assert named.checkpoint_step == 11
    # Of a run that was stopped; its own training would remove it.
    record = unfinished / "checkpoints" / "step-11" / "metadata.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"is_temporary": True}))
    kept = _finetune({**raw, "checkpoint_step": 11})
    assert json.loads(record.read_text())["is_temporary"] is False
    assert load_run(kept).step == 0
    raw["trainer"]["id"] = "from-nothing"
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint yet"):
        _finetune(raw)


@SLOW
def test_lora_stands_on_whole_weights_only(base, tuned):
    with pytest.raises(UserError, match=r"Merge it first.*--merge"):
        _finetune(_raw(base, "twice", run=str(tuned("lora")), steps=None))
    with pytest.raises(UserError, match="5 times"):
        _finetune(_raw(base, "deeper", "full", run=str(tuned("full")), steps=7))


@SLOW
def test_a_run_stays_with_the_checkpoint_that_it_was_begun_from(base, tuned):
    raw = _raw(base, "tuned-full", "full", steps=5)
    assert tuned("full") == _finetune({**raw, "checkpoint_step": 11})
    with pytest.raises(UserError, match="was begun from checkpoint step-11 of its base, but `checkpoint_step` is 5"):
        _finetune({**raw, "checkpoint_step": 5})


def test_merging_alone_reads_nothing_of_a_training(base):
    raw = {"run": str(base / "runs" / "flow"), "merge": True, "steps": 4, "data": {"train": "x.txt"}}
    with pytest.raises(UserError, match=r"does not read data\.train, steps\. Leave them out"):
        _finetune(raw)


def test_merge_is_a_switch():
    assert parse(FinetuneConfig, ["--run", "a", "--merge"])[0].merge
    assert parse(FinetuneConfig, ["--merge", "--run", "a"])[0].merge
    assert not parse(FinetuneConfig, ["--merge", "false", "--run", "a"])[0].merge


# --- real processes ---------------------------------------------------------------------------------------


def _start(base: Path, name: str) -> subprocess.Popen:
    every = {"checkpointer": {"keep": [{"every": 10}], "save_interval": None}}
    raw = _raw(base, name, "lora", steps=4, train_steps=60, trainer=every)
    file = base / f"{name}.yaml"
    file.write_text(yaml.safe_dump(raw))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "qkvflow.finetune_lm", "--config_path", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=base)


@pytest.mark.slow
def test_killed_and_terminated_it_continues_bit_for_bit(base):
    whole = _start(base, "process-whole")
    assert whole.wait(200) == 0, whole.communicate()
    broken = base / "runs" / "process-broken"
    for sign, step in ((signal.SIGKILL, 25), (signal.SIGTERM, 40)):
        process = _start(base, broken.name)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError, IndexError):
                if read_metrics(broken / "metrics.jsonl")[-1]["step"] >= step:
                    break
            time.sleep(0.01)
        process.send_signal(sign)
        process.communicate(timeout=60)
        assert process.returncode == (-9 if sign == signal.SIGKILL else 143)
    last = _start(base, broken.name)
    _, stderr = last.communicate(timeout=200)
    assert last.returncode == 0, stderr
    assert "continues after step" in stderr
    losses = [
        [(r["step"], r["train/loss"]) for r in read_metrics(p / "metrics.jsonl")]
        for p in (base / "runs" / "process-whole", broken)
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(60))
    assert fingerprint(load_run(broken).model) == fingerprint(load_run(base / "runs" / "process-whole").model)
