"""The plan of the experiment: its YAML; a flow and a GPT-2, and both tuned on another text."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax

from experiments.alike import check_alike
from experiments.config import TwoTextsConfig
from experiments.cost import Cost, cost_of
from experiments.jobs import Arm
from experiments.recipes import Changes, Recipe, value_at
from experiments.texts import Text
from qkvflow.errors import UserError
from qkvflow.ranges import Count
from qkvflow.training.checks import model_shape

_COMPARED = ("full", "lora", "scratch")  # kinds of trainings on the other text, of one length


@dataclass
class AdaptiveDepthConfig(TwoTextsConfig):
    """In addition to `TwoTextsConfig`:

    Attributes:
        flow, gpt2: `model` of train_lm.
        pretrain: other keys of train_lm, for both models.
        scratch: the same for the GPT-2 trained only on the other text.
        full, lora: keys of finetune_lm for each mode.
        depths: M, the numbers of steps at which the flow is tuned.
        both_ways: from the first text to the second and vice versa.
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
    def kinds(self) -> dict[str, str]:
        """The modes of fine-tuning, in words."""
        embeddings = " and embeddings" if value_at(self.lora, "mode.train_embeddings") else ""
        return {"full": "all weights", "lora": f"LoRA{embeddings}"}

    @property
    def layers(self) -> int:
        """Layers of GPT-2, and steps of the flow in training."""
        return self.flow["depth"]["steps"]

    def check(self) -> None:
        super().check()
        steps = value_at(self.flow, "depth.steps")
        if not isinstance(steps, int) or self.gpt2.get("num_layers") != steps:
            raise UserError(
                f"`flow.depth.steps` ({steps}) and `gpt2.num_layers` ({self.gpt2.get('num_layers')}) must be the same"
                " number: the page compares models of one depth"
            )
        if not self.depths or len(set(self.depths)) < len(self.depths):
            raise UserError(
                f"`depths` must be the numbers of steps at which the flow is tuned, each once, for example [3, 6]; got"
                f" {self.depths or 'none'}"
            )
        for kind in self.kinds:
            if value_at(getattr(self, kind), "mode.type") != kind:
                raise UserError(f"`{kind}.mode.type` must be {kind}: the page calls it {self.kinds[kind]!r}")
        kinds = {name: value_at(getattr(self, name), "trainer.num_train_steps") for name in _COMPARED}
        if len(set(kinds.values())) > 1:
            raise UserError(f"{', '.join(f'`{name}`' for name in kinds)} must have as many steps, but have {kinds}")
        if value_at(self.overrides, "data.tokenizer", "byte") != "byte":
            raise UserError("`overrides.data.tokenizer` must be byte: the page gives losses in nats per byte")


@dataclass(frozen=True)
class Stage:
    """
    Attributes:
        system: `flow` or `gpt2`. kind: `pretrain`, `full`, `lora` or `scratch`. target: name of the text.
        depth: M; None for a model of fixed depth. source: text of the base; None without a base.
    """

    system: str
    kind: str
    target: str
    depth: int | None
    source: str | None


def arms(config: AdaptiveDepthConfig, texts: list[Text], run_dir: Path) -> list[Arm]:
    """All trainings, bases before the models tuned from them.

    Raises:
        UserError: a configuration is invalid, the flow has no weights at other times, LoRA finds nothing to adapt, or
            trainings whose losses are compared do not read the same tokens.
    """
    models = {name: {"model": getattr(config, name)} for name in ("flow", "gpt2")}

    @functools.cache
    def cost(system: str, depth: int | None) -> Cost:
        own = {"model": {"depth": {"steps": depth}}} if depth else {}
        return cost_of(Recipe(config.overrides).but(models[system], own))

    def arm(
        system: str, kind: str, text: Text, *parts: Changes, depth: int | None = None, base: Arm | None = None
    ) -> Arm:
        what = Stage(system, kind, text.name, depth, base and base.text.name)
        label = "-".join(filter(None, [what.source, text.name, f"{system}{depth or ''}", kind]))
        recipe, price = config.recipe({}, text, run_dir, *parts), cost(system, depth)
        return Arm(label=label, recipe=recipe, cost=price, what=what, text=text, base=base)

    found: list[Arm] = []
    for source, target in [texts, texts[::-1]][: 1 + config.both_ways]:
        bases = {name: arm(name, "pretrain", source, model, config.pretrain) for name, model in models.items()}
        if not bases["flow"].recipe.is_flow:
            raise UserError(
                "`flow` must be a `type: neuralode` whose weights are functions of time: others have no values at other"
                " depths"
            )
        found += [*bases.values(), arm("gpt2", "scratch", target, models["gpt2"], config.scratch)]
        for kind in ("full", "lora"):
            for name, depth in [("gpt2", None), *(("flow", depth) for depth in config.depths)]:
                keys = getattr(config, kind), {"steps": depth}
                found.append(arm(name, kind, target, *keys, depth=depth, base=bases[name]))
                _check_adapts(bases[name].recipe, found[-1].recipe, depth)
    _check_same_tokens(found)
    return found


def _check_same_tokens(found: list[Arm]) -> None:
    """Raises: UserError: the two bases, or the trainings on the other text, do not read the same tokens."""
    bases = {arm.label: arm.base.recipe for arm in found if arm.base}
    for kinds in (("pretrain",), _COMPARED):
        own = {arm.label: arm.recipe for arm in found if arm.what.kind in kinds}
        check_alike(own, next(iter(own)), bases)


def _check_adapts(base: Recipe, tuned: Recipe, depth: int | None) -> None:
    """Raises: UserError: the base cannot be adapted, which would show after its training only."""
    mode, model = tuned.config.mode, base.config.model
    wanted = mode.model_config(model, depth)
    shape = model_shape(model, hax.Axis("vocab", len(base.tokenizer())))
    eqx.filter_eval_shape(lambda m: mode.adapt(m, wanted, key=jax.random.PRNGKey(0)), shape)
