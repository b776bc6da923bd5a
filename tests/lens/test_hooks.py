"""Laws of the hooks: they see the pass as it is, an edit changes what comes after it and nothing else."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionBackend
from levanter.models.gpt2 import Gpt2Config
from support.models import build, heavy, llama, random_tokens, small_config

from qkvflow import lens
from qkvflow.blocks import Gpt2BlockConfig, Inputs, SsmBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.lens.names import chosen, state_name
from qkvflow.lens.run import opened
from qkvflow.models import ControlConfig
from qkvflow.models.levanter_twin import enter
from qkvflow.named import map_named

VANILLA = Gpt2BlockConfig(num_heads=2, mlp_scale=2, attn_backend=AttentionBackend.VANILLA)
MODELS = {
    "flow": small_config(),
    "sequential": small_config("modulated", form="sequential", depth=DepthConfig(steps=4)),
    "split": small_config("basis", form="split"),
    "explicit attention": small_config("basis", block=VANILLA),
    "around, control, stages": small_config(
        "constant",
        prelude_layers=2,
        coda_layers=1,
        control=ControlConfig(dim=2, alpha=1.0),
        depth=DepthConfig(solver="rk4", steps=2),
    ),
    "grouped": small_config("basis", block=llama(num_heads=4, num_kv_heads=2)),
    "official": small_config("per_layer", block=llama("official")),
    "layers": small_config("per_layer", block=llama("sequential"), depth=DepthConfig(step_size="residual", steps=3)),
    "ssm": small_config("modulated", block=SsmBlockConfig(num_heads=2, state_size=4)),
    "selective": small_config("modulated", block=SsmBlockConfig(num_heads=2, selective=True, form="sequential")),
    "reversible": small_config(depth=DepthConfig(steps=3, adjoint="reversible", solver="midpoint")),
    "Levanter": Gpt2Config(max_seq_len=12, hidden_dim=16, num_heads=2, num_layers=2, mlp_scale=2),
}
LIGHT = ("flow", "grouped")
TOKENS = random_tokens()
run_with_cache, run_with_edits = eqx.filter_jit(lens.run_with_cache), eqx.filter_jit(lens.run_with_edits)


def plain(model, tokens=TOKENS, **inputs):
    return eqx.filter_jit(lambda m: m(tokens, **inputs))(opened(model)).array


def last(change):
    """An edit of the last position alone."""

    def edit(x):
        end = x.resolve_axis("position").size - 1
        return hax.concatenate("position", [x["position", :end], change(x["position", end:])])

    return edit


@pytest.mark.parametrize("name", [name if name in LIGHT else heavy(name) for name in MODELS])
def test_looking_changes_no_bit(name):
    """All places at once, by the same program as `names` lists; logits as without, compiled or not."""
    model = build(MODELS[name])
    logits, cache = run_with_cache(model, TOKENS)
    np.testing.assert_array_equal(logits.array, plain(model))
    assert set(cache) == set(lens.names(model))
    np.testing.assert_array_equal(cache["logits"].array, logits.array)
    eager = opened(model)(TOKENS)
    np.testing.assert_array_equal(lens.run_with_cache(model, TOKENS, "*.out")[0].array, eager.array)
    np.testing.assert_array_equal(run_with_edits(model, TOKENS, {}).array, plain(model))
    np.testing.assert_array_equal(run_with_edits(model, TOKENS, {"*": lambda x: x}).array, plain(model))


@pytest.mark.parametrize(
    "block", [None, llama("sequential"), SsmBlockConfig(num_heads=2)], ids=["gpt2", "llama", "ssm"]
)
def test_places_leave_no_trace_in_the_program(block, monkeypatch):
    """A training step traces to the same program where no place is named at all."""
    model = small_config(**({} if block is None else {"block": block})).build(
        hax.Axis("vocab", 64), key=jax.random.PRNGKey(0)
    )
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays):
        return jnp.sum(eqx.combine(arrays, static)(TOKENS).array)

    named = str(jax.make_jaxpr(jax.grad(loss))(arrays))
    monkeypatch.setattr(Inputs, "see", lambda self, place, value: value)
    monkeypatch.setattr(Inputs, "made", lambda self, place, make, *of: make(*of))
    monkeypatch.setattr(Inputs, "beside", lambda self, place, make, use, plain: plain)
    assert str(jax.make_jaxpr(jax.grad(loss))(arrays)) == named


def test_values_are_those_of_the_pass():
    """States are the trajectory; a step's places make its increment, by hand."""
    model = build(MODELS["flow"])
    _, cache = run_with_cache(model, TOKENS)
    states = eqx.filter_jit(lambda m: m.trajectory(TOKENS).array)(model)
    np.testing.assert_array_equal(cache.stack("state").array[1:], states)
    np.testing.assert_array_equal(cache["state.0.3333"].array, states[0])
    np.testing.assert_array_equal(cache["state.0"].array, cache["embed"].array)
    np.testing.assert_allclose(cache["1.out"].array, (cache["1.attn.out"] + cache["1.mlp.out"]).array, atol=1e-6)
    moved = cache["state.0.6667"] - cache["state.0.3333"]
    np.testing.assert_allclose(moved.array, cache["1.out"].array / 3, atol=1e-6)
    pattern = cache["2.attn.pattern"]
    q, k = cache["2.attn.q"], cache["2.attn.k"].rename({"position": "key_position"})
    scores = hax.dot(q, k, axis="head_size").rearrange(pattern.axes).array / np.sqrt(8)
    causal = np.tril(np.ones((12, 12), bool))
    np.testing.assert_allclose(pattern.array, jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), atol=1e-6)
    heads = hax.dot(pattern, cache["2.attn.v"].rename({"position": "key_position"}), axis="key_position")
    np.testing.assert_allclose(
        cache["2.attn.heads"].array, heads.rearrange(cache["2.attn.heads"].axes).array, atol=1e-6
    )
    assert cache.stack("attn.pattern").axis_size("layers") == 3
    np.testing.assert_array_equal(cache.stack("attn.pattern")["layers", 2].array, pattern.array)


