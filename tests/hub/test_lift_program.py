"""The program: a run or a folder becomes a flow that is a run; what cannot be lifted leaves nothing."""

import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jmp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.models import build, small_config

from qkvflow import convert, eval_lm, finetune_lm, lift
from qkvflow.cli import parse
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.hub.native import obstacle
from qkvflow.models import lifting
from qkvflow.models.levanter_twin import enter
from qkvflow.models.lifting import aligned
from qkvflow.runs import load_run
from qkvflow.runs.config import FinetuneConfig
from qkvflow.tracking import read_metrics
from qkvflow.weights import BasisConfig

OLD = Path(__file__).parents[1] / "support" / "old_runs"
TEXT = ["--data.train", str(OLD / "text.txt"), "--data.validation_fraction", "0.2", "--data.cache_dir", "cache"]


def run_lift(base, run, *words, basis="piecewise", dim=2):
    weights = f"{{type: basis, basis: {basis}, dim: {dim}}}"
    words = ["--base", str(base), "--run", str(run), "--weights", weights, *words]
    return lift.main(parse(lift.LiftConfig, words)[0])


def test_a_run_becomes_a_flow(tmp_path, monkeypatch, capfd):
    """The losses that it tells are those of the runs; with as many pieces as layers the weights are the layers."""
    monkeypatch.chdir(tmp_path)
    made = run_lift(OLD / "gpt2", "runs/lifted", *TEXT, "--loss_by_k", "[2, 1]")
    report = json.loads((made / "lift.json").read_text())
    out = capfd.readouterr().out
    assert [row["k"] for row in report["loss"]["by_k"]] == [1, 2]
    by_k = report["loss"]["by_k"][1]
    assert by_k["aligned"] == pytest.approx(report["loss"]["base"], abs=1e-4)
    assert by_k["not_aligned"] == pytest.approx(report["loss"]["base"], abs=1e-4)
    assert f"loss of the base {report['loss']['base']:.4f}" in out
    assert report["roughness"]["after"]["all"] < report["roughness"]["before"]["all"]
    assert report["error"]["all"] == 0
    read = eval_lm.main(eval_lm.EvalConfig("runs/lifted", batch_size=4))[0]
    assert read.steps == 2
    assert read.loss == pytest.approx(report["loss"]["base"], abs=1e-4)
    config, model, _ = load_run("runs/lifted")
    assert config.model.weights == BasisConfig("piecewise", 2)
    assert config.model.depth.step_size == "residual"
    assert obstacle(model.discretise().config) is None  # it leaves as a native folder
    expected = aligned(enter(load_run(OLD / "gpt2").model))
    for a, b in zip(*(filter(eqx.is_array, jax.tree.leaves(m)) for m in (model.discretise(), expected)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_functions_that_16_bits_cannot_read_are_told(tmp_path):
    """fp32 reads the layers off large coefficients that cancel, bf16 does not."""
    model = build(small_config("per_layer", form="sequential", depth=DepthConfig(steps=12, step_size="residual")))
    for basis, is_lost in (("chebyshev", True), ("cosine", False)):
        flow, found = lifting.lift(model, BasisConfig(basis, 12))
        computed = lift._computed(flow, model, jmp.get_policy("p=f32,c=bf16"))
        assert found.error < 1e-4
        assert (computed > lift._SHORT_ROUNDING) == is_lost
        assert lift._computed(flow, model, jmp.get_policy("f32")) is None


def test_a_folder_is_the_run_that_it_came_from(tmp_path):
    folder = convert.main(
        parse(convert.ConvertConfig, ["--run", str(OLD / "gpt2"), "--to_hf", str(tmp_path / "hf")])[0]
    )
    options = ["--align", "false"]
    made = [run_lift(base, tmp_path / name, *options, dim=1) for base, name in ((folder, "a"), (OLD / "gpt2", "b"))]
    models = [load_run(run).model for run in made]
    for a, b in zip(*(filter(eqx.is_array, jax.tree.leaves(m)) for m in models), strict=True):
        np.testing.assert_array_equal(a, b)
    report = json.loads((made[0] / "lift.json").read_text())
    assert report["roughness"]["after"] == report["roughness"]["before"]
    assert "loss" not in report


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 3])
def test_fine_tuning_heals(tmp_path, monkeypatch, steps):
    """At the depth of the layers, and at another one."""
    monkeypatch.chdir(tmp_path)
    made = run_lift(OLD / "gpt2", "runs/lifted", dim=1, basis="cosine")
    words = ["--run", str(made), "--mode", "{type: flow}", "--steps", str(steps), *TEXT]
    words += ["--trainer.id", "healed", "--trainer.num_train_steps", "12", "--trainer.train_batch_size", "4"]
    words += ["--trainer.steps_per_eval", "100", "--optimizer.learning_rate", "3e-3", "--optimizer.warmup", "1"]
    healed = finetune_lm.main(parse(FinetuneConfig, words)[0])
    records = read_metrics(Path(healed) / "metrics.jsonl")
    assert records[-1]["eval/loss"] < records[0]["finetune/eval_loss_before"] - 0.05
    assert load_run(healed).config.model.depth.steps == steps


def cut(folder):
    arrays = load_file(folder / "model.safetensors")
    save_file({n: a for n, a in arrays.items() if "wte" not in n}, folder / "model.safetensors", {"format": "pt"})


def test_what_cannot_be_lifted_leaves_nothing(tmp_path):
    folder = convert.main(
        parse(convert.ConvertConfig, ["--run", str(OLD / "gpt2"), "--to_hf", str(tmp_path / "hf")])[0]
    )
    cut(folder)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "bert"}')
    damaged = Path(shutil.copytree(OLD / "gpt2", tmp_path / "damaged"))
    for file in (damaged / "checkpoints" / "step-3" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    before = sorted(tmp_path.iterdir())
    for base, message, options in (
        (folder, "wte.weight is missing", {}),
        (foreign, "bert", {}),
        (damaged, "damaged", {}),
        (tmp_path / "nothing", "there is no run", {}),
        (OLD / "flow", "already a flow", {}),
        (OLD / "gpt2", "3 functions of time cannot be determined from 2 layers", {"dim": 3}),
    ):
        with pytest.raises(UserError, match=message):
            run_lift(base, tmp_path / "made", **options)
    with pytest.raises(UserError, match="5 functions of time cannot be determined from 2 layers"):
        run_lift(OLD / "gpt2", tmp_path / "made", "--loss_by_k", "[1, 5]")
    for name in ("batch_size", "max_eval_batches"):
        with pytest.raises(UserError, match=f"--{name} is only for the losses of --loss_by_k"):
            run_lift(OLD / "gpt2", tmp_path / "made", f"--{name}", "2")
    with pytest.raises(UserError, match="already exists"):
        run_lift(OLD / "gpt2", foreign)
    with pytest.raises(UserError, match=r"name of the run \(--run\) is 'my flow', but"):
        run_lift(tmp_path / "nothing", tmp_path / "my flow")
    generated = ["--base", str(OLD / "gpt2"), "--run", str(tmp_path / "made"), "--weights", "{type: generated}"]
    with pytest.raises(UserError, match="type generated cannot be fitted"):
        lift.main(parse(lift.LiftConfig, generated)[0])
    assert sorted(tmp_path.iterdir()) == before
