"""Writes a model as a folder for transformers: config.json, safetensors, tokenizer, generation_config.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import transformers
from haliax.state_dict import to_torch_compatible_state_dict
from levanter.tokenizers import MarinTokenizer
from levanter.utils.tree_utils import inference_mode
from safetensors.numpy import save_file

from qkvflow.data import load_tokenizer
from qkvflow.data.special_tokens import GENERATION, end_tokens
from qkvflow.data.tokenizers import TOKENIZER_FILES
from qkvflow.hub.custom import MODELING, custom
from qkvflow.hub.folder import CONFIG, INDEX, WEIGHTS, read_json
from qkvflow.hub.native import Arrays, native, obstacle
from qkvflow.models import NeuralOdeConfig, NeuralOdeLMHeadModel

SHARD_BYTES = 5 << 30
_FAST = "PreTrainedTokenizerFast"


def write_folder(
    model: NeuralOdeLMHeadModel, tokenizer: Path, folder: Path, shard_bytes: int = SHARD_BYTES
) -> str | None:
    """Writes a discretised model and its tokenizer into an empty folder; parameters in fp32.

    Args:
        shard_bytes: maximum size of a file with arrays.

    Returns:
        why the folder needs its own code; None if the model is a class of transformers.
    """
    config, reason = model.config, obstacle(model.config)
    named = to_torch_compatible_state_dict(inference_mode(model, True))
    arrays = {
        name.replace(".weights.blocks.", ".blocks."): np.asarray(jax.device_get(array), np.float32)
        for name, array in named.items()
    }
    arrays = with_plain_embeddings(config, arrays)
    settings, arrays = (custom if reason else native)(config, arrays, model.Vocab.size)
    loaded = load_tokenizer(tokenizer)
    special = {"bos_token_id": loaded.bos_token_id, "eos_token_id": loaded.eos_token_id}
    write_json(folder / CONFIG, settings | special | {"torch_dtype": "float32"})
    _save(arrays, folder, shard_bytes)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    _complete_tokenizer(folder / TOKENIZER_FILES[1], loaded)
    # Not in config.json, where Llama would treat it as a token without an embedding.
    filler, ends = {"pad_token_id": loaded.eos_token_id}, end_tokens(tokenizer, loaded)
    several = {"eos_token_id": ends} if len(ends) > 1 else {}
    write_json(folder / GENERATION, special | several | filler | {"do_sample": False})
    if reason:
        shutil.copyfile(MODELING, folder / MODELING.name)
    return reason


def with_plain_embeddings(config: NeuralOdeConfig, arrays: Arrays) -> Arrays:
    """The arrays of the same function with `embedding_multiplier` 1, which transformers' classes do not have.

    x(0) = m embed(tokens) needs embeddings times m; where the head shares them, the final norm is divided by m.
    """
    m, found = np.float32(config.embedding_multiplier), dict(arrays)
    if m == 1.0:
        return found
    for name, array in arrays.items():
        if name.startswith("embeddings."):
            found[name] = array * m
        elif name.startswith("transformer.norm.") and config.block.tie_word_embeddings:
            found[name] = array / m
    return found


def _complete_tokenizer(file: Path, tokenizer: MarinTokenizer) -> None:
    """The class and special tokens of a tokenizer that does not name them, or whose class transformers does not have:
    it would take a class by the type of the model, with its own special tokens, or none.

    Of a tokenizer without a class of its own, transformers would give models `token_type_ids`: GPT-2 adds their
    embeddings to the tokens', others refuse them.
    """
    settings = read_json(file) if file.is_file() else {}
    given = settings.get("tokenizer_class")
    settings.pop("auto_map", None)  # names code, which stays behind
    is_known = isinstance(given, str) and hasattr(transformers, given)
    if not is_known and (file.parent / TOKENIZER_FILES[0]).is_file():
        own = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        settings = {key: token for key, token in own.items() if token is not None} | settings
        settings |= {"tokenizer_class": _FAST}
    if settings.get("tokenizer_class") in (None, _FAST) and "model_input_names" not in settings:
        settings |= {"model_input_names": ["input_ids", "attention_mask"]}
    if settings:
        write_json(file, settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a human-readable JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _save(arrays: Arrays, folder: Path, shard_bytes: int) -> None:
    """Writes one file, or several and an index."""
    shards: list[Arrays] = [{}]
    for name, array in sorted(arrays.items()):
        if shards[-1] and sum(a.nbytes for a in shards[-1].values()) + array.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = np.ascontiguousarray(array)
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    write_json(
        folder / INDEX, {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": places}
    )
