"""How a model is sharded over devices: the mapping from its shapes, and errors for axes that do not divide."""

import dataclasses
from collections.abc import Iterator
from math import prod

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping
from levanter.trainer import TrainerConfig

from qkvflow.axes import EMBED, FEATURES, HEADS, KV_HEAD
from qkvflow.errors import UserError
from qkvflow.named import named_leaves


def complete_mesh(trainer: TrainerConfig, model: eqx.Module) -> TrainerConfig:
    """A copy of the trainer's configuration that also divides `kv_head` as `heads`, and `features` as `embed`.

    Each where all axes of that name in the model (given by its shapes) can be divided so, and the configuration has no
    mapping of its own for it.
    """
    mesh = trainer.mesh
    heads, features = _as(trainer, model, KV_HEAD, HEADS), _as(trainer, model, FEATURES, EMBED)
    shared, param = {**mesh.shared_mapping, **heads}, {**mesh.param_mapping, **features}
    return dataclasses.replace(trainer, mesh=dataclasses.replace(mesh, shared_mapping=shared, param_mapping=param))


def _as(trainer: TrainerConfig, model: eqx.Module, name: str, other: str) -> dict[str, str | list[str]]:
    """The mapping of the axis `name` like that of `other`; empty if there is one, or it cannot be."""
    mapping = trainer.mesh.resolved_param_mapping
    over = mapping.get(other)
    if over is None or name in mapping:
        return {}
    count = prod(trainer.device_mesh.shape[axis] for axis in _tuple(over))
    if any(axis.name == name and axis.size % count for _, array in _arrays(model) for axis in array.axes):
        return {}
    return {name: over if isinstance(over, str) else list(over)}


def check_mesh(trainer: TrainerConfig, model: eqx.Module, Pos: Axis) -> None:
    """Checks that every array of a model, given by its shapes, and a sequence can be divided as the mesh says.

    Raises:
        UserError: an axis whose size the devices do not divide, and for an array that would be divided twice over the
            same devices. JAX would fail late, without the name of the array.
    """
    sizes = trainer.device_mesh.shape
    compute, stored = trainer.compute_axis_mapping, trainer.parameter_axis_mapping

    def check(where: str, axes: dict[str, int], mapping: ResourceMapping) -> None:
        used: dict[str, str] = {}
        for name, size in axes.items():
            over = _tuple(mapping.get(name, ()))
            unknown = [axis for axis in over if axis not in sizes]
            if unknown:
                raise UserError(
                    f"`trainer.mesh` maps `{name}` to `{unknown[0]}`, which is not an axis of the mesh: it has"
                    f" {', '.join(sizes)}"
                )
            count = prod(sizes[axis] for axis in over)
            if size % count:
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

    for path, array in _arrays(model):
        check(f"`{path}`", {axis.name: axis.size for axis in array.axes}, stored)
    check("a sequence", {Pos.name: Pos.size}, compute)


def _arrays(model: eqx.Module) -> Iterator[tuple[str, NamedArray]]:
    """Paths and arrays."""
    for path, leaf in named_leaves(model):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def _tuple(over: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return (over,) if isinstance(over, str) else tuple(over)
