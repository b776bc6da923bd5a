"""Loads models from Hugging Face folders with Levanter's converter, and checks that all arrays match."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.jax_utils import is_jax_array_like
from haliax.state_dict import flatten_modules_for_export, to_state_dict
from levanter.compat.hf_checkpoints import HFCheckpointConverter, RepoRef
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.tokenizers import MarinTokenizer
from levanter.trainer import TrainerConfig

from qkvflow.errors import UserError
from qkvflow.hub.folder import HubFolder

# Arrays that transformers once stored with the parameters and now computes itself.
_BUFFERS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
_NUMBERS = ("F32", "BF16", "F16", "F64")
_HEAD, _EMBEDDINGS = "lm_head.weight", ("wte.weight", "model.embed_tokens.weight")
_PREFIX = "transformer"  # GPT-2 is stored with or without it


def read_model(folder: HubFolder, config: LmConfig, tokenizer: MarinTokenizer) -> LmHeadModel:
    """The model, with parameters in fp32.

    Raises:
        UserError: the arrays do not match `config`, or cannot be read.
    """
    layers, stored = folder.settings.num_hidden_layers, len(folder.arrays)
    if layers > stored:  # checked before Levanter builds them one by one
        raise UserError(
            f"{folder.path} does not match its config.json, which has {layers} layers, but there are {stored} arrays"
        )
    shape = eqx.filter_eval_shape(config.build, Axis("vocab", vocabulary(folder)), key=jax.random.PRNGKey(0))
    _check_arrays(folder, _expected(shape), is_tied=getattr(shape, "lm_head", None) is None)
    converter = HFCheckpointConverter(
        type(config),
        # Absolute, so that it is never mistaken for a hub name; as a text, its part after an @ would be a revision.
        reference_checkpoint=RepoRef(str(folder.path.resolve())),
        HfConfigClass=type(folder.settings),
        tokenizer=tokenizer,
        ignore_prefix=_PREFIX,
    )
    trainer = TrainerConfig()
    with trainer.use_device_mesh():
        model = converter.load_pretrained(config.model_type, config=config, axis_mapping={})
    # The converter's own `dtype` leaves bfloat16 unchanged.
    return jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a, model)


def vocabulary(folder: HubFolder) -> int:
    """Rows of the embedding; may exceed the number of tokens of the tokenizer."""
    return int(folder.settings.vocab_size)


def _expected(shape: LmHeadModel) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the arrays of a model, as stored in files."""

    def exported(model):
        return to_state_dict(flatten_modules_for_export(eqx.filter(model, is_jax_array_like)))

    return {name: tuple(array.shape) for name, array in eqx.filter_eval_shape(exported, shape).items()}


def _check_arrays(folder: HubFolder, expected: dict[str, tuple[int, ...]], *, is_tied: bool) -> None:
    is_prefixed = any(name.startswith(f"{_PREFIX}.") for name in folder.arrays)
    found = {name.removeprefix(f"{_PREFIX}.") if is_prefixed else name: name for name in folder.arrays}
    missing = sorted(expected.keys() - found.keys())
    optional = {_HEAD} if is_tied else set()
    others = sorted(n for n in found.keys() - expected.keys() if n not in optional and not _BUFFERS.fullmatch(n))
    if missing or others:
        what = [f"{_some(missing)} missing"] * bool(missing) + [f"{_some(others)} unknown to it"] * bool(others)
        raise UserError(f"the arrays in {folder.path} do not match its config.json: {', '.join(what)}")
    for name, shape in expected.items():
        stored = folder.arrays[found[name]]
        if stored.shape != shape:
            raise UserError(
                f"{folder.path} does not match its config.json: {name} has the shape {list(stored.shape)} but should"
                f" have {list(shape)}"
            )
        if stored.dtype not in _NUMBERS:
            raise UserError(
                f"{folder.path} has {name} in the format {stored.dtype}, but it must be one of {', '.join(_NUMBERS)}."
                " Save the model again without quantisation"
            )
    if is_tied and _HEAD in found and not _same(folder, found[_HEAD], found):
        raise UserError(
            f"{folder.path} does not match its config.json: tie_word_embeddings is true, but {_HEAD} is another array"
            " than the embedding"
        )


def _same(folder: HubFolder, head: str, found: dict[str, str]) -> bool:
    """Whether the head is the embedding."""
    embedding = next(found[name] for name in _EMBEDDINGS if name in found)
    one, other = (folder.arrays[name] for name in (head, embedding))
    return one.shape == other.shape and bool((folder.read(head) == folder.read(embedding)).all())


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more are" if len(names) > 3 else " is" if len(names) == 1 else " are"
    return ", ".join(names[:3]) + rest