def test_patched_head_by_hand():
    """The output of one head of one layer taken from another text, and what W_O makes of the difference."""
    model = build(MODELS["Levanter"])
    other = random_tokens(seed=3)
    names = ["1.attn.heads", "state.0.5", "state.1", "1.attn.out"]
    _, clean = run_with_cache(model, TOKENS, names)
    _, donor = run_with_cache(model, other, names)

    def patch(heads):
        return hax.concatenate("heads", [heads["heads", :1], donor["1.attn.heads"]["heads", 1:]])

    _, patched = run_with_cache(model, TOKENS, names, edits={"1.attn.heads": patch})
    block = map_named(lambda a: a["layers", 1], enter(model).transformer.flow.blocks.stacked)
    W = block.attn.c_proj.weight["heads", 1].rearrange(("head_size", "embed")).array
    difference = (donor["1.attn.heads"] - clean["1.attn.heads"])["heads", 1]
    a = clean["1.attn.out"].array + difference.rearrange(("batch", "position", "head_size")).array @ W
    np.testing.assert_allclose(patched["1.attn.out"].array, a, atol=1e-6)
    mid = hax.named(clean["state.0.5"].array + a, clean["state.1"].axes)
    by_hand = mid + eqx.filter_jit(lambda b, x: b.mlp(b.mlp_ln(x), Inputs()))(block, mid)
    np.testing.assert_allclose(patched["state.1"].array, by_hand.array, atol=1e-5)


PLACES = ("in", "attn.norm", "attn.q", "attn.v", "attn.pattern", "attn.heads", "mlp.pre", "mlp.post", "out")


