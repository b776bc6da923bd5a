"""The experiment on gradient flow: norms are those of the gradient before clipping, and its tests can fail."""

import dataclasses
import json
import math
import re
import shutil

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.models.lm_model import LmExample
from levanter.trainer import Trainer
from levanter.utils.tree_utils import inference_mode
from support.models import build, random_tokens, small_config
from support.studies import ABOUT, ORIGIN, smoke

from experiments import jobs
from experiments.cost import cost_of
from experiments.gradient_flow import __main__ as program
from experiments.gradient_flow.norms import RULES, clipped, component_norms, passes
from experiments.gradient_flow.plan import arms
from experiments.gradient_flow.readings import (
    Changed,
    Reader,
    Refined,
    centred_logits,
    control_effect,
    left_out,
    refine,
)
from experiments.gradient_flow.report import GradientFlow, _smoothed, matched
from experiments.gradient_flow.report import shares as shares_of
from experiments.jobs import Job
from experiments.recipes import Recipe
from experiments.records import read
from experiments.statistics import holm
from qkvflow.blocks import Inputs
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models.config import ControlConfig
from qkvflow.tracking import read_metrics
from qkvflow.weights import BasisConfig, at

STUDY = program.STUDY


def planned(tmp_path, **changes) -> dict[str, Recipe]:
    """The recipes by system."""
    config = smoke(STUDY, **changes)
    return {a.label: a.recipe for a in arms(config, config.text.prepare(tmp_path / "texts"), tmp_path / "runs")}


def flow_model(steps=3, weights="constant", **kwargs):
    depth = DepthConfig(steps=steps, endpoint="left")
    return build(small_config(weights, depth=depth, control=ControlConfig(), **kwargs))


def layers_model(layers=2):
    return build(small_config("per_layer", "sequential", depth=DepthConfig(steps=layers, step_size="residual")))


def is_named(x) -> bool:
    return isinstance(x, hax.NamedArray)


def example() -> LmExample:
    tokens = random_tokens()
    return LmExample(tokens, hax.ones(tokens.axes))


def test_components_are_roots_of_sums_of_squares():
    record = {"step": 3, "train/loss": 2.0, "grad/norm/total": 13.0}
    record |= {"grad/norm/embeddings.a": 3.0, "grad/norm/embeddings.b": 4.0, "grad/norm/transformer.flow.x": 12.0}
    assert component_norms(record) == {"embeddings": 5.0, "flow": 12.0, "total": 13.0}
    with pytest.raises(ValueError, match="other belongs to no component"):
        component_norms(record | {"grad/norm/other": 1.0})


def test_steps_are_counted_by_both_rules():
    norms = np.array([0.0, 1e-7, 1e-5, 1.0, 101.0, math.nan, math.inf])
    totals = np.array([1e-5, 1e-4, 1.0, 1.0, 102.0, math.nan, math.inf])
    found = [rule(norms, totals).sum() for rule in RULES.values()]
    assert found == [2, 2 + 1, 2, 2]  # 0 and 1e-7; also 1e-5 of 1; 101 and inf; nan and inf
    assert clipped(np.array([0.5, 3.0]), np.array([0.8, 6.0]), 1.0).tolist() == [0.5, 0.5]
    assert clipped(np.array([3.0]), np.array([6.0]), None).tolist() == [3.0]


def test_the_seeds_rule_can_say_both():
    assert passes(1.05, 0.02)
    assert not passes(1.15, 0.02)
    assert not passes(1.05, 0.005)
    assert not passes(math.nan, 0.02)
    assert passes(1.05, None)  # no flow: its first half alone


def test_systems_differ_in_their_middle_alone(tmp_path):
    overrides = {"trainer": {"num_train_steps": 7}, "model": {"max_seq_len": 64}}
    found = planned(tmp_path, overrides=overrides, final_steps=2)
    for recipe in found.values():
        assert recipe.config.trainer.num_train_steps == 7
        assert "report.txt" not in json.dumps(recipe.raw)
        assert recipe.but({"model": None}) == found["hybrid"].but({"model": None})
    model = {name: recipe.raw["model"] for name, recipe in found.items()}
    differing = {key for key in model["hybrid"] if model["hybrid"][key] != model["baseline"][key]}
    assert differing == {"block", "weights", "depth", "control"}
    # Prelude, layers in place of the flow and coda are the six layers of the ordinary model.
    ordinary = Recipe.of("configs/wikitext2/standard.yaml", {"model": {"max_seq_len": 64}})
    assert cost_of(found["baseline"]).parameters == cost_of(ordinary).parameters
    assert cost_of(found["shallow"]).evaluations == 4
    assert {key for key in model["hybrid"] if model["hybrid"][key] != model["untied"][key]} == {"weights"}
    assert cost_of(found["untied"]).evaluations == cost_of(found["hybrid"]).evaluations == 2 + 4 + 2
    differing = {key for key in model["hybrid"] if model["untied"][key] != model["quarters"][key]}
    assert differing == {"weights", "depth", "control"}
    quarters = found["quarters"].config.model
    assert cost_of(found["quarters"]).evaluations == 2 + 8 + 2
    assert quarters.control.alpha * quarters.plan.step == 1 / 4  # of the two layers of length 1, in the same steps


