"""How a model is sharded over devices: the mapping from its shapes, and errors for axes that do not divide."""

import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Mapping
from math import prod

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping
from levanter.trainer import TrainerConfig

from qkvflow.axes import BATCH, EMBED, FEATURES, HEAD_SIZE, HEADS, KEY_POSITION, KV_HEAD, MLP, POSITION
from qkvflow.errors import Notice, UserError
from qkvflow.named import named_leaves

# Arrays that a step computes, whatever the block: states, heads, hidden units.
_COMPUTED = ((BATCH, POSITION, EMBED), (BATCH, POSITION, HEADS, HEAD_SIZE), (BATCH, POSITION, MLP))


def complete_mesh(trainer: TrainerConfig, model: eqx.Module) -> TrainerConfig:
    """A copy of the trainer's configuration that also divides `kv_head` as `heads`, and `features` as `embed`.

    Each where all axes of that name in the model (given by its shapes) can be divided so, and the configuration has no
    mapping of its own for it.

    Raises:
        UserError: an axis is mapped to one that the mesh does not have.
    """
    mesh = trainer.mesh
    for mapping in (trainer.compute_axis_mapping, trainer.parameter_axis_mapping):
        for name in mapping:
            _mesh_axes(name, mapping, trainer.device_mesh.shape)
    heads, features = _as(trainer, model, KV_HEAD, HEADS), _as(trainer, model, FEATURES, EMBED)
    shared, param = {**mesh.shared_mapping, **heads}, {**mesh.param_mapping, **features}
    return dataclasses.replace(trainer, mesh=dataclasses.replace(mesh, shared_mapping=shared, param_mapping=param))


def _as(trainer: TrainerConfig, model: eqx.Module, name: str, other: str) -> dict[str, str | list[str]]:
    """The mapping of the axis `name` like that of `other`; empty if there is one, or it cannot be."""
    mapping = trainer.mesh.resolved_param_mapping
    over = mapping.get(other)
    if over is None or name in mapping:
        return {}
    count = prod(trainer.device_mesh.shape[axis] for axis in _mesh_axes(other, mapping, trainer.device_mesh.shape))
    if any(axis.name == name and axis.size % count for _, array in _arrays(model) for axis in array.axes):
        return {}
    return {name: over if isinstance(over, str) else list(over)}


def check_mesh(trainer: TrainerConfig, model: eqx.Module, Pos: Axis) -> None:
    """Checks that every array of a model, given by its shapes, and a sequence can be divided as the mesh says.

    Raises:
        UserError: an axis whose size the devices do not divide, and for an array that would be divided twice over the
            same devices, a parameter or one that the model computes. JAX would fail late, without the name of the
            array.

    A mapping of an axis that nothing has gets a notice.
    """
    sizes = trainer.device_mesh.shape
    compute, stored = trainer.compute_axis_mapping, trainer.parameter_axis_mapping

    def check(where: str, axes: Mapping[str, int | None], mapping: ResourceMapping) -> None:
        used: dict[str, str] = {}
        for name, size in axes.items():
            over = _mesh_axes(name, mapping, sizes)
            count = prod(sizes[axis] for axis in over)
            if size is not None and size % count:
                raise UserError(
                    f"`trainer.mesh` divides `{name}` of {where} (size {size}) over the {count} devices of"
                    f" {' x '.join(over)}, but {size} is not divisible by {count}. Change the size of that mesh axis,"
                    " or of the model"
                )
            for axis in over:
                if axis in used:
                    raise UserError(
                        f"`trainer.mesh` divides {where} twice over `{axis}`: along `{used[axis]}` and along `{name}`."
                        " Map one of them to another axis"
                    )
                used[axis] = name

    # The last two may have been mapped by `complete_mesh`.
    known = {KEY_POSITION, *itertools.chain(*_COMPUTED), KV_HEAD, FEATURES}
    for path, array in _arrays(model):
        check(f"`{path}`", {axis.name: axis.size for axis in array.axes}, stored)
        known |= {axis.name for axis in array.axes}
    check("a sequence", {Pos.name: Pos.size}, compute)
    for axes in _COMPUTED:
        check(f"the array {{{', '.join(axes)}}} of a step", dict.fromkeys(axes), compute)
    given = [trainer.mesh.shared_mapping, trainer.mesh.compute_mapping, trainer.mesh.param_mapping]
    for name in sorted(set(itertools.chain(*given)) - known):
        text = f"`trainer.mesh` maps `{name}`, but no array of this model has an axis of that name"
        warnings.warn(Notice(text), stacklevel=2)


def _mesh_axes(name: str, mapping: ResourceMapping, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of the mesh that the axis `name` is divided over; sizes: of all that the mesh has."""
    over = mapping.get(name, ())
    over = (over,) if isinstance(over, str) else tuple(over)
    unknown = [axis for axis in over if axis not in sizes]
    if unknown:
        raise UserError(
            f"`trainer.mesh` maps `{name}` to `{unknown[0]}`, which is not an axis of the mesh: it has"
            f" {', '.join(sizes)}"
        )
    return over


def _arrays(model: eqx.Module) -> Iterator[tuple[str, NamedArray]]:
    """Paths and arrays."""
    for path, leaf in named_leaves(model):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf
