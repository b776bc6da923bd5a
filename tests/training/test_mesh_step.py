"""Eight virtual devices: what each holds and makes of generated weights, and in what order they send, read from the
compiled training step; that this step is the one that training runs; and that every mesh of configs/mesh computes what
one device computes."""

import os
import subprocess
import sys

import pytest

CONFIG = """
import jax
import qkvflow
from qkvflow.config import decode
from qkvflow.runs.config import TrainConfig

assert jax.device_count() == 8
LLAMA = {"type": "llama", "num_heads": 8, "num_kv_heads": 8, "intermediate_dim": 192, "form": "official"}


def config(block, weights="generated", mesh=None, width=128, **depth):
    sizes = {"generated": {"time_embed_dim": 22, "sinusoidal_dim": 8}, "modulated": {"hidden_dim": 22}}
    sizes["basis"] = {"basis": "spline", "dim": 22}
    model = {"type": "neuralode", "max_seq_len": 48, "hidden_dim": width, "block": block}
    model |= {"weights": {"type": weights} | sizes.get(weights, {}), "depth": {"steps": 5} | depth}
    trainer = {"train_batch_size": 8, "num_train_steps": 10} | ({} if mesh is None else {"mesh": mesh})
    return decode(TrainConfig, {"model": model, "trainer": trainer})
"""

DIVIDED = """
from types import SimpleNamespace
from support.races import races
from qkvflow.meshes import ahead

programs = []
read = ahead.Program.read
ahead.Program = SimpleNamespace(read=lambda text: programs.append(read(text)) or programs[-1])
GPT2, SSM = ({"type": kind, "num_heads": 8} for kind in ("gpt2", "ssm"))
for name, given in {
    "gpt2": config(GPT2),
    "gpt2 batched": config(GPT2, evaluate="batched", solver="midpoint"),
    "reversible": config(GPT2, adjoint="reversible"),
    "llama": config(LLAMA),
    "ssm": config(SSM),
    # So wide that the networks of gates are small beside the weights.
    "modulated": config(GPT2, "modulated", width=512),
    "basis": config(GPT2, "basis"),
    "fsdp x tensor": config(LLAMA, mesh={"axes": {"data": 4, "model": 2}}),
}.items():
    report = ahead.compile_ahead(given, 256, large=8 << 10)
    assert not races(programs[-1]), (name, races(programs[-1]))
    share = (report.parameters + report.optimizer) / (report.all_parameters + report.all_optimizer)
    assert share <= 1.1 / 8, (name, share)
    # Time networks have a matrix {sinusoid or hidden, hidden} each, below 11 kB; all else is divided.
    large = [w for w in report.whole_arguments if w.bytes > 11 << 10]
    if name == "basis":  # biases, whole in ordinary models too; the largest is below 1 % of the parameters
        assert all(w.name.endswith(".bias") for w in large), large
        large = [w for w in large if w.bytes > 0.01 * report.all_parameters]
    assert not large, (name, large)
    assert report.donated >= report.parameters + report.optimizer, name
    # Whole are the weights of one step while it is made, never those of all steps (5) nor what makes them (22).
    of_time = [w for w in report.whole_temporaries if {5, 22} & set(w.sizes) and w.bytes > 11 << 10]
    if name == "modulated":  # but for a gate's own projection, while that gate is made
        of_time = [w for w in of_time if w.bytes > 0.05 * max(w.bytes for w in report.whole_temporaries)]
    if name == "basis":  # gradients of these biases
        of_time = [w for w in of_time if w.bytes > 0.01 * report.all_parameters]
    assert not of_time, (name, of_time)
    assert name == "fsdp x tensor" or any(w.times >= 5 for w in report.whole_temporaries), name
    gathers = sum(c.count for c in report.collectives if c.kind == "all-gather")
    assert 5 < gathers < 400, (name, gathers)  # a state-space model would gather at each position
print("divided")
"""