@pytest.mark.slow
def test_what_is_around_the_middle_begins_alike(tmp_path):
    models = {}
    for name in ("hybrid", "baseline"):
        config = planned(tmp_path)[name].config.model
        models[name] = eqx.filter_jit(lambda key, c=config: c.build(hax.Axis("vocab", 64), key=key))(
            jax.random.PRNGKey(3)
        )
    for part in (
        lambda m: m.embeddings,
        lambda m: m.transformer.prelude.weights.blocks.stacked,
        lambda m: m.transformer.coda.weights.blocks.stacked,
    ):
        one, other = (jax.tree.leaves(eqx.filter(part(models[name]), eqx.is_array)) for name in ("hybrid", "baseline"))
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_cannot_be_is_refused(tmp_path):
    for changes, message in (
        ({"systems": ["hybrid"]}, "must hold hybrid and baseline"),
        ({"systems": ["hybrid", "baseline", "deep"]}, "Choices: baseline, hybrid, shallow"),
        ({"refinements": [1]}, r"`refinements\[0\]` must be at least 2"),
        ({"coarse": [0]}, r"`coarse\[0\]` must be at least 1"),
        ({"coarse": []}, "`coarse`, .* must each have at least one"),
        ({"steps": []}, "`steps` and `refinements` must each have at least one"),
        ({"solvers": ["magic"]}, "magic"),
    ):
        with pytest.raises(UserError, match=message):
            smoke(STUDY, **changes).check()
    for changes, message in (
        ({"hybrid": None}, "a configuration to begin from is missing"),
        ({"hybrid": "configs/wikitext2/standard.yaml"}, "functions of time"),
        ({"overrides": {"model": {"coda_layers": 0}}, "final_steps": 2}, "`coda_layers`; it has 2 and 0"),
        ({"overrides": {"model": {"depth": {"solver": "rk4"}}}}, "Euler on a fixed grid"),
        ({"final_steps": 31}, "of 30 steps in all"),
        ({"coarse": [1, 4]}, "fewer than the 4 steps of the flow"),
        ({"overrides": {"model": {"depth": {"step_size": "residual"}}}, "solvers": ["euler"]}, "steps have length 1"),
    ):
        with pytest.raises(UserError, match=message):
            planned(tmp_path, **changes)


def test_the_rule_of_invariance_can_say_both():
    """A middle that does nothing does not pass, however little a reading moves."""
    for gone, shares, expected in ((0.2, [0.05, 0.09], True), (0.2, [0.05, 0.11], False), (0.0, [0.0], False)):
        refined = [Changed(1.0, gone * share, factor=2, share=share) for share in shares]
        assert Refined(0.5, Changed(1.0, gone), refined).passes == expected


@pytest.mark.slow
def test_the_negative_control_fails_and_a_flow_with_small_steps_passes():
    """Layers whose outputs are far larger than their inputs are no flow."""
    layers, flow = (
        Reader(model, lambda model: 0.0, example()).refined([2]) for model in (layers_model(), flow_model(steps=64))
    )
    assert layers.refined[0].share > 0.1
    assert not layers.passes
    assert flow.left_out.divergence > 0.01
    assert flow.passes


def test_untied_layers_are_evaluated_as_the_flow():
    """They are constant on each interval; as trained nothing changes, and a longer step skips a layer."""
    model = flow_model(2, BasisConfig("piecewise", 2, init="independent"))
    layers = lambda m: m.transformer.flow.weights.block.attn.c_attn.coefficients.weight.array  # noqa: E731
    for k, t in ((0, 0.0), (0, 0.49), (1, 0.5), (1, 1.0)):
        block = at(model.transformer.flow.weights, t).block
        np.testing.assert_array_equal(block.attn.c_attn.weight.array, layers(model)[k])
    found = Reader(model, lambda model: 0.0, example()).refined([], [1, 2])
    assert [r.steps for r in found.coarse] == [1, 2]
    assert found.coarse[0].share > 0.0
    assert (found.coarse[1].divergence, found.coarse[1].share) == (0.0, 0.0)
    one_step = model.with_depth(model.config.depth.on_grid(1))
    other = eqx.tree_at(layers, one_step, layers(model).at[1].set(0.0))
    np.testing.assert_array_equal(*(centred_logits(m, example().tokens) for m in (one_step, other)))


