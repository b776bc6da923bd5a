"""What is trained: the YAML of the experiment; a flow and a GPT-2, and both tuned on another text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.cost import Cost, cost_of
from experiments.jobs import Arm
from experiments.protocol import TwoTextsConfig
from experiments.recipes import Changes, Recipe
from experiments.texts import Text
from qkvflow.ranges import Count


@dataclass
class AdaptiveDepthConfig(TwoTextsConfig):
    """Besides what `TwoTextsConfig` says:

    Attributes:
        flow, gpt2: `model` of train_lm.
        pretrain: other keys of train_lm, for both models. scratch: for the GPT-2 that is trained on the other text
            alone.
        full, lora: of finetune_lm. depths: M, the numbers of steps at which the flow is tuned.
        both_ways: from the first text to the second and back.
    """

    flow: dict[str, Any] = field(default_factory=dict)
    gpt2: dict[str, Any] = field(default_factory=dict)
    pretrain: dict[str, Any] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    depths: list[Count] = field(default_factory=list)
    both_ways: bool = True

    @property
    def layers(self) -> int:
        """Of GPT-2; steps that the flow is trained with."""
        return self.flow["depth"]["steps"]


@dataclass(frozen=True)
class Stage:
    """
    Attributes:
        system: `flow` or `gpt2`. kind: `pretrain`, `full`, `lora` or `scratch`. target: name of the text.
        depth: M; None for a model of one depth. source: text of the base; None without a base.
    """

    system: str
    kind: str
    target: str
    depth: int | None
    source: str | None


def arms(config: AdaptiveDepthConfig, texts: list[Text], run_dir: Path) -> list[Arm]:
    """All trainings, bases before what is made from them."""
    ways = [(texts[0], texts[1]), (texts[1], texts[0])][: 1 + config.both_ways]
    plain = {name: Recipe(config.overrides).but({"model": getattr(config, name)}) for name in ("flow", "gpt2")}
    costs = {(name, None): cost_of(recipe) for name, recipe in plain.items()}
    for depth in config.depths:
        costs["flow", depth] = cost_of(plain["flow"].but({"model": {"depth": {"steps": depth}}}))
    return [arm for source, target in ways for arm in _one_way(config, source, target, costs, run_dir)]


def _one_way(
    config: AdaptiveDepthConfig, source: Text, target: Text, costs: Mapping[tuple[str, int | None], Cost], run_dir: Path
) -> Iterator[Arm]:
    def arm(label: str, what: Stage, text: Text, *parts: Changes, base: Arm | None = None) -> Arm:
        recipe, cost = config.recipe({}, text, run_dir, *parts), costs[what.system, what.depth]
        return Arm(label=f"{label}-{what.kind}", recipe=recipe, cost=cost, what=what, text=text, base=base)

    bases = {}
    for name in ("flow", "gpt2"):
        stage, model = Stage(name, "pretrain", source.name, None, None), {"model": getattr(config, name)}
        bases[name] = arm(f"{source.name}-{name}", stage, source, model, config.pretrain)
    yield from bases.values()
    stage = Stage("gpt2", "scratch", target.name, None, None)
    yield arm(f"{target.name}-gpt2", stage, target, {"model": config.gpt2}, config.scratch)
    for kind, keys in (("full", config.full), ("lora", config.lora)):
        for name, depth in [("gpt2", None), *(("flow", depth) for depth in config.depths)]:
            stage = Stage(name, kind, target.name, depth, source.name)
            label = f"{source.name}-{target.name}-{name}{depth or ''}"
            yield arm(label, stage, target, keys, {"steps": depth}, base=bases[name])
