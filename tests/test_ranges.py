"""Ranges of numbers stand with their fields, and hold wherever a configuration comes from."""

import math

import numpy as np
import pytest
from support.configs import TINY

from qkvflow.blocks import Gpt2BlockConfig, LlamaBlockConfig, SsmBlockConfig
from qkvflow.cli import parse
from qkvflow.depth import DepthConfig
from qkvflow.depth.schedule import StepGrowth, StepRange
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig, NeuralOdeConfig
from qkvflow.ranges import Range, out_of_range
from qkvflow.runs import TrainConfig
from qkvflow.training.checks import check_config, largest_batch
from qkvflow.training.levanter_config import configure_jax
from qkvflow.weights import BasisConfig, GeneratedConfig, ModulatedConfig


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("optimizer.learning_rate", ["-1", ".nan", ".inf"]),
        ("optimizer.min_lr_ratio", [".nan", "-0.1", "1.1"]),
        ("optimizer.weight_decay", ["-1", ".nan"]),
        ("optimizer.warmup", ["-2"]),
        ("optimizer.beta1", ["1", "-0.1"]),
        ("optimizer.epsilon", ["0"]),
        ("optimizer.max_grad_norm", ["-1"]),
        ("trainer.seed", ["-1", "4294967296"]),
        ("trainer.num_train_steps", ["0", "-2"]),
        ("trainer.steps_per_eval", ["0"]),
        ("trainer.max_eval_batches", ["0"]),
        ("trainer.checkpointer", ["{keep: [{every: 0}]}", "{keep: [{every: 5, until: -1}]}"]),
        ("data.validation_fraction", ["-0.1", "1", ".nan"]),
        ("vocab_size", ["0", "-3"]),
        ("train_seq_len", ["1", "0"]),
        ("z_loss_weight", ["-1", ".nan"]),
        ("max_skipped_steps", ["-1"]),
        ("model.hidden_dim", ["0", "-8"]),
        ("model.max_seq_len", ["0"]),
        ("model.prelude_layers", ["-1"]),
        ("model.block.layer_norm_epsilon", [".nan", "0", "-1"]),
        ("model.block.num_heads", ["0"]),
        ("model.block.resid_pdrop", ["1", "-0.1", ".nan"]),
        ("model.block.mlp_scale", ["0"]),
        ("model.control", ["{dim: 2, alpha: .nan}", "{dim: 2, alpha: .inf}", "{dim: 0}"]),
        ("model.weights", ["{type: generated, time_embed_dim: 0}", "{type: generated, frozen_time: 1.5}"]),
        ("model.depth.steps", ["0", "{min: 0, max: 4}", "{min: 2, max: 4, choices: 1}", "{grow: {0.0: 0}}"]),
        ("model.depth.rtol", ["0", "-1", ".nan"]),
        ("model.depth.kinetic_weight", ["-1", ".inf"]),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(key, values):
    for value in values:
        with pytest.raises(UserError, match=rf"`{key}[^`]*` must be (a finite|at least|above)"):
            parse(TrainConfig, [*TINY, f"--{key}", value])


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (lambda: Gpt2BlockConfig(layer_norm_epsilon=math.nan), "layer_norm_epsilon"),
        (lambda: LlamaBlockConfig(layer_norm_epsilon=-1.0), "layer_norm_epsilon"),
        (lambda: SsmBlockConfig(state_size=0), "state_size"),
        (lambda: GeneratedConfig(frozen_time=2.0), "frozen_time"),
        (lambda: ModulatedConfig(hidden_dim=0), "hidden_dim"),
        (lambda: BasisConfig(smoothness_weight=math.inf), "smoothness_weight"),
        (lambda: ControlConfig(alpha=math.nan), "alpha"),
        (lambda: DepthConfig(rtol=math.nan), "rtol"),
        (lambda: NeuralOdeConfig(coda_layers=-1), "coda_layers"),
    ],
)
def test_configurations_made_in_python_are_checked_too(config, field):
    with pytest.raises(UserError, match=f"`{field}` must be "):
        config()


@pytest.mark.parametrize(
    "config",
    [
        lambda: DepthConfig(steps=2.5),
        lambda: DepthConfig(steps="6"),
        lambda: DepthConfig(steps={"grow": 3}),
        lambda: DepthConfig(steps={"shrink": 3}),
        lambda: DepthConfig(steps=True),
        lambda: StepRange(2.5, 4),
        lambda: StepGrowth({0.0: 2.5}),
        lambda: StepGrowth(None),
        lambda: StepGrowth({0: 3, None: 6}),
        lambda: Gpt2BlockConfig(num_heads="2"),
    ],
)
def test_so_are_values_that_are_no_numbers(config):
    with pytest.raises(UserError, match=r"must be a whole number|steps: a whole number|grow: "):
        config()


