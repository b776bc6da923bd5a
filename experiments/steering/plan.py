"""The plan of the study: its YAML; the hybrid with controls that name the text, or random ones; layers with a token."""

from dataclasses import dataclass, field
from pathlib import Path

from experiments.config import TwoTextsConfig
from experiments.cost import cost_of
from experiments.jobs import Arm
from experiments.recipes import Recipe, ordinary
from experiments.steering.controls import data_of, training_records
from experiments.texts import PARTS, Text
from qkvflow.errors import UserError
from qkvflow.ranges import Count, Positive, ProperShare

ARMS = {
    "steered": "the control of a record says which text it is from",
    "shuffled": "the same controls, assigned to the records at random",
    "token": "ordinary layers in place of the flow, as many as its steps, and a control token instead of the vector",
}


@dataclass
class SteeringConfig(TwoTextsConfig):
    """In addition to `TwoTextsConfig`:

    Attributes:
        base: configuration of train_lm, for a model with control; its data is replaced.
        record: characters of a record.
        without_control: fraction of the records without control.
        samples: number of texts generated per control and seed.
        length: bytes of each generated text.
        temperature: of sampling; greedy samples would all be the same.
        between: controls (1 - u, u) from text A at u = 0 to text B at u = 1.
    """

    base: str | None = None
    record: Count = 1000
    without_control: ProperShare = 0.2
    samples: Count = 64
    length: Count = 120
    temperature: Positive = 1.0
    between: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])

    def check(self) -> None:
        super().check()
        if not {0.0, 1.0} <= set(self.between):
            raise UserError(f"`between` must have 0 (text A) and 1 (text B) among it, got {self.between}")


@dataclass(frozen=True)
class Named:
    """arm: of ARMS."""

    arm: str


def arms(config: SteeringConfig, texts: list[Text], run_dir: Path) -> list[Arm]:
    """ARMS. Writes their records below `run_dir`.

    Raises:
        UserError: the configuration cannot be read, its model has no control with two components, its tokens are not
            bytes, samples do not fit into its sequences, or its flow is not an Euler flow on a fixed grid.
    """
    recipe = config.recipe(config.base, texts[0], run_dir)
    plain = recipe.config
    if plain.control_dim != 2:
        raise UserError(f"`model.control.dim` must be 2, a number for each text, but is {plain.control_dim}")
    if plain.data.tokenizer != "byte":
        raise UserError(f"the judge counts bytes: `data.tokenizer` must be byte, but is {plain.data.tokenizer}")
    if config.length + 1 > plain.model.max_seq_len:
        raise UserError(
            f"samples of `length` {config.length} and the token before them are longer than `model.max_seq_len`,"
            f" {plain.model.max_seq_len}"
        )
    least = max(config.record, config.length, plain.Pos.size)
    for text in texts:
        short = [part for part in PARTS if len(text.read(part)) < least]
        if short:
            raise UserError(
                f"the text {text.name} has fewer than {least} characters in {', '.join(short)}, but a record has"
                f" {config.record}, a sample {config.length} and a sequence {plain.Pos.size}: give more text, or lower"
                " `record` or `length`"
            )
    names = ("record", "without_control", "samples", "length", "temperature", "between")
    asks = {name: getattr(config, name) for name in names}
    asks |= {text.name: [text.hash(part) for part in PARTS] for text in texts}
    layers = Recipe({**recipe.raw, "model": ordinary(recipe.euler_flow(), plain.model.depth.steps)})
    found = []
    for name in ARMS:
        is_token = name == "token"
        options = {"size": config.record, "without": config.without_control, "shuffled": name == "shuffled"}
        options["sequence"] = plain.Pos.size if is_token else None
        files = {
            key: training_records(texts, part, run_dir / "records" / f"{name}-{part}.jsonl", **options)
            for key, part in (("train", "train"), ("validation", "select"))
        }
        data = data_of(**files) if is_token else {"control_key": "control", **files}
        own = (layers if is_token else recipe).but({"data": data})
        found.append(Arm(label=name, recipe=own, cost=cost_of(own), what=Named(name), asks=asks))
    return found
