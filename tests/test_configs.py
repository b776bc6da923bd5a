"""Every YAML in configs/ parses, and its model builds (shapes only: the large ones would not fit)."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
import yaml
from levanter.trainer_state import trainables_only
from support.configs import FILES, FINETUNES, IDS, MESHES, ROOT, config_of

from qkvflow.cli import parse
from qkvflow.runs.config import FinetuneConfig, TrainConfig
from qkvflow.runs.directory import run_id
from qkvflow.runs.modes import LoraMode


def vocabulary(config) -> hax.Axis:
    return hax.Axis("vocab", config.vocab_size or (257 if config.data.tokenizer == "byte" else 50257))


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_parses_and_builds(path):
    config = config_of(path)
    vocab = vocabulary(config)
    model = eqx.filter_eval_shape(lambda: config.model.build(vocab, key=jax.random.PRNGKey(0)))
    Batch, Pos = hax.Axis("batch", 1), config.model.max_Pos
    tokens = eqx.filter_eval_shape(lambda: hax.zeros((Batch, Pos), dtype=jnp.int32))
    logits = eqx.filter_eval_shape(lambda m, t: m(t, key=jax.random.PRNGKey(0)), model, tokens)
    assert {a.name: a.size for a in logits.axes} == {"batch": 1, "position": Pos.size, "vocab": vocab.size}
    config.build_optimizer()


@pytest.mark.parametrize("path", MESHES, ids=lambda p: p.stem)
def test_meshes_are_values_of_the_trainers_mesh(path):
    """On 8 devices they divide what they say; what a file says in its first line works."""
    first = path.read_text().splitlines()[0]
    assert first == f"# --trainer.mesh @configs/mesh/{path.name}"
    words = ["--config_path", str(ROOT / "configs" / "quickstart.yaml"), "--trainer.mesh", f"@{path}"]
    config, raw = parse(TrainConfig, words)
    assert raw["trainer"]["mesh"] == yaml.safe_load(path.read_text())
    sizes, _ = config.trainer.mesh.axis_shapes(8, 1)
    mapped = {**config.trainer.mesh.resolved_compute_mapping, **config.trainer.mesh.resolved_param_mapping}
    names = {axis for over in mapped.values() for axis in ([over] if isinstance(over, str) else over)}
    assert {axis for axis, size in sizes.items() if size > 1} <= names


@pytest.mark.parametrize("path", FINETUNES, ids=lambda p: p.stem)
def test_finetunes_parse_and_build_on_their_base(path):
    config = parse(FinetuneConfig, ["--config_path", str(path)])[0]
    bases = {f"runs/{run_id(None, str(p))}": p for p in FILES}  # where each configuration's run goes
    base = config_of(bases[config.run])
    vocab = vocabulary(base)
    for steps in {config.steps, 24, 18, 12, 9}:
        model = config.mode.model_config(base.model, steps)
        shape = eqx.filter_eval_shape(lambda: base.model.build(vocab, key=jax.random.PRNGKey(0)))
        shape = eqx.filter_eval_shape(lambda m, c: config.mode.adapt(m, c, key=jax.random.PRNGKey(0)), shape, model)
        assert shape.transformer.blocks.Block.size == steps
        d, layers = base.model.hidden_dim, steps
        ordinary = layers * (12 * d * d + 13 * d) + 2 * d + (vocab.size + base.model.max_seq_len) * d
        trained = trainables_only(shape, config.mode.trainable(shape))
        count = sum(x.size for x in jax.tree.leaves(trained) if hasattr(x, "size"))
        if isinstance(config.mode, LoraMode):
            terms = layers * config.mode.r * ((d + 3 * d) + (d + d) + 2 * (d + 4 * d))
            assert count == terms + (vocab.size + base.model.max_seq_len) * d
        else:
            assert count == ordinary
    config.build_optimizer()


def parameters(name):
    config = config_of(ROOT / "configs" / name)
    vocab = vocabulary(config)
    model = eqx.filter_eval_shape(lambda: config.model.build(vocab, key=jax.random.PRNGKey(0)))
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, lambda x: hasattr(x, "size"))))


def generated_gpt2(d, T, S, vocab, positions):
    """By hand: P(Linear in -> out) = (2S+1)T + T + T^2 + T + (T+1) in out + T out; a norm has 2 d T after its net."""
    net = (2 * S + 1) * T + T + T * T + T
    linear = sum(net + (T + 1) * i * o + T * o for i, o in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)))
    return linear + 2 * (net + 2 * d * T) + 2 * d + (vocab + positions) * d


@pytest.mark.parametrize(
    ("name", "shape", "millions"),
    [
        ("wikitext103/small.yaml", (768, 20, 128, 50257, 1024), 188),
        ("wikitext103/medium.yaml", (1024, 48, 128, 50257, 1024), 670),
        ("openwebtext/medium.yaml", (1024, 96, 128, 50257, 1024), 1275),
        ("openwebtext/large.yaml", (1280, 96, 128, 50257, 1024), 1975),
        ("wikitext2/neuralode.yaml", (256, 64, 32, 257, 128), 51.6),
    ],
)
def test_parameter_counts(name, shape, millions):
    assert parameters(name) == generated_gpt2(*shape)
    assert parameters(name) / 1e6 == pytest.approx(millions, rel=0.005)


def generated_llama(d, T, S, vocab, mlp):
    """As above, without biases; norms have a gain and a bias; a head of its own."""
    net = (2 * S + 1) * T + T + T * T + T
    linear = sum(net + (T + 1) * i * o for i, o in 4 * [(d, d)] + 3 * [(d, mlp)])
    return linear + 2 * (net + 2 * d * T) + d + 2 * vocab * d


def test_parameter_counts_of_llama():
    """The flow alone has 6.5 billion, embeddings and head 0.13 billion; the twin 1.20 billion."""
    counted = parameters("openwebtext/llama_1b.yaml")
    assert counted == generated_llama(2048, 96, 256, 32000, 8192)
    ends = 2 * 32000 * 2048
    assert (counted - ends) / 1e9 == pytest.approx(6.5, rel=0.005)
    assert ends / 1e9 == pytest.approx(0.13, rel=0.01)
    layer = 4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048
    assert parameters("openwebtext/llama_1b_llama.yaml") == 16 * layer + 2048 + ends
    assert parameters("openwebtext/llama_1b_llama.yaml") / 1e9 == pytest.approx(1.20, rel=0.005)


def test_official_count():
    """The fork prints 51,512,960 for the official model at d = 256, T = 64, S = 32: with 512 rows of embeddings."""
    assert parameters("wikitext2/neuralode.yaml") - (257 + 128) * 256 + 512 * 256 == 51_512_960


def modulated_attention(d, net):
    """By hand: a Linear has in out + out numbers and in + out gates, a norm 2 d and d; `net(G)` is for G gates."""
    return 3 * d * d + 3 * d + net(4 * d) + d * d + d + net(2 * d) + 2 * (2 * d + net(d))


@pytest.mark.parametrize(
    ("name", "millions"), [("time_indexed_mlp", 1.21), ("ode_sharing", 1.21), ("time_indexed_ssm", 0.66)]
)
def test_parameter_counts_of_time_indexed_sharing(name, millions):
    d, H, S, N = 256, 64, 32, 64

    def net(gates):
        """The network of one module: (2S+1) -> H -> gates, with biases."""
        return (2 * S + 1) * H + H + (H + 1) * gates

    mlp = 2 * 4 * d * d + 4 * d + d + 2 * net(5 * d)
    ssm = 3 * N * d + 2 * d + net(3 * (N + d) + 2 * d)  # A, B, C {state, embed}, Delta and D {embed}
    mixer = ssm if name.endswith("ssm") else mlp
    expected = modulated_attention(d, net) + mixer + 2 * d + (257 + 128) * d
    assert parameters(f"wikitext2/{name}.yaml") == expected
    assert expected / 1e6 == pytest.approx(millions, abs=0.005)
    comment = (ROOT / "configs" / "wikitext2" / f"{name}.yaml").read_text().split("\n")[0]
    assert f"{expected / 1e6:.2f}M" in comment


def test_hybrid_count():
    """Four ordinary layers and the flow's one block; its shift by time, control and scale; norm and embeddings."""
    d, control, vocab, positions = 256, 4, 257, 128
    block = sum(i * o + o for i, o in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))) + 2 * 2 * d
    shift = (d + d) + (d * d + d)
    expected = (4 + 1) * block + shift + control * d + 1 + 2 * d + (vocab + positions) * d
    assert parameters("wikitext2/hybrid_flow.yaml") == expected == 4_115_201


def test_the_small_comparison_differs_in_the_model_only():
    files = [yaml.safe_load(p.read_text()) for p in FILES if p.parent.name == "wikitext2"]
    assert len({yaml.safe_dump({k: v for k, v in f.items() if k != "model"}) for f in files}) == 1


TWINS = [p for p in FILES if p.stem.endswith(("_gpt2", "_llama"))]


@pytest.mark.parametrize("path", TWINS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_twins_differ_in_the_model_only(path):
    name = path.name.replace("_gpt2.yaml", ".yaml").replace("_llama.yaml", ".yaml")
    ours, twin = (yaml.safe_load(p.read_text()) for p in (path.with_name(name), path))
    # The official code decays everything in its Llama flow, as is usual for a Llama.
    expected = {"model"} if path.stem.endswith("_llama") else {"model", "weight_decay_on"}
    assert {k for k in ours if ours[k] != twin.get(k)} == expected
    assert set(ours) == set(twin)