@pytest.mark.slow
@pytest.mark.parametrize("m", [2, 3])
def test_refined_layers_are_applied_m_times(m):
    """x + B(x)/m, m times for each layer, by hand."""
    model, tokens = layers_model(), random_tokens()
    x = model.embeddings(tokens)
    for k in range(2):
        block = jax.tree.map(
            lambda a, k=k: a["layers", k] if is_named(a) else a, model.transformer.flow.blocks.stacked, is_leaf=is_named
        )
        for _ in range(m):
            x = x + block(x, Inputs.of(example().attn_mask)) / m
    logits = hax.dot(model.transformer.norm(x), model.get_lm_head(), axis="embed").rearrange((..., "vocab")).array
    expected = logits - logits.mean(-1, keepdims=True)
    np.testing.assert_allclose(centred_logits(refine(model, m), tokens), expected, atol=2e-5)


@pytest.mark.slow
def test_left_out_is_the_identity():
    model, tokens = flow_model(), random_tokens()
    logits = hax.dot(model.transformer.norm(model.embeddings(tokens)), model.get_lm_head(), axis="embed")
    logits = logits.rearrange((..., "vocab")).array
    np.testing.assert_allclose(
        centred_logits(left_out(model), tokens), logits - logits.mean(-1, keepdims=True), atol=2e-5
    )


@pytest.mark.slow
def test_a_control_without_a_matrix_has_no_effect():
    model, key = flow_model(), jax.random.PRNGKey(0)
    assert control_effect(model, random_tokens(), 2, key=key).difference > 1e-3
    deaf = eqx.tree_at(lambda m: m.transformer.flow.weights.control.weight.array, model, replace_fn=jnp.zeros_like)
    assert set(dataclasses.astuple(control_effect(deaf, random_tokens(), 2, key=key))) == {0.0}


@pytest.mark.slow
def test_norms_are_those_of_the_gradient_before_clipping(tmp_path, monkeypatch):
    """Of the first two steps, with a limit far below the norm, against jax.grad on the same model and batch."""
    optimizer = {"learning_rate": 1e-2, "lr_schedule": "constant", "warmup": 0, "max_grad_norm": 1e-3}
    overrides = {
        "model": {"hidden_dim": 16, "max_seq_len": 16, "prelude_layers": 1, "coda_layers": 1},
        "trainer": {"train_batch_size": 2, "num_train_steps": 2},
        "optimizer": optimizer,
    }
    recipe, seen = planned(tmp_path, overrides=overrides, final_steps=1, evaluations=1)["hybrid"], []
    recipe = recipe.but({"trainer": {"id": "hybrid", "seed": 1}})
    step = Trainer.train_step

    def capture(self, state, *batch, **kwargs):
        seen.append(jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, (state.model, batch[0])))
        return step(self, state, *batch, **kwargs)

    monkeypatch.setattr(Trainer, "train_step", capture)
    jobs.train(recipe)
    records = read_metrics(recipe.run.metrics)
    assert len(records) == len(seen) == 2
    for record, (model, batch) in zip(records, seen, strict=True):
        loss = lambda m, batch=batch: m.compute_next_token_loss(batch).scalar()  # noqa: E731
        gradient = eqx.filter_jit(eqx.filter_grad(loss))(inference_mode(model, False))
        parts = {
            "embeddings": gradient.embeddings,
            "prelude": gradient.transformer.prelude,
            "flow": gradient.transformer.flow,
            "coda": (gradient.transformer.coda, gradient.transformer.norm),
            "total": gradient,
        }
        found = component_norms(record)
        assert found.keys() == parts.keys()
        for name, part in parts.items():
            squares = sum(float((x**2).sum()) for x in jax.tree.leaves(eqx.filter(part, eqx.is_inexact_array)))
            assert found[name] == pytest.approx(math.sqrt(squares), rel=1e-4), name
        assert found["total"] > 1e-2


