"""Every system of configs/, as it stands in its YAML: causal, trained or not, and it learns from text."""

import dataclasses
import json
import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from support.configs import FILES, IDS, ROOT, config_of
from support.models import VOCAB, build, heavy

from qkvflow.models import NeuralOdeConfig
from qkvflow.runs import load_run
from qkvflow.tracking import read_metrics

SMALL = [p for p in FILES if p.stem == "quickstart" or p.parent.name == "wikitext2"]
LENGTH, POSITIONS = 12, (1, 5, 11)
LOWERED = {"hidden_dim": 16, "num_heads": 4, "num_layers": 3, "max_seq_len": LENGTH, "intermediate_dim": 24}


def lowered(config):
    """The model of a configuration with fewer and smaller layers; the choices stay, and whether heads share keys."""
    names = {f.name for f in dataclasses.fields(config) if f.init}
    sizes = {k: v for k, v in LOWERED.items() if k in names}
    if "num_kv_heads" in names and config.num_kv_heads is not None:
        sizes["num_kv_heads"] = 4 if config.num_kv_heads == config.num_heads else 2
    if isinstance(config, NeuralOdeConfig):
        sizes["block"] = lowered(config.block)
        sizes["depth"] = dataclasses.replace(config.depth, steps=min(config.depth.reading_steps, 3))
    if hasattr(config, "flash_attention_block_size"):
        sizes["flash_attention_block_size"] = None
    return dataclasses.replace(config, **sizes)


def check_causal(model, vocab, length, positions):
    """Changing token j leaves all logits before j bit-identical, without control and with two different ones."""
    model = eqx.nn.inference_mode(model)
    Batch, Pos = hax.Axis("batch", 2), hax.Axis("position", length)
    k_tokens, k_control = jax.random.split(jax.random.PRNGKey(3))
    tokens = hax.random.randint(k_tokens, (Batch, Pos), 0, vocab.size)
    controls = [{}]
    if getattr(model.config, "control", None) is not None:
        controls.append(
            {"control": hax.random.normal(k_control, (Batch, hax.Axis("control", model.config.control.dim)))}
        )
    mask = (
        {}
        if isinstance(model.config, NeuralOdeConfig)
        else {"attn_mask": hax.nn.attention.causal_mask(Pos, Pos.alias("key_position"))}
    )
    run = eqx.filter_jit(lambda model, tokens, options: model(tokens, **options).rearrange((Batch, Pos, ...)).array)
    seen = []
    for control in controls:
        options = mask | control
        before = run(model, tokens, options)
        assert np.isfinite(before).all()
        seen.append(before)
        for j in positions:
            changed = (tokens.array[:, j] + 1) % vocab.size
            after = run(model, hax.named(tokens.array.at[:, j].set(changed), tokens.axes), options)
            np.testing.assert_array_equal(before[:, :j], after[:, :j])
            assert not np.array_equal(before[:, j], after[:, j]), "the change must show from j on"
    if len(seen) == 2:
        assert np.abs(seen[0] - seen[1]).max() > 1e-4, "the control must be heard"


checked = []


@pytest.mark.parametrize("path", [p if p in SMALL else heavy(p) for p in FILES], ids=IDS)
def test_causal(path):
    """Every configuration, with noise on all parameters, so that zeros of the initialisation hide no path."""
    config = lowered(config_of(path).model)
    if config not in checked:  # small, medium and large differ in sizes only
        check_causal(build(config), VOCAB, LENGTH, POSITIONS)
        checked.append(config)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.jsonl"
    path.write_text(
        "".join(json.dumps({"text": t, "control": [1, 0, 0, 0.5]}) + "\n" for t in pydoc_data.topics.topics.values())
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("path", SMALL, ids=lambda p: p.stem)
def test_learns_from_its_yaml(path, text, tmp_path):
    """50 steps on text of one's own, offline: the loss falls at full size, and the trained model is causal too."""
    options = {
        "data.train": text,
        "data.validation_fraction": 0.1,
        "data.cache_dir": text.parent / "cache",
        "run_dir": tmp_path,
        "trainer.id": "run",
        "trainer.num_train_steps": 50,
        "trainer.max_eval_batches": 2,
    }
    if path.stem == "hybrid_flow":
        options["data.control_key"] = "control"
    command = [sys.executable, "-m", "qkvflow.train_lm", "--config_path", str(path)]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    losses = np.asarray([record["train/loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")])
    assert losses.shape == (50,)
    assert np.isfinite(losses).all()
    # From ln 257 = 5.5 down to at least the entropy of single bytes, about 3.2, in ten batches' mean.
    assert losses[:5].mean() > 4.0 > 3.6 > losses[-10:].mean()
    _, model, _ = load_run(tmp_path / "run")
    check_causal(model, hax.Axis("vocab", 257), 40, (1, 20, 39))


def test_the_test_can_fail():
    """A field that looks at the next token fails the same check."""
    model = build(lowered(config_of(ROOT / "configs" / "quickstart.yaml").model))

    class LooksAhead(eqx.Module):
        inner: eqx.Module

        @property
        def config(self):
            return self.inner.config

        def __call__(self, tokens, **options):
            return self.inner(tokens, **options) + 1e-3 * hax.roll(self.inner(tokens, **options), -1, "position")

    with pytest.raises(AssertionError):
        check_causal(LooksAhead(model), VOCAB, LENGTH, POSITIONS)