def test_training_looks_at_levanters_fields_once_more():
    config = parse(TrainConfig, [*TINY])[0]
    object.__setattr__(config.optimizer, "min_lr_ratio", math.nan)
    with pytest.raises(UserError, match=r"`optimizer\.min_lr_ratio` must be finite, but is nan"):
        check_config(config)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--trainer.train_batch_size", "[{start: 3, value: 4}]"),
            r"steps \[3\]: the first must start at 0",
        ),
        (("--trainer.train_batch_size", "[{start: 0, value: 4}, {start: 0, value: 8}]"), r"sizes from steps \[0, 0\]"),
        (("--trainer.train_batch_size", "[{start: 9, value: 4}, {start: 0, value: 8}]"), r"sizes from steps \[9, 0\]"),
        (("--trainer.train_batch_size", "[]"), r"sizes from steps \[\]"),
        (("--trainer.checkpointer.keep", "[{interval: 10}]"), r"keep\[0\].*`interval`|unknown key.*interval"),
        (("--trainer.checkpointer.keep", "[{every: 10}, {every: 5, until: 3}]"), r"checkpointer.*`until` is missing"),
        (("--data.mixture_block_size", "0"), r"mixture_block_size` must be at least 1 and below 65536"),
        (("--trainer.model_averaging", "{type: ema, beta: 1.5}"), r"beta` must be at least 0 and below 1"),
        (("--model.hidden_dim", "1000000000039"), r"The nearest number of heads that divides it is 1\."),
        (("--model.block", "{type: llama, num_heads: 999999000000, num_kv_heads: 999998}"), r"Possible: 1, 2, "),
        (("--trainer.quantization", "{fp8: true}"), r"quantization` does not work with `type: neuralode`"),
        (("--trainer.model_averaging", "{type: ema_decay_sqrt}"), r"ema_decay_sqrt}` fails .* Use {type: ema}"),
        (("--trainer.allow_nondivisible_batch_size", "true"), r"allow_nondivisible_batch_size` is not supported"),
        (("--model.block", "{type: llama, rope: {type: default, theta: 0}}"), r"theta` must be above 0"),
        (("--model.block", "{type: llama, rope: {type: linear, factor: -1}}"), r"factor` must be above 0"),
        (
            ("--model.block", "{type: llama, rope: {type: llama3, low_freq_factor: 4.0, high_freq_factor: 4.0}}"),
            r"low_freq_factor \(4\) must be below high_freq_factor \(4\)",
        ),
        (
            ("--model.block", "{type: llama, rope: {type: yarn, theta: 1.0}}"),
            r"theta \(1\) must be above 1 with type yarn",
        ),
        (
            ("--model", "{type: llama, rope: {type: yarn, beta_fast: 1, beta_slow: 32}}"),
            r"beta_slow \(32\) must be below beta_fast \(1\)",
        ),
        (("--model.block", "{type: llama, rope: {type: yarn, mscale: -1}}"), r"mscale` must be at least 0"),
    ],
)
def test_settings_that_would_fail_late_are_refused_at_once(words, said):
    with pytest.raises(UserError, match=said):
        check_config(parse(TrainConfig, [*TINY, *words])[0])


def test_options_of_jax_are_named():
    with pytest.raises(UserError, match=r"trainer\.jax_config: JAX does not take jax_no_such_option"):
        configure_jax(parse(TrainConfig, [*TINY, "--trainer.jax_config", "{jax_no_such_option: 1}"])[0].trainer)


def test_the_largest_batch_is_one_that_is_reached():
    def largest(size, steps=10):
        words = ("--trainer.train_batch_size", size, "--trainer.num_train_steps", str(steps))
        return largest_batch(parse(TrainConfig, [*TINY, *words])[0].trainer)

    assert largest("8") == 8
    assert largest("[{start: 0, value: 8}, {start: 2, value: 256}, {start: 4, value: 16}]") == 256
    assert largest("[{start: 0, value: 8}, {start: 10, value: 256}]") == 8


def test_no_range_holds_what_is_not_finite():
    for number in (math.nan, math.inf, -math.inf):
        assert number not in Range()
        assert number not in Range(at_least=0)
    assert np.float32(np.nan) not in Range()
    assert 10**400 in Range(at_least=1)
    assert -(10**400) not in Range(at_least=1)


def test_truth_values_and_texts_have_no_range():
    assert out_of_range(Gpt2BlockConfig()) is None