def made_up(seeds=(1, 2, 3), untied=()) -> GradientFlow:
    steps, results, systems = 40, [], ["baseline", "hybrid", "shallow", *untied]
    for seed in seeds:
        for shift, name in enumerate(systems):
            loss = [3.0 - k / steps + 0.01 * seed * (1 + shift // 3) + 0.1 * shift for k in range(steps)]
            norms = {part: [0.5 + 0.01 * seed] * steps for part in ("embeddings", "prelude", "flow", "coda", "total")}
            r = {"system": name, "seed": seed, "loss": loss, "norms": norms, "clip": 0.4, "parameters": 10}
            r["report_loss"] = loss[-1]
            refined = [
                {"factor": m, "loss": 2.5, "divergence": 0.1, "share": 0.2 + 0.01 * (5 + seed * m) * (shift == 1)}
                for m in (2, 4)
            ]
            if name != "shallow":
                gone = {"loss": 2.6, "divergence": 0.5}
                r["refined"] = {"displacement": 0.3, "left_out": gone, "refined": refined}
            if untied and name in ("hybrid", "untied", "quarters"):
                numbers = {"loss": 2.5, "divergence": 0.2}
                length = 2 if name == "quarters" else 1
                r["refined"]["coarse"] = [
                    {"steps": length * n, "share": 0.3 + 0.01 * seed**n * shift, **numbers} for n in (1, 2)
                ]
            if name == "hybrid":
                numbers = {"loss": 2.5, "displacement": 0.3, "divergence": 0.02}
                grid = [(solver, n) for solver in ("euler", "rk4") for n in (2, 8)]
                r["readings"] = [{"solver": s, "steps": n, "evaluations": n, **numbers} for s, n in grid]
                effect = {"difference": 0.1, "divergence": 0.2, "loss_change": 0.0}
                r |= {"alpha": 0.2, "control_gradient": 0.0, "control": {"trained": effect, "untrained": effect}}
            results.append(r)
    protocol = {"flow_steps": 4, "alpha": 0.1, "seeds": list(seeds), "num_train_steps": steps, "optimizer": "o"}
    protocol |= {"weight_decay_on": "all", "final_steps": 5, "refinements": [2, 4]}
    protocol |= {"systems": systems} if untied else {}
    return read(GradientFlow, {"protocol": protocol | ABOUT, "unigram": 2.8, "results": results, **ORIGIN})


def test_tables_come_from_the_record_alone():
    text = STUDY.filled_page(made_up())
    assert "n = 3" in text
    assert "hybrid 0 of 3 seeds, baseline 0 of 3 seeds" in text
    assert "| shallow | 1.095 ± " in text  # 2.295 / 2.095 in the second seed
    assert "| 3 of 3 seeds |" in text
    assert "0 of 120 | 0 of 120 | 0 of 120 | 0 of 120" in text
    assert "hybrid 1.000 ± 0.000" in text  # all steps are clipped


def test_a_step_that_is_not_finite_is_counted_and_leaves_the_other_numbers_as_they_are():
    """The optimizer skips it: an overflow of the flow's gradient in one of 40 steps, and a loss that is no number."""
    record = made_up()
    broken = next(r for r in record.results if (r.system, r.seed) == ("hybrid", 2))
    broken.norms["flow"][7] = broken.norms["total"][7] = math.inf
    broken.norms["flow"][8] = broken.norms["total"][8] = math.nan
    text = STUDY.filled_page(record)
    before = "0.52 ± 0.025 | 0.52 ± 0.025 | 1 ± 0"
    assert f"| hybrid | flow | {before} | 0 of 120 | 0 of 120 | 1 of 120 | 2 of 120 |" in text
    assert f"| hybrid | coda | {before} | 0 of 120 | 0 of 120 | 0 of 120 | 0 of 120 |" in text
    assert "nan" not in text
    assert "hybrid 1.000 ± 0.000" in text  # all finite steps are clipped
    broken.loss[-1] = math.nan
    (verdict,) = re.findall(r"\| hybrid \| 1\.0.* seeds \|", STUDY.filled_page(record))
    assert verdict.endswith("0.400 ± 0.000 | 3 of 3 seeds |")
    for r in record.results:
        r.curve[:] = [(20, 2.5), (40, math.nan if r is broken else 2.0)]
    assert [name for name, _ in STUDY.figures(record)] == ["gradient_flow", "invariance"]


def test_a_window_of_steps_has_the_mean_of_its_finite_ones():
    found = _smoothed(np.array([1.0, 3.0, math.nan, math.inf, 5.0]), 2)
    np.testing.assert_array_equal(found, [2.0, 3.0, math.nan, 5.0])


def test_readings_of_smaller_steps_are_one_family():
    record = made_up()
    found = shares_of(record)
    tests = {at: contrast for at, contrast in found.items() if at[1] == "hybrid"}
    assert len(tests) == len(record.protocol.refinements) > 1
    by_hand = holm([contrast.difference.p for contrast in tests.values()])
    assert by_hand[0] > tests[2, "hybrid"].difference.p  # corrected
    np.testing.assert_equal([contrast.p_holm for contrast in tests.values()], by_hand)


def test_flow_and_untied_layers_are_compared_at_the_same_steps():
    """In a family of its own; a page without untied layers says that this is missing."""
    record, missing = made_up(untied=["untied"]), "we did not do this"
    tests = {n: contrast for (n, name), contrast in matched(record).items() if contrast.difference}
    assert sorted(tests) == [1, 2, 8, 16]
    np.testing.assert_equal([c.p_holm for c in tests.values()], holm([c.difference.p for c in tests.values()]))
    assert tests[1].difference.mean == pytest.approx(-0.04)  # 0.02 (1 - 3)
    text = STUDY.filled_page(record)
    rows = [line.split(" | ") for line in text.partition("| h | flow | untied layers | layers |")[2].splitlines()[2:]]
    assert [row[0] for row in rows] == ["| 1", "| 1/2", "| 1/4", "| 1/8", "| 1/16"]
    assert rows[0][1:5] == ["0.320 ± 0.025", "0.360 ± 0.075", "0.000 ± 0.000", "-0.040 ± 0.050"]
    assert rows[2][1:3] == ["0.000 ± 0.000"] * 2  # as trained
    assert missing not in text
    assert "| untied | steps: 1 | " in text
    old = STUDY.filled_page(made_up())
    assert missing in old
    assert "untied" not in old


def test_quarters_of_layers_stand_beside_them_without_a_test():
    without, record = made_up(untied=["untied"]), made_up(untied=["untied", "quarters"])
    text = STUDY.filled_page(record)
    table = text.partition("| h | flow | untied layers | quarters of layers | layers |")[2].splitlines()[2:]
    rows = [line.split(" | ") for line in table]
    assert [row[0] for row in rows] == ["| 1", "| 1/2", "| 1/4", "| 1/8", "| 1/16"]
    assert [row[3] for row in rows[:3]] == ["0.380 ± 0.099", "0.487 ± 0.402", "0.000 ± 0.000"]  # 2 and 4 of 8 steps
    tests = [{at: c.p_holm for at, c in matched(r).items() if c.difference} for r in (without, record)]
    np.testing.assert_equal(*tests)
    assert "Quarters of layers are 8 untied layers" in text
    assert "Quarters of layers" not in STUDY.filled_page(without)


@pytest.mark.slow
def test_smoke_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Stopped after two trainings, given again, and drawn again."""
    with_readings, asked = program.with_readings, []

    class Stopped(Exception):
        pass

    def stopping(config, job: Job, *args):
        if len(asked) == 2:
            raise Stopped
        asked.append(job.name)
        return with_readings(config, job, *args)

    config = smoke(STUDY, run_dir=str(tmp_path), systems=["hybrid", "baseline"])
    with monkeypatch.context() as patch:
        patch.setattr(program, "with_readings", stopping)
        with pytest.raises(Stopped):
            STUDY.carry_out(config)
    first = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in asked}
    record = STUDY.carry_out(config)
    assert {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in asked} == first
    assert [(r.system, r.seed) for r in record.results] == [
        (system, seed) for seed in (1, 2) for system in ("hybrid", "baseline")
    ]
    for r in record.results:
        assert len(r.loss) == 30
        squares = sum(np.square(r.norms[name]) for name in ("embeddings", "prelude", "flow", "coda"))
        np.testing.assert_allclose(np.sqrt(squares), r.norms["total"], rtol=1e-4)
    hybrid = record.results[0]
    assert hybrid.control_gradient == 0.0  # the matrix that a control passes through was never trained
    assert hybrid.control["untrained"].difference > 0.0
    assert record.protocol.counts["report"]["1"] > record.protocol.counts["report"]["3"]
    text = (tmp_path / "results" / "results.md").read_text()
    shutil.rmtree(tmp_path / "texts")
    STUDY.carry_out(smoke(STUDY, run_dir=str(tmp_path), redraw=True))
    assert (tmp_path / "results" / "results.md").read_text() == text
