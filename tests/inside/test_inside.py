"""What `qkvflow.inside` relies on in other libraries. A test that fails says which place another version has moved."""

import json
import threading

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.checkpoint
import levanter.tracker
import optax
import pytest
import tensorboardX
import tiktoken
from draccus import ChoiceRegistry
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from levanter.models.lm_model import LmConfig
from levanter.tracker import NoopTracker, current_tracker
from levanter.trainer import Trainer, TrainerConfig
from support.tokenizers import byte_level

from qkvflow.inside import draccus, tensorboard
from qkvflow.inside import levanter as inside
from qkvflow.inside.jax import SharedManager, name_files
from qkvflow.inside.tiktoken import definition

HERE = "see qkvflow/inside"


@pytest.fixture
def mesh():
    with TrainerConfig(require_accelerator=False).use_device_mesh():
        yield


class Noting(GlobalAsyncCheckpointManager):
    folders: tuple = ()

    def serialize(self, arrays, tensorstore_specs, **kwargs):
        self.folders += (inside.checkpoint_of(tensorstore_specs),)
        super().serialize(arrays, tensorstore_specs, **kwargs)


def test_a_checkpointer_writes_by_the_manager_that_it_is_given(mesh, tmp_path):
    checkpointer, manager = inside.Checkpointer(str(tmp_path), None, []), Noting()
    inside.set_manager(checkpointer, manager)
    checkpointer.save_checkpoint({"x": jnp.ones(3)}, 4, "step-4")
    checkpointer.wait_until_finished()
    assert manager.folders, f"Levanter's Checkpointer has another place than `_manager`: {HERE}/levanter.py"
    assert manager.folders == (str(tmp_path / "step-4"),), (
        f"Levanter's TensorStore specs look different: {HERE}/levanter.py"
    )
    assert json.loads((tmp_path / "step-4" / "metadata.json").read_text())["step"] == 4


class Seeing(SharedManager):
    seen: tuple = ()

    def serialize(self, arrays, tensorstore_specs, **kwargs):
        name_files(tensorstore_specs, "d/own-")
        super().serialize(arrays, tensorstore_specs, **kwargs)

    def while_writing(self):
        self.seen += ("writing",)

    def when_written(self):
        self.seen += ("written",)


def test_a_manager_sees_its_writes_and_names_their_files(mesh, tmp_path):
    checkpointer, manager = inside.Checkpointer(str(tmp_path), None, []), Seeing()
    inside.set_manager(checkpointer, manager)
    checkpointer.save_checkpoint({"x": jnp.ones(3), "y": jnp.ones(2)}, 4, "step-4")
    checkpointer.wait_until_finished()
    assert "writing" in manager.seen, f"JAX's manager asks for results elsewhere: {HERE}/jax.py"
    assert manager.seen[-1] == "written", f"JAX's manager asks for results in another order: {HERE}/jax.py"
    assert list((tmp_path / "step-4" / "d").glob("own-*")), f"JAX names files of arrays elsewhere: {HERE}/jax.py"


