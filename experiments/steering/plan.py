"""What is trained: the model with controls that say which text it reads, and with controls that say nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import rates
from experiments.cost import cost_of
from experiments.rates import Job
from experiments.steering.config import SteeringConfig
from experiments.steering.records import training_records
from experiments.systems import evaluated, merged, on_text
from experiments.texts import Text
from qkvflow.config import decode, read_yaml
from qkvflow.errors import UserError
from qkvflow.runs.config import TrainConfig

ARMS = {
    "steered": "the control of a record says which text it is from",
    "shuffled": "the same controls, dealt out to the records at random",
}


@dataclass(frozen=True)
class Variant:
    """One of ARMS. raw: configuration of train_lm without a name and a seed."""

    label: str
    flops: float
    raw: dict[str, Any]

    @property
    def size(self) -> str:
        return self.label


def planned_jobs(config: SteeringConfig, texts: list[Text], run_dir: Path) -> list[Job[Variant]]:
    """All trainings, a whole seed before the next. Their records are written below `run_dir`.

    Errors: `UserError` if the configuration cannot be read, its model hears no control of two numbers, its tokens are
    not bytes, or samples do not fit into its sequences.
    """
    if config.base is None:
        raise UserError("`base` is missing: a configuration of train_lm, such as configs/wikitext2/hybrid_flow.yaml")
    raw = on_text(merged(read_yaml(Path(config.base)), config.overrides), texts[0], run_dir, config.select_batches)
    plain = decode(TrainConfig, raw)
    if plain.control_dim != 2:
        raise UserError(f"`model.control.dim` must be 2, a number for each text, but is {plain.control_dim}")
    if plain.data.tokenizer != "byte":
        raise UserError(f"the judge counts bytes: `data.tokenizer` must be byte, but is {plain.data.tokenizer}")
    if config.length + 1 > plain.model.max_seq_len:
        raise UserError(
            f"samples of `length` {config.length} and the token before them are longer than `model.max_seq_len`,"
            f" {plain.model.max_seq_len}"
        )
    raw = merged(evaluated(raw, config.evaluations), {"data": {"control_key": "control"}})
    variants = []
    for arm in ARMS:
        options = {"size": config.record, "without": config.without_control, "shuffled": arm == "shuffled"}
        files = {
            key: training_records(texts, part, run_dir / "records" / f"{arm}-{part}.jsonl", **options)
            for key, part in (("train", "train"), ("validation", "select"))
        }
        own = merged(raw, {"data": files})
        variants.append(Variant(arm, cost_of(own).flops * plain.trainer.num_train_steps, own))
    return [rates.job(v, seed, v.raw["optimizer"]["learning_rate"], True) for seed in config.seeds for v in variants]