@pytest.mark.parametrize("name", ["flow", heavy("layers"), heavy("sequential")])
@pytest.mark.parametrize(
    "place", ["attn.pattern", "mlp.post", *(heavy(p) for p in PLACES if p[-4:] not in ("tern", "post"))]
)
def test_an_edit_changes_what_comes_after_it_alone(name, place):
    """Of the last position in step 1: earlier steps and positions stay as they are, bit for bit."""
    if (name, place) == ("layers", "mlp.pre"):
        place = "mlp.gate"
    model = build(MODELS[name])
    steps = opened(model).transformer.flow.plan.steps
    logits, clean = run_with_cache(model, TOKENS, "state.*")
    changed, edited = run_with_cache(model, TOKENS, "state.*", edits={f"1.{place}": last(lambda x: x * 3 + 0.25)})
    for k, state in enumerate(edited):
        same = edited[state].array == clean[state].array
        assert same.all() if k <= 1 else same[:, :-1].all() and not same[:, -1].all(), state
    assert k == steps
    assert (changed.array[:, :-1] == logits.array[:, :-1]).all()
    assert not (changed.array[:, -1] == logits.array[:, -1]).any()


def test_an_edit_is_what_it_says():
    model = build(MODELS["around, control, stages"])
    direction = hax.random.normal(jax.random.PRNGKey(2), model.Embed)
    steer = {"state.0.5": lambda x: x + direction}
    _, clean = run_with_cache(model, TOKENS, "state.*")
    _, steered = run_with_cache(model, TOKENS, ["state.*", "1.0.in"], edits=steer)
    np.testing.assert_allclose(steered["state.0.5"].array, (clean["state.0.5"] + direction).array, atol=1e-6)
    np.testing.assert_array_equal(steered["1.0.in"].array, steered["state.0.5"].array)
    _, ablated = run_with_cache(
        model, TOKENS, "*mlp.out", edits={"0.*.mlp.out": lambda x: x * 0, "coda.*": lambda x: x}
    )
    assert all(bool((ablated[name].array == 0).all()) == name.startswith("0.") for name in ablated)
    # A pattern that attends to itself alone gives each head its own value.
    eye = lambda p: hax.named(jnp.broadcast_to(jnp.eye(12), p.array.shape), p.axes)  # noqa: E731
    _, own = run_with_cache(model, TOKENS, ["1.2.attn.*"], edits={"1.2.attn.pattern": eye})
    heads, v = own["1.2.attn.heads"], own["1.2.attn.v"]
    np.testing.assert_allclose(heads.array, v.rearrange(heads.axes).array, atol=1e-6)
    # A pair of the reversible scheme is moved as a whole, and its edits follow each other in their order.
    model = build(MODELS["reversible"])
    twice = {"state.1/3": lambda x: x + 1.0, "*.3333": lambda x: x * 2.0}  # the glob first
    _, clean = run_with_cache(model, TOKENS, "state.*")
    _, moved = run_with_cache(model, TOKENS, "state.*", edits=twice)
    np.testing.assert_allclose(moved["state.0.3333"].array, 2 * clean["state.0.3333"].array + 1, atol=1e-5)
    assert not (moved["state.1"].array == clean["state.1"].array).any()


def test_transformations():
    """jit with edits as arguments, gradients with respect to an edit and to the model, vmap over edits and texts."""
    model = build(MODELS["flow"])

    class Push(eqx.Module):
        by: hax.NamedArray

        def __call__(self, x):
            return x + self.by

    push = Push(hax.random.normal(jax.random.PRNGKey(2), model.Embed) * 0.1)
    logits = run_with_edits(model, TOKENS, {"state.0.3333": push})

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(push):
        return lens.run_with_edits(model, TOKENS, {"state.0.3333": push})["position", 5, "vocab", 0].sum().array

    along, h = gradient(push).by.array, 1e-2
    ends = [run_with_edits(model, TOKENS, {"state.0.3333": Push(push.by + s * h)}) for s in (1.0, -1.0)]
    difference = sum(s * x["position", 5, "vocab", 0].sum().array for s, x in zip((1, -1), ends, strict=True)) / (2 * h)
    np.testing.assert_allclose(along.sum(), difference, rtol=2e-2, atol=2e-3)

    @eqx.filter_jit
    @eqx.filter_grad
    def of_weights(model):
        return lens.run_with_cache(model, TOKENS, "1.mlp.post")[1]["1.mlp.post"].sum().array

    flow = of_weights(model).transformer.flow.weights
    assert max(float(jnp.abs(a).max()) for a in jax.tree.leaves(eqx.filter(flow, eqx.is_array))) > 0

    def pushed(v):
        return lens.run_with_edits(model, TOKENS, {"state.0.3333": Push(hax.named(v, "embed"))}).array

    several = jax.jit(jax.vmap(pushed))(jnp.stack([push.by.array, 2 * push.by.array]))
    np.testing.assert_allclose(several[0], logits.array, atol=1e-5)

    def cached(row):
        return lens.run_with_cache(model, hax.named(row, "position"), ["0.mlp.out", "state.*"])[1]

    by_row, whole = jax.vmap(cached)(TOKENS.array), run_with_cache(model, TOKENS, ["0.mlp.out", "state.*"])[1]
    np.testing.assert_allclose(by_row["0.mlp.out"].array, whole["0.mlp.out"].array, atol=1e-5)
    np.testing.assert_allclose(by_row["state.1"].array, whole["state.1"].array, atol=1e-5)
    np.testing.assert_allclose(by_row.stack("state").array, np.moveaxis(whole.stack("state").array, 0, 1), atol=1e-5)


