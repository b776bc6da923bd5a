"""Reads and writes parameters of the official implementation (SDML-KU/qkvflow, Tong et al., ICLR 2025) by their names.

Official names are tree paths such as `transformer.block.attn.c_attn.f_W.weight`. Per generated module:

| official            | here (below the generated module) | axes                             |
|---------------------|-----------------------------------|----------------------------------|
| lin1.weight, .bias  | net.lin1                          | {sinusoid, time_hidden}          |
| lin2.weight, .bias  | net.lin2                          | {time_hidden, time_embed}        |
| f_W.weight          | leaves.weight.projection          | {time_embed, axes of W}          |
| f_W.bias            | leaves.weight.base                | {axes of W}                      |
| f_b                 | leaves.bias.projection            | {time_embed, axes of b}          |
| f_weight, f_bias    | leaves.weight/.bias.projection    | {embed, time_embed}, transposed  |

Around the flow: `embeddings.token_embeddings`, GPT-2 `embeddings.position_embeddings` and `transformer.ln_f`, Llama
`transformer.norm` and `lm_head.weight` {embed, vocab}.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray

from qkvflow.axes import HEAD_SIZE, POSITION, TIME_EMBED, VOCAB
from qkvflow.blocks import BlockConfig, Gpt2BlockConfig, LlamaBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig, NeuralOdeLMHeadModel
from qkvflow.named import is_named
from qkvflow.weights import Generated, GeneratedConfig

_BLOCK = "transformer.block."
_ROTARY = "self_attn.rotary_emb."


def load_gpt2(arrays: Mapping[str, np.ndarray], num_heads: int, steps: int, **block_options) -> NeuralOdeLMHeadModel:
    """The official `neuralode` model (GPT-2 block, parallel form, Euler at right end points) with these parameters.

    Args:
        arrays: official name -> array, in the official order of axes.
        block_options: further fields of `Gpt2BlockConfig` (dropout, ...).

    Raises:
        UserError: for missing or unknown names, and for shapes that do not fit together.
    """
    embed = _shape(arrays, "embeddings.token_embeddings", 2)[1]
    positions = _shape(arrays, "embeddings.position_embeddings", 2)[0]
    mlp = _shape(arrays, _BLOCK + "mlp.c_fc.f_W.bias", 2)[1]
    block = Gpt2BlockConfig(num_heads=num_heads, form="parallel", mlp_scale=mlp // embed, **block_options)
    return _load(arrays, block, positions, steps)


def load_llama(
    arrays: Mapping[str, np.ndarray], num_heads: int, steps: int, max_seq_len: int = 2048, **block_options
) -> NeuralOdeLMHeadModel:
    """The official `llamaode` model (Llama block, form `official`, Euler at right end points) with these parameters.

    Args:
        arrays: official name -> array, in the official order of axes. The number of key-value heads is read off them.
            Tables of rotary positions (`...rotary_emb.cos_cached`, `.sin_cached`) are not parameters: they may be
            missing, and if given they must be those that the block computes.
        max_seq_len: the longest sequence; positions are rotary, so no parameter depends on it.
        block_options: further fields of `LlamaBlockConfig` (rope, dropout, ...).

    Raises:
        UserError: for missing or unknown names, and for shapes that do not fit together.
    """
    tables = {n.rsplit(".", 1)[1]: v for n, v in arrays.items() if _ROTARY in n}
    arrays = {n: v for n, v in arrays.items() if _ROTARY not in n}
    block = LlamaBlockConfig(
        num_heads=num_heads,
        num_kv_heads=_shape(arrays, _BLOCK + "self_attn.k_proj.f_W.bias", 3)[1],
        intermediate_dim=_shape(arrays, _BLOCK + "mlp.gate_proj.f_W.bias", 2)[1],
        form="official",
        **block_options,
    )
    _check_rotary(tables, block)
    return _load(arrays, block, max_seq_len, steps)


def to_arrays(model: NeuralOdeLMHeadModel) -> dict[str, np.ndarray]:
    """The inverse of `load_gpt2` and `load_llama`; also takes a gradient with the model's structure, so that gradients
    compare by name.

    Raises:
        UserError: a model that these functions do not give back.
    """
    if not _units(model.transformer.flow.weights):
        raise UserError(
            "Official names only exist for generated weights, and this model has none (it is discretised, or has other"
            " weights). Give a model with `weights: generated`, before discretise."
        )
    lost = _not_official(model.config)
    if lost:
        raise UserError(
            f"The official code has no {', '.join(lost)}: its model with these arrays would be another function. Give a"
            " model without that."
        )
    return {name: np.asarray(_to_official_order(name, get(model)).array) for name, get in _accessors(model).items()}


def read_checkpoint(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Arrays of a checkpoint directory that the official code wrote with its Levanter (one zarr folder per array).

    Reads the model only (folders below `model/`, if there is one), by tensorstore. Names are official names.
    """
    import tensorstore as ts

    root = Path(path)
    if not root.is_dir():
        raise UserError(f"{root} is not a directory. Give the folder of one checkpoint, such as .../step-10000.")
    root = root / "model" if (root / "model").is_dir() else root
    arrays = {}
    for meta in sorted(root.rglob(".zarray")):
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(meta.parent)}}
        parts = [p for p in meta.parent.relative_to(root).parts if p != "array"]
        arrays[".".join(parts)] = np.asarray(ts.open(spec, open=True, read=True).result().read().result())
    if not arrays:
        raise UserError(
            f"{root} contains no arrays in the layout of the official code (folders with a .zarray file). To load a"
            " checkpoint of qkvflow itself, use qkvflow.runs.load_run."
        )
    return arrays