SAME_STEP = """
import tempfile
from pathlib import Path
import haliax as hax, levanter.tracker
from levanter.tracker import NoopTracker
from qkvflow.runs.directory import RunDirectory
from qkvflow.runs.prepare import PreparedRun
from qkvflow.training.checks import check_devices, model_shape
from qkvflow.training.corpus import open_corpus
from qkvflow.training.levanter_config import configure_jax
from qkvflow.training.mesh import complete_mesh
from qkvflow.training.start import FromScratch
from qkvflow.training.step import batch_shape, make_trainer, state_shape, vocabulary

folder = Path(tempfile.mkdtemp())
given = decode(TrainConfig, {
    "model": {"type": "neuralode", "max_seq_len": 48, "hidden_dim": 128, "block": {"type": "gpt2", "num_heads": 8}},
    "trainer": {"train_batch_size": 8, "num_train_steps": 10, "id": "a"}, "data": {"cache_dir": str(folder / "cache")},
})
configure_jax(given.trainer)
check_devices(given.trainer)
directory = RunDirectory(folder / "run")
directory.path.mkdir()
key = jax.random.PRNGKey(0)
corpus = open_corpus(PreparedRun(directory, given, -1, {}), given.trainer, given.Pos, key)
Vocab = vocabulary(given, len(corpus.tokenizer), given.trainer)
shape = model_shape(given.model, Vocab)
trainer_config = complete_mesh(given.trainer, shape)
optimizer = given.build_optimizer()
with levanter.tracker.current_tracker(NoopTracker()), make_trainer(given, trainer_config, optimizer) as trainer:
    start = FromScratch(given.model, directory)
    model = start.fresh(Vocab, trainer.parameter_axis_mapping, key=key)
    state = trainer.initial_state(key, model=model)
    batch = next(iter(trainer.data_loader(corpus.train).iter_from_step(0)))
    shapes = state_shape(trainer, shape), batch_shape(given, trainer)
    assert jax.tree.structure((state, batch)) == jax.tree.structure(shapes)
    for real, ours in zip(jax.tree.leaves((state, batch)), jax.tree.leaves(shapes), strict=True):
        if hasattr(real, "sharding"):
            assert (real.shape, real.dtype) == (ours.shape, ours.dtype)
            assert real.sharding.is_equivalent_to(ours.sharding, real.ndim)
    ahead = trainer.lower(*shapes).compile()
    real = trainer.lower(state, batch).compile()
    memory = lambda m: (m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, m.temp_size_in_bytes)
    assert memory(ahead.memory_analysis()) == memory(real.memory_analysis())
    quick = trainer.lower(*shapes).compile({"xla_backend_optimization_level": 0})
    assert memory(quick.memory_analysis()) == memory(real.memory_analysis())
    # And what lies in the memory of a device is what was counted.
    del model
    held = sum(s.data.nbytes for x in jax.tree.leaves((state, batch)) if hasattr(x, "addressable_shards")
               for s in x.addressable_shards if s.device == jax.devices()[3])
    assert abs(held - real.memory_analysis().argument_size_in_bytes) < 0.01 * held
print("same")
"""

SAME_NUMBERS = """
import sys
from pathlib import Path
import equinox as eqx, haliax as hax, jax.numpy as jnp, numpy as np, yaml
from haliax.partitioning import named_jit
from levanter.models.lm_model import LmExample
from qkvflow.training.mesh import check_mesh, complete_mesh

Batch, Pos, Vocab = hax.Axis("batch", 8), hax.Axis("position", 48), hax.Axis("vocab", 256)
tokens = hax.random.randint(jax.random.PRNGKey(1), (Batch, Pos), 0, 256)
weight = LmExample.causal_loss_mask(Pos).broadcast_axis(Batch).astype(jnp.float32)
example = LmExample(tokens=tokens, loss_weight=weight, attn_mask=None)
jax.config.update("jax_default_matmul_precision", "highest")


def loss(model, example):
    return model.compute_next_token_loss(example).scalar()


GPT2 = {"type": "gpt2", "num_heads": 8}
for block, weights in ((GPT2, "generated"), (LLAMA, "generated"), (GPT2, "basis")):
    model = config(block, weights, steps=2).model.build(Vocab, key=jax.random.PRNGKey(0))
    reference = jax.tree.leaves(eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, example))
    for path in sorted(Path("configs/mesh").glob("*.yaml")):
        trainer = config(block, weights, mesh=yaml.safe_load(path.read_text())).trainer
        trainer = complete_mesh(trainer, model)
        check_mesh(trainer, model, Pos)

        def divided(model, example):
            with hax.axis_mapping(trainer.compute_axis_mapping):
                return loss(model, hax.auto_sharded(example))

        with trainer.use_device_mesh():
            step = named_jit(eqx.filter_value_and_grad(divided), axis_resources=trainer.parameter_axis_mapping)
            found = jax.tree.leaves(step(hax.shard(model, trainer.parameter_axis_mapping), example))
        for ours, expected in zip(found, reference, strict=True):
            expected = np.asarray(expected)
            # fp32 sums in another order; the largest entry sets the scale
            error = np.abs(np.asarray(ours) - expected).max() / max(np.abs(expected).max(), 1e-6)
            assert error <= 2e-5, (path.name, block["type"], expected.shape, error)
        print(path.name, block["type"], weights, flush=True)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize(
    ("script", "word"),
    [(DIVIDED, "divided"), (SAME_STEP, "same"), (SAME_NUMBERS, "equal")],
    ids=["divided", "same_step", "same_numbers"],
)
def test_on_eight_devices(script, word):
    xla = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
    flags = {"XLA_FLAGS": xla, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "tests:."}
    # Levanter's loader threads sometimes abort an orderly exit.
    command = [sys.executable, "-c", CONFIG + script + "import os, sys\nsys.stdout.flush()\nos._exit(0)"]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.stdout.strip().endswith(word), done.stderr[-3000:]