def test_names_and_globs():
    model = build(MODELS["around, control, stages"])
    known = lens.names(model)
    assert known[0] == "embed"
    assert known[-1] == "logits"
    assert "state.0.5" in known
    assert lens.names(model, "*attn.pattern")[:3] == (
        "prelude.0.attn.pattern",
        "prelude.1.attn.pattern",
        "0.0.attn.pattern",
    )
    assert lens.names(model, "state.*") == ("state.0", "state.0.5", "state.1")
    assert lens.names(model, "state.1/2") == lens.names(model, "state.01/02") == ("state.0.5",)
    assert len(lens.names(model, "1.[13].shifted")) == 2
    deep = [state_name(step, 2000) for step in range(2001)]  # neighbours are as close as 0.0005
    assert chosen("state.1/3", deep) == {"state.0.3335"}
    assert tuple(eqx.filter_eval_shape(lens.run_with_cache, model, TOKENS, None)[1]) == known
    order = [known.index(name) for name in ("prelude.1.out", "state.0", "0.0.in", "1.3.out", "coda.0.in", "norm")]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda m: lens.run_with_cache(m, TOKENS, "1.mpl.out"),
            r"no activation '1.mpl.out'. Did you mean 1.mlp.out\?.*K.attn.q",
        ),
        (lambda m: lens.run_with_cache(m, TOKENS, "3.mlp.out"), r"for K = 0\.\.2"),
        (lambda m: lens.run_with_cache(m, TOKENS, "state.0.5"), r"state.0.3333"),
        (lambda m: lens.run_with_cache(m, TOKENS, [3]), r"a name must be a text"),
        (lambda m: lens.run_with_cache(m, TOKENS, 3), r"a name must be a text"),
        (lambda m: lens.names(m, None), r"a name must be a text"),
        (lambda m: lens.names(m, "state.1/0"), r"no activation 'state.1/0'"),
        (
            lambda m: lens.run_with_edits(m, TOKENS, {"1.mlp.out": 0.0}),
            r"edit of 1.mlp.out must be a function.* got 0.0",
        ),
        (lambda m: lens.run_with_edits(m, TOKENS, {"1.mlp.out": lambda x: x["embed", :3]}), r"axes .*embed 16"),
        (lambda m: lens.run_with_edits(m, TOKENS, {"1.mlp.out": lambda x: 0.0}), r"returned float"),
        (lambda m: lens.run_with_cache(m, TOKENS, "1.mlp.out")[1].stack("attn.q"), r"no steps of 'attn.q'.*mlp.out"),
        (lambda m: lens.names(m.with_depth(DepthConfig(solver="heun", rtol=1e-2, atol=1e-2))), r"on_grid"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(UserError, match=words):
        call(build(MODELS["flow"]))
    with pytest.raises(KeyError, match="not requested"):
        lens.run_with_cache(build(MODELS["flow"]), TOKENS, "embed")[1]["norm"]