def _not_official(config: NeuralOdeConfig) -> list[str]:
    """The keys of a model with generated weights whose values `_load` does not give back."""
    official = {
        "weights.frozen_time": (config.weights, None),
        "weights.time_scale": (config.weights, GeneratedConfig.time_scale),
        "block.form": (config.block, "official" if isinstance(config.block, LlamaBlockConfig) else "parallel"),
        "block.convolution": (config.block, None),
        "depth.solver": (config.depth, "euler"),
        "depth.endpoint": (config.depth, "right"),
        "depth.step_size": (config.depth, "uniform"),
        "depth.coupling": (config.depth, None),
        "prelude_layers": (config, 0),
        "coda_layers": (config, 0),
        "control": (config, None),
        "embedding_multiplier": (config, 1.0),
    }
    values = {key: getattr(own, key.rpartition(".")[2], value) for key, (own, value) in official.items()}
    found = [f"`{key}: {value}`" for key, value in values.items() if value != official[key][1]]
    if not isinstance(config.block, Gpt2BlockConfig | LlamaBlockConfig):
        found.insert(0, f"`block: {config.block.get_choice_name(type(config.block))}`")
    return found + ["`depth.adjoint: reversible`"] * (config.depth.adjoint == "reversible")


def _load(arrays, block: BlockConfig, max_seq_len: int, steps: int) -> NeuralOdeLMHeadModel:
    vocab, embed = _shape(arrays, "embeddings.token_embeddings", 2)
    sinusoid, time_embed_dim = _shape(arrays, _first_time_network(arrays), 2)
    config = NeuralOdeConfig(
        max_seq_len=max_seq_len,
        hidden_dim=embed,
        block=block,
        weights=GeneratedConfig(time_embed_dim=time_embed_dim, sinusoidal_dim=(sinusoid - 1) // 2, init="official"),
        depth=DepthConfig(solver="euler", steps=steps, endpoint="right"),
    )
    build: Callable = lambda: config.build(Axis(VOCAB, vocab), key=jax.random.PRNGKey(0))  # noqa: E731
    model = eqx.filter_eval_shape(build)
    accessors = _accessors(model)
    _check_names(arrays, accessors)
    for name, get in accessors.items():
        model = eqx.tree_at(get, model, _from_official_order(name, arrays[name], get(model)), is_leaf=is_named)
    return model


def _accessors(model: NeuralOdeLMHeadModel) -> dict[str, Callable]:
    """Official name -> function that finds the array in a model (or in a gradient of its structure)."""
    found: dict[str, Callable] = {"embeddings.token_embeddings": lambda m: m.embeddings.token_embeddings.weight}
    if model.embeddings.position_embeddings is not None:
        found["embeddings.position_embeddings"] = lambda m: m.embeddings.position_embeddings.weight
    if model.lm_head is not None:
        found["lm_head.weight"] = lambda m: m.lm_head.weight
    norm = "norm" if isinstance(model.config.block, LlamaBlockConfig) else "ln_f"
    for part in ("weight", "bias"):
        if getattr(model.transformer.norm, part) is not None:
            found[f"transformer.{norm}.{part}"] = lambda m, part=part: getattr(m.transformer.norm, part)
    for path, unit in _units(model.transformer.flow.weights).items():
        find = lambda m, path=path: _follow(m.transformer.flow.weights, path)  # noqa: E731
        for lin in ("lin1", "lin2"):
            for part in ("weight", "bias"):
                found[f"{_BLOCK}{path}.{lin}.{part}"] = lambda m, f=find, n=lin, p=part: getattr(
                    getattr(f(m).net, n), p
                )
        is_norm = isinstance(unit.leaves, hax.nn.normalization.LayerNormBase)
        if is_norm:
            found[f"{_BLOCK}{path}.f_weight"] = lambda m, f=find: f(m).leaves.weight.projection
        else:
            found[f"{_BLOCK}{path}.f_W.weight"] = lambda m, f=find: f(m).leaves.weight.projection
            found[f"{_BLOCK}{path}.f_W.bias"] = lambda m, f=find: f(m).leaves.weight.base
        if unit.leaves.bias is not None:
            found[f"{_BLOCK}{path}.{'f_bias' if is_norm else 'f_b'}"] = lambda m, f=find: f(m).leaves.bias.projection
    return found


def _units(block) -> dict[str, Generated]:
    is_unit = lambda x: isinstance(x, Generated)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(block, is_leaf=is_unit)
    return {".".join(k.name for k in path): unit for path, unit in leaves if is_unit(unit)}


def _follow(tree, path: str):
    for name in path.split("."):
        tree = getattr(tree, name)
    return tree


def _official_axes(name: str, array: NamedArray) -> tuple:
    if name.endswith((".f_weight", ".f_bias")):
        return (*(a.name for a in array.axes if a.name != TIME_EMBED), TIME_EMBED)
    return tuple(a.name for a in array.axes)


def _to_official_order(name: str, array: NamedArray) -> NamedArray:
    return array.rearrange(_official_axes(name, array))


def _from_official_order(name: str, values: np.ndarray, template: NamedArray) -> NamedArray:
    axes = [template.resolve_axis(a) for a in _official_axes(name, template)]
    expected = tuple(a.size for a in axes)
    if tuple(values.shape) != expected:
        raise UserError(f"{name} has shape {tuple(values.shape)}, but must have {expected} for axes {axes}.")
    return hax.named(jax.numpy.asarray(values), axes).rearrange(template.axes)


def _check_rotary(tables: Mapping[str, np.ndarray], block: LlamaBlockConfig) -> None:
    for name, table in tables.items():
        positions, size = np.shape(table)
        HeadSize, Pos = Axis(HEAD_SIZE, size), Axis(POSITION, positions)
        # Turning (1..1, 0..0) gives (cos, sin), whatever the kind of rotary positions.
        first = hax.named(jax.numpy.repeat(jax.numpy.array([1.0, 0.0]), size // 2), HeadSize)
        turned = block.rope.build(HeadSize)(first, hax.arange(Pos)).rearrange((POSITION, HEAD_SIZE)).array
        half = turned[:, : size // 2] if name == "cos_cached" else turned[:, size // 2 :]
        error = np.abs(np.concatenate([half, half], axis=1) - table).max()
        # fp32 angles of the last position err by one ulp: 2e-4 at 2048.
        if error > 1e-6 * max(positions, 100):
            raise UserError(
                f"{_BLOCK}{_ROTARY}{name} differs by {error:.2g} from the rotary positions of {block.rope}. Give the"
                " ones used in training: rope=DefaultRotaryEmbeddingsConfig(theta=...)."
            )


def _check_names(arrays: Mapping[str, np.ndarray], accessors: Mapping[str, Callable]) -> None:
    missing, unknown = sorted(set(accessors) - set(arrays)), sorted(set(arrays) - set(accessors))
    if missing or unknown:
        parts = [f"{len(missing)} missing: {missing[:5]}"] if missing else []
        parts += [f"{len(unknown)} unknown: {unknown[:5]}"] if unknown else []
        raise UserError(
            "These arrays are not a complete official model: " + "; ".join(parts) + ". Names look like"
            f" '{_BLOCK}attn.c_attn.f_W.weight', without a prefix such as 'param/' or 'model.'."
        )


def _first_time_network(arrays: Mapping[str, np.ndarray]) -> str:
    names = sorted(n for n in arrays if n.endswith(".lin1.weight"))
    if not names:
        raise UserError(
            f"No time network found: a name such as '{_BLOCK}attn.c_attn.lin1.weight' is required; the given names"
            f" start with {sorted(arrays)[:3]}."
        )
    return names[0]


def _shape(arrays: Mapping[str, np.ndarray], name: str, ndim: int) -> tuple[int, ...]:
    if name not in arrays:
        raise UserError(f"{name} is missing. The given names start with {sorted(arrays)[:3]}.")
    shape = tuple(np.shape(arrays[name]))
    if len(shape) != ndim:
        raise UserError(f"{name} must have {ndim} dimensions, got shape {shape}.")
    return shape
