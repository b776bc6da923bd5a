"""Continues prompts with a trained run. Text streams to standard output; the speed goes to standard error.

For example:

    qkvflow sample --run runs/quickstart --prompt "The for statement is used to"
    qkvflow sample --run runs/quickstart --prompt_file prompts.txt --temperature 0
    echo "The for statement" | qkvflow sample --run runs/quickstart
"""

import sys
import time
from dataclasses import dataclass

import numpy as np

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config import Text
from qkvflow.errors import UserError
from qkvflow.generation.drafting import Drafted, Drafting
from qkvflow.generation.engine import Engine
from qkvflow.generation.prompts import Prompt, read_prompts, stop_strings
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.generation.text import Continuation, encode_prompt
from qkvflow.generation.writer import Writer, open_writer
from qkvflow.models.exits import ExitConfig, Exited
from qkvflow.models.shared_cache import CacheSharing
from qkvflow.progress import Progress
from qkvflow.ranges import Count, Steps

MAX_NEW_TOKENS = 256
MOST_TEXTS = 100_000


@dataclass
class SampleConfig:
    """
    Attributes:
        run: the run directory, or a Hugging Face folder.
        prompt: the text to continue; without it and `prompt_file`, standard input is the prompt.
        prompt_file: `.txt`, a prompt per line, or `.jsonl`, `{"prompt": "...", "control": [...]}` per line. All prompts
            are continued together.
        max_new_tokens: 256 by default, or fewer if the model's context is too short.
        temperature: 0 is greedy.
        top_k: sample only from the K most likely tokens.
        top_p: sample only from the most likely tokens with this total probability.
        seed: the same seed gives the same text; sample i uses seed + i.
        stop: ends a text before these words (`\\n` is a line break); may be given several times.
        num_samples: number of texts per prompt.
        steps: steps of the flow; as trained by default.
        solver: solver of the flow; as trained by default.
        draft_steps: draft tokens with the flow on a grid of this many steps, and verify them in one pass of the full
            grid: the same text if greedy, the same distribution if sampled, in fewer passes.
        draft_tokens: tokens per draft; 4 by default.
        exit: `{rule: kl, threshold: 0.01, min_steps: 1}`: a token stops integrating when the rule (kl, velocity,
            margin) predicts that the remaining steps would change little.
        cache: `every 2`, which keeps keys and values of every second evaluation only, or `latest`: less memory, but a
            different loss, which `qkvflow eval --cache` reports.
        dtype: precision of the computation, bf16 or f32; by default that of the weights.
        control: control signal, `[0, 1]`, for all prompts without their own.
        checkpoint_step: N of the checkpoint step-N; the newest by default.
        averaged: the average of the parameters over steps (`trainer.model_averaging`), instead of the last ones.
        use_cache: if false, recompute the whole text for each token: the same text, slower.
        batch_size: number of texts that are generated together.
    """

    run: str
    prompt: Text | None = None
    prompt_file: str | None = None
    max_new_tokens: Count | None = None
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: list[Text] | None = None
    num_samples: Count = 1
    steps: Steps | None = None
    solver: str | None = None
    draft_steps: int | None = None
    draft_tokens: int | None = None
    exit: ExitConfig | None = None
    cache: str | None = None
    dtype: str | None = None
    control: list[float] | None = None
    checkpoint_step: int | None = None
    averaged: bool = False
    use_cache: bool = True
    batch_size: Count = 16


@dataclass(frozen=True)
class Job:
    """One text to make.

    Attributes:
        title: what stands above it if there are several.
    """

    prompt: str
    tokens: list[int]
    max_new_tokens: int
    options: SamplingOptions
    control: np.ndarray | None
    title: str


def main(config: SampleConfig) -> list[str]:
    """Prints the texts; returns them, prompts included."""
    SamplingOptions(config.temperature, config.top_k, config.top_p, config.seed)
    stops = [stop for given in config.stop or [] for stop in stop_strings(given)]
    if config.num_samples > 1 and config.temperature == 0:
        raise UserError("num_samples: at temperature 0, all samples of a prompt are identical. Set --temperature 0.8")
    drafting = Drafting.of(config.draft_steps, config.draft_tokens)
    sharing = CacheSharing.of(config.cache)
    sharing.check(with_exits=config.exit is not None, with_drafts=drafting is not None)
    prompts = read_prompts(config.prompt, config.prompt_file)
    if len(prompts) * config.num_samples > MOST_TEXTS:
        raise UserError(
            f"{len(prompts) * config.num_samples:,} texts are requested; at most {MOST_TEXTS:,} are possible in one run"
            " of the program. Use fewer num_samples, and another --seed for the next run"
        )
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase(f"Loading {config.run}"):
            depth = (config.steps, config.solver)
            writer = open_writer(
                config.run,
                config.checkpoint_step,
                *depth,
                use_cache=config.use_cache,
                dtype=config.dtype,
                drafting=drafting,
                exits=config.exit,
                sharing=sharing,
                averaged=config.averaged,
            )
        jobs = _jobs(writer, prompts, config)
        size = min(config.batch_size, len(jobs))
        engine = writer.engine(size, max(len(job.tokens) + job.max_new_tokens for job in jobs))
        with progress.phase("Compiling"):
            _warm_up(engine, jobs[:size])
        texts, clock = [], _Clock()
        for first in range(0, len(jobs), size):
            texts += _write(writer, engine, jobs[first : first + size], stops, len(jobs) > 1, clock)
        sys.stdout.flush()
        progress.say(clock.report())
    return texts