def test_what_the_next_start_continues_from_replaces_what_the_last_one_did(mesh, tmp_path):
    removed = []

    class Noted(inside.StoppableCheckpointer):
        def remove(self, checkpoint):
            removed.append(checkpoint)
            super().remove(checkpoint)

    checkpointer = Noted(str(tmp_path), None, [])
    for step in (2, 5):
        checkpointer.save_to_continue({"x": jnp.ones(3)}, step)
        checkpointer.wait_until_finished()
    assert [path.rsplit("/", 1)[1] for path in removed] == ["step-2"], (
        f"Levanter's temporary checkpoints are kept elsewhere: {HERE}/levanter.py"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


@pytest.mark.parametrize("name", ["runs[1]", "runs*", "run?1", "{runs1,x}"])
def test_paths_of_checkpoints_are_literal(mesh, tmp_path, name):
    for folder, step in (("runs1", 9), (name, 4)):
        inside.save_checkpoint({"x": jnp.ones(3)}, step, str(tmp_path / folder / f"step-{step}"))
    found = levanter.checkpoint.discover_checkpoint_candidates(str(tmp_path / name))
    assert [c.path for c in found] == [str(tmp_path / name / "step-4")], (
        f"Levanter expands globs again: {HERE}/levanter.py"
    )
    temporary = inside.Checkpointer(str(tmp_path / name), None, [])._temporary_checkpoints
    assert [record.step for record in temporary] == [4], f"Levanter looks for checkpoints elsewhere: {HERE}/levanter.py"
    path = levanter.checkpoint.latest_checkpoint_path(str(tmp_path / name))
    loaded = levanter.checkpoint.load_checkpoint({"x": jnp.zeros(3)}, path)
    assert (loaded["x"] == 1).all()


def test_what_follows_from_the_devices_is_filled_in():
    config = TrainerConfig(require_accelerator=False, train_batch_size=6)
    inside.settle_devices(config)
    found = (config.per_device_parallelism, config.per_device_eval_parallelism)
    assert found == (6, 6), (
        f"Levanter settles batch sizes elsewhere than in `_validate_and_set_defaults`: {HERE}/levanter.py"
    )
    with pytest.raises(ValueError, match="divisible"):
        inside.settle_devices(TrainerConfig(require_accelerator=False, train_batch_size=6, per_device_parallelism=4))


class Weight(eqx.Module):
    x: jax.Array


class Seen(inside.StepTrainer):
    def see(self, state, result):
        result.loss = result.loss + 100.0
        return result


def test_a_step_is_seen_and_can_be_traced():
    config = TrainerConfig(id="a", require_accelerator=False, train_batch_size=2, log_jaxprs=False, log_xla_hlo=False)

    keys = []

    def loss(model, batch, *, key=None, step_key=None, whole=None):
        keys.append((key, step_key))
        return jnp.sum(model.x * batch.array)

    with current_tracker(NoopTracker()), Seen(config, optax.sgd(1.0), loss, add_default_hooks=False) as trainer:
        assert isinstance(trainer, Trainer)
        batch = hax.named(jnp.ones(2), "batch")
        state = trainer.initial_state(jax.random.PRNGKey(0), model=Weight(jnp.ones(2)))
        traced = eqx.filter_eval_shape(lambda s: inside.bare_step(trainer, s, batch).new_state.model.x, state)
        assert traced.shape == (2,)
        info = trainer.train_step(state, batch)
        assert all(key is not None and step_key is not None for key, step_key in keys), (
            f"Levanter takes gradients elsewhere than in `_compute_gradients_microbatched`: {HERE}/levanter.py"
        )
        text = f"Levanter's trainer compiles its step elsewhere than in `_jit_train_step_fn`: {HERE}/levanter.py"
        trainer.stage = 1
        trainer.see = lambda state, result: result
        assert float(trainer.train_step(info.state, batch).loss) == 0.0, text
        assert float(info.loss) == 102.0, (
            f"Levanter's trainer makes its step elsewhere than in `_train_step`: {HERE}/levanter.py"
        )


class Base(ChoiceRegistry):
    pass


@Base.register_subclass("one")
class One(Base):
    pass


def test_registered_choices_are_found_without_any_import():
    known = {"one": One}
    assert draccus.registered(Base) == known == Base.get_known_choices(), (
        f"draccus keeps choices elsewhere: {HERE}/draccus.py"
    )
    assert draccus.registered(One) == known
    assert draccus.registered(int) == {}
    assert "gpt2" in draccus.registered(LmConfig) or draccus.registered(LmConfig) == {}


def test_an_error_of_the_disk_is_told_in_the_writing_thread(tmp_path):
    told, asked = [], threading.Event()
    writer = tensorboardX.SummaryWriter(str(tmp_path), max_queue=1, flush_secs=1)

    def fail(*args):
        asked.set()
        raise OSError("full")

    events = writer.file_writer.event_writer._ev_writer
    events.write_event = fail
    tensorboard.on_os_errors(writer, told.append)
    writer.add_scalar("a", 1.0)
    assert asked.wait(20), f"tensorboardX writes by something else than `_ev_writer.write_event`: {HERE}/tensorboard.py"
    writer.close()
    assert [str(error) for error in told][:1] == ["full"]


def test_an_encoding_is_told_by_its_parts():
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
    encoding = tiktoken.Encoding("mine", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={"<end>": 257})
    parts = definition(encoding)
    assert parts == (ranks, {"<end>": 257}, r"\w+|\W+"), f"tiktoken keeps the parts elsewhere: {HERE}/tiktoken.py"


def test_the_name_of_a_choice_can_stand_for_a_subclass():
    class Choice(ChoiceRegistry):
        pass

    @Choice.register_subclass("plain")
    class Plain(Choice):
        pass

    class Richer(Plain):
        pass

    draccus.replace_choice(Plain, Richer)
    assert Choice.get_choice_class("plain") is Richer, f"draccus keeps choices elsewhere: {HERE}/draccus.py"
    assert Choice.get_choice_name(Richer) == "plain", f"draccus looks names up elsewhere: {HERE}/draccus.py"


def test_the_loss_is_that_of_xla_on_a_gpu(monkeypatch):
    implementations = inside.cross_entropy._default_implementations.__wrapped__
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert implementations() == ("xla",), f"Levanter prefers another cross-entropy on GPUs: {HERE}/levanter.py"


def test_a_tokenizer_gets_an_end_token(tmp_path):
    tokenizer = byte_level(tmp_path)
    changed = inside.with_special_token(tokenizer, "eos", 65)
    assert (changed.eos_token_id, changed.eos_token) == (65, "A"), f"Levanter's tokenizer differs: {HERE}/levanter.py"
    assert changed.all_special_ids == sorted({*tokenizer.all_special_ids, 65})
    assert changed.encode("ab") == tokenizer.encode("ab")


def test_a_metric_starts_no_computation(monkeypatch):
    """Levanter would make an array with each, to see whether it is being traced."""
    noted = []

    class Tracker(NoopTracker):
        def log(self, metrics, *, step, commit=None):
            noted.append(metrics)

    def in_step(x):
        levanter.tracker.log({"inside": x}, step=0)
        return x

    with current_tracker(Tracker()):
        monkeypatch.setattr(jnp, "zeros", None)
        levanter.tracker.log({"outside": 1.0}, step=0)
        monkeypatch.undo()
        jax.eval_shape(in_step, 1.0)
    assert noted == [{"outside": 1.0}], f"Levanter tells otherwise that it is traced: {HERE}/levanter.py"
