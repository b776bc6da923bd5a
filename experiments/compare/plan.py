"""What is trained: systems in the sizes and lengths that the rows ask for, as configurations of train_lm."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.compare.config import SAME_FLOPS, CompareConfig
from experiments.cost import Cost, cost_of, width_with
from experiments.systems import evaluated, merged, system
from experiments.texts import Text


@dataclass(frozen=True)
class Variant:
    """A system in one size, trained for one number of steps.

    rows: those that it stands in. flops: of its whole training.
    raw: configuration of train_lm without a name, seed and chosen learning rate.
    """

    system: str
    rows: tuple[str, ...]
    width: int
    steps: int
    cost: Cost
    raw: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.system}-d{self.width}-s{self.steps}"

    @property
    def size(self) -> tuple[str, int]:
        return self.system, self.width

    @property
    def flops(self) -> float:
        return self.cost.flops * self.steps


def variants(config: CompareConfig, text: Text, run_dir: Path) -> list[Variant]:
    """All variants, the reference first; the same model with the same number of steps stands once.

    Errors: `UserError` if a configuration cannot be read, or the costs of a model are not known.
    """
    names = [config.reference, *(name for name in config.systems if name != config.reference)]
    raws = {
        name: system(config.systems[name], config.overrides, text, run_dir, config.select_batches) for name in names
    }
    reference = _variant(config, config.reference, (), raws[config.reference])
    found: dict[str, Variant] = {}

    def add(variant: Variant) -> None:
        known = found.get(variant.label, dataclasses.replace(variant, rows=()))
        found[variant.label] = dataclasses.replace(known, rows=(*known.rows, *variant.rows))

    for row in config.rows:
        for name, raw in raws.items():
            add(_variant(config, name, (row,), _equal(row, raw, reference)))
    return list(found.values())


def _equal(row: str, raw: dict[str, Any], reference: Variant) -> dict[str, Any]:
    """The configuration that has as many steps, FLOPs or parameters as the reference."""
    steps = reference.steps
    if row == "iso_parameter":
        width = width_with(raw, reference.cost.parameters)
        raw = merged(raw, {"model": {"hidden_dim": width}})
    elif row == "iso_flop":
        share = reference.cost.flops / cost_of(raw).flops
        steps = steps if abs(share - 1) < SAME_FLOPS else max(1, round(steps * share))
    return merged(raw, {"trainer": {"num_train_steps": steps}})


def _variant(config: CompareConfig, name: str, rows: tuple[str, ...], raw: dict[str, Any]) -> Variant:
    width, steps = raw["model"]["hidden_dim"], raw["trainer"]["num_train_steps"]
    raw = evaluated(raw, config.evaluations)
    return Variant(name, rows, width, steps, cost_of(raw), raw)