def _jobs(writer: Writer, prompts: list[Prompt], config: SampleConfig) -> list[Job]:
    """Everything that is to be made, checked before any of it is."""
    jobs, prepared = [], writer.prepared
    for i, prompt in enumerate(prompts):
        tokens = encode_prompt(writer.tokenizer, prompt.text)
        new = config.max_new_tokens
        if new is None:
            new = max(1, min(MAX_NEW_TOKENS, prepared.max_seq_len - len(tokens)))
        prepared.check_length(len(tokens), new, prompt.where)
        try:
            control = prepared.check_control(config.control if prompt.control is None else prompt.control)
        except UserError as error:
            raise UserError(f"{prompt.where}: {error}") from None
        for sample in range(config.num_samples):
            seed = config.seed + len(jobs)
            options = SamplingOptions(config.temperature, config.top_k, config.top_p, seed)
            title = f"prompt {i + 1} of {len(prompts)}" if len(prompts) > 1 else ""
            if config.num_samples > 1:
                title += f"{', ' if title else ''}sample {sample + 1} of {config.num_samples}"
            jobs.append(Job(prompt.text, tokens, new, options, control, title))
    return jobs


def _warm_up(engine: Engine, jobs: list[Job]) -> None:
    """Runs every compiled step once, so that the times are those of generation. All slots are free afterwards: prompts
    that are admitted beside running texts are read one by one."""
    _admit(engine, jobs)
    engine.prefill_all(max(len(job.tokens) for job in jobs) - 1)
    engine.decode(1)
    for slot in range(engine.slots):
        engine.cancel(slot)


def _admit(engine: Engine, jobs: list[Job]) -> None:
    for slot, job in enumerate(jobs):
        engine.admit(slot, job.tokens, job.max_new_tokens, job.options, job.control)
    for slot in range(len(jobs), engine.slots):
        engine.cancel(slot)


class _Clock:
    """How long prefill and decoding took, and for how many tokens; what drafting and exits came to."""

    def __init__(self):
        self.prefill = self.decode = 0.0
        self.prompt_tokens = self.new_tokens = 0
        self.drafted: Drafted | None = None
        self.exited: Exited | None = None

    def report(self) -> str:
        def speed(name: str, tokens: int, seconds: float) -> str:
            rate = f" ({tokens / seconds:,.0f} tokens/s)" if seconds > 0 else ""
            return f"{name}: {tokens} tokens in {seconds:.3f} s{rate}"

        told = f"{speed('prefill', self.prompt_tokens, self.prefill)}, {speed('decode', self.new_tokens, self.decode)}"
        return ", ".join([told, *(str(came) for came in (self.drafted, self.exited) if came is not None)])


def _write(writer: Writer, engine: Engine, jobs: list[Job], stops: list[str], titled: bool, clock: _Clock) -> list[str]:
    """Makes the texts of one batch. The first unfinished one streams; those behind it wait for their turn."""
    began = time.perf_counter()
    _admit(engine, jobs)
    earlier = engine.exited()  # of texts that have ended, in rows that this batch leaves empty
    engine.prefill_all(max(len(job.tokens) for job in jobs) - 1)
    engine.wait()
    clock.prefill += time.perf_counter() - began
    clock.prompt_tokens += sum(len(job.tokens) for job in jobs)

    going = [Continuation(writer.vocabulary, job.tokens, stops, writer.stop_tokens) for job in jobs]
    texts, shown = [job.prompt for job in jobs], _Shown(jobs, titled)
    drafted: dict[int, Drafted] = {}
    while any(text.reason is None for text in going):
        began = time.perf_counter()
        step = engine.decode(1)
        clock.decode += time.perf_counter() - began
        for slot, text in enumerate(going):
            if text.reason is not None:
                continue
            for token, complete, _ in step.added(slot):
                clock.new_tokens += 1
                texts[slot] += text.push(token, complete)
                if text.reason is not None:
                    break
            if step.drafted:
                drafted[slot] = step.drafted[slot]
            if text.reason is not None and not step.complete[slot]:
                engine.cancel(slot)
        shown.update(texts, [text.reason is not None for text in going])
    if drafted:
        clock.drafted = sum(drafted.values(), clock.drafted or Drafted())
    exited = engine.exited()
    if exited is not None and earlier is not None:
        own = exited - earlier
        clock.exited = own if clock.exited is None else clock.exited + own
    return texts


class _Shown:
    """What of the texts stands on standard output: one after another, each as far as it has come."""

    def __init__(self, jobs: list[Job], titled: bool):
        self._jobs, self._titled = jobs, titled
        self._at, self._length = 0, -1  # the text that streams, and how much of it is shown; -1: not even its title

    def update(self, texts: list[str], finished: list[bool]) -> None:
        while self._at < len(texts):
            if self._length < 0:
                title = self._jobs[self._at].title
                sys.stdout.write(f"=== {title}\n" if self._titled else "")
                self._length = 0
            sys.stdout.write(texts[self._at][self._length :])
            self._length = len(texts[self._at])
            if not finished[self._at]:
                break
            sys.stdout.write("\n")
            self._at, self._length = self._at + 1, -1
        sys.stdout.flush()


if __name__ == "__main__":
    run_program(main, SampleConfig)
