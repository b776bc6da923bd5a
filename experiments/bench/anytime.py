"""The effect of depth per token: loss and speed of one run with fewer steps, with exits, and with drafts.

    python -m experiments.bench.anytime --run runs/continuous --steps 3,4,6,8 --drafts 3x4,4x4

Writes `evaluation/anytime.json` into the run, which the report shows. Loss: nats per token of validation text, by
teacher forcing with the caches of generation; drafts have the loss of the full model, whose distribution they keep.
Evaluations: sequential evaluations of the field per generated token: a pass over several drafted positions counts
once. Speed: decoding of one text at a time, all ways in turn, with prompts from validation texts.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any

import jax
import numpy as np
from levanter.utils.tree_utils import inference_mode

import qkvflow as qkvflow  # registers the models
from experiments.bench.frame import spread
from experiments.records import device_name
from experiments.tables import Table
from qkvflow.axes import BATCH, POSITION
from qkvflow.cli import run_program
from qkvflow.errors import UserError
from qkvflow.files import json_text, write_text
from qkvflow.generation import Engine, SamplingOptions
from qkvflow.generation.drafting import Drafting
from qkvflow.generation.forced import ForcedReader, read_with_cache
from qkvflow.generation.prepare import PreparedModel
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.exits import ExitConfig
from qkvflow.models.shared_cache import EXACT
from qkvflow.ranges import Count
from qkvflow.runs import Run, load_run
from qkvflow.runs.evaluate import RunEvaluator


@dataclass
class AnytimeConfig:
    """
    Attributes:
        run: the run directory; a flow.
        steps: other numbers of steps for the evaluation.
        rule: the exit rule (kl, velocity, margin).
        thresholds: values for that rule.
        drafts: `3x4`: drafts of 4 tokens with 3 steps.
        temperature: of the timed texts.
        max_eval_batches: of the validation text.
        prompts: number of timed texts.
        prompt_tokens: number of tokens in each prompt; the texts fill the model's context.
        rounds: each round times every way once.
    """

    run: str
    steps: list[int] = field(default_factory=lambda: [3, 4, 6, 8])
    rule: str = "velocity"
    thresholds: list[float] = field(default_factory=lambda: [0.2, 0.3, 0.5, 0.8, 1.2])
    drafts: list[str] = field(default_factory=lambda: ["3x2", "3x4", "4x4"])
    temperature: float = 0.8
    max_eval_batches: Count = 16
    prompts: Count = 4
    prompt_tokens: Count = 32
    rounds: Count = 7


@dataclass(frozen=True)
class Way:
    """One way to evaluate the flow.

    Attributes:
        kind: `steps`, `exit` or `draft`.
        steps, evaluations: of the full grid.
    """

    kind: str
    name: str
    loss: float
    engine: Engine
    steps: int
    evaluations: int
    draft_steps: int = 0


def main(config: AnytimeConfig) -> dict[str, Any]:
    """Measures, prints and writes; returns what was written."""
    run = load_run(config.run)
    if not isinstance(run.model, NeuralOdeLMHeadModel):
        raise UserError(f"{config.run} is no flow but a Levanter model of one depth: there is nothing to choose")
    if config.prompt_tokens >= run.model.Pos.size:
        raise UserError(
            f"--prompt_tokens {config.prompt_tokens} leaves nothing to generate in the model's context of"
            f" {run.model.Pos.size} tokens (model.max_seq_len): lower it"
        )
    SamplingOptions(config.temperature)  # refuses one that cannot be
    found = list(ways(run, run.model, config))
    texts = prompts(run, config)
    rows = timed(found, texts, config)
    record = {
        "checkpoint_step": run.step,
        "date": date.today().isoformat(),
        "device": device_name(),
        "devices": jax.device_count(),
        "note": "compare ratios: medians over rounds in turn",
        "settings": {k: v for k, v in asdict(config).items() if k != "run"},
        "readings": rows,
    }
    target = run.path / "evaluation" / "anytime.json"
    target.parent.mkdir(exist_ok=True)
    write_text(target, json_text(record))
    shown = ("loss", "evaluations", "tokens_per_second", "speed", "speed_low", "speed_high")
    print(Table.of({"": f"{row['kind']} {row['name']}"} | {k: f"{row[k]:.4g}" for k in shown} for row in rows))
    print(f"Written to {target}")
    return record


def ways(run: Run, model: NeuralOdeLMHeadModel, config: AnytimeConfig) -> Iterator[Way]:
    """The full depth first, then all others, each with its loss."""
    model = inference_mode(model, True)
    depth, full = model.config.depth, model.config.depth.reading_steps
    grids = {steps: model.with_depth(depth.on_grid(steps)) for steps in dict.fromkeys([full, *config.steps])}
    limits = [ExitConfig(config.rule, threshold) for threshold in config.thresholds]
    drafts = [_drafting(given, full) for given in config.drafts]  # all before the first reading
    reader = ForcedReader(model, ExitConfig(config.rule, 1.0))
    examples = list(RunEvaluator(run, None, config.max_eval_batches).examples())

    def way(kind: str, name: str, loss: float, read: NeuralOdeLMHeadModel, draft_steps: int = 0, **options) -> Way:
        engine, plan = PreparedModel(read, **options).engine(1, read.Pos.size), read.config.plan
        return Way(kind, name, loss, engine, plan.steps, plan.evaluations, draft_steps)

    losses = {}
    for steps, read in grids.items():
        losses[steps] = read_with_cache(read, EXACT, examples).loss
        yield way("steps", str(steps), losses[steps], read)
    for exits in limits:
        loss = reader.read(examples, exits.threshold).loss
        yield way("exit", f"{config.rule} below {exits.threshold:g}", loss, model, exits=exits)
    for drafting in drafts:
        name = f"{drafting.tokens} at {drafting.steps} steps"
        yield way("draft", name, losses[full], model, drafting.steps, drafting=drafting)


def _drafting(given: str, full: int) -> Drafting:
    steps, _, tokens = given.partition("x")
    is_right = steps.isdecimal() and tokens.isdecimal() and 0 < int(steps) < full and int(tokens) > 0
    if not is_right:
        raise UserError(
            f"drafts must be such as 3x4, drafts of 4 tokens at 3 steps, which must be fewer than the {full} of the"
            f" flow; got {given!r:.40}"
        )
    drafting = Drafting.of(int(steps), int(tokens))
    assert drafting is not None
    return drafting


def prompts(run: Run, config: AnytimeConfig) -> list[list[int]]:
    """Beginnings of validation texts."""
    example = RunEvaluator(run, config.prompts, 1).example()
    rows = np.asarray(jax.device_get(example.tokens.rearrange((BATCH, POSITION)).array))
    return rows[: config.prompts, : config.prompt_tokens].tolist()


def timed(found: Sequence[Way], texts: list[list[int]], config: AnytimeConfig) -> list[dict[str, Any]]:
    """A row per way. speed: tokens per second relative to the first way in the same round; median, quartiles."""
    for way in found:
        _decode(way, texts[:1], config)
    rounds = [[_decode(way, texts, config) for way in found] for _ in range(config.rounds)]
    rows = []
    for i, way in enumerate(found):
        row = {"kind": way.kind, "name": way.name, "loss": way.loss, "evaluations": rounds[0][i][1]}
        row["tokens_per_second"] = statistics.median(own[i][0] for own in rounds)
        rows.append(row | spread("speed", [own[i][0] / own[0][0] for own in rounds]))
    return rows


def _decode(way: Way, texts: list[list[int]], config: AnytimeConfig) -> tuple[float, float]:
    """(tokens per second, evaluations of the field per token) over all texts."""
    engine, seconds, tokens, spent = way.engine, 0.0, 0, 0.0
    each = way.evaluations / way.steps
    for seed, text in enumerate(texts):
        new = engine.length - len(text)
        engine.admit(0, text, new, SamplingOptions(config.temperature, seed=seed))
        engine.prefill_all(len(text) - 1)
        engine.wait()
        before, started = engine.exited(), time.perf_counter()
        step = engine.decode(new)
        seconds += time.perf_counter() - started
        tokens, after = tokens + new, engine.exited()
        if step.drafted:
            spent += each * (way.steps * step.drafted[0].passes + way.draft_steps * step.drafted[0].proposed)
        elif after is not None and before is not None:
            spent += each * (after.steps - before.steps)
        else:
            spent += way.evaluations * new
    return tokens / seconds, spent / tokens


if __name__ == "__main__":
    run_program(main, AnytimeConfig)
