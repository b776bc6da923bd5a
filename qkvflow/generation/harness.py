"""The interface to lm-evaluation-harness: scores continuations and generates texts, in batches.

It needs the extra `eval`, so programs only import this module to run tasks.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel
from levanter.tokenizers import MarinTokenizer
from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from qkvflow.axes import BATCH, EMBED, POSITION
from qkvflow.errors import Notice, UserError, first_line
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.generation.text import Continuation
from qkvflow.generation.writer import Writer

# Names of the number of new tokens, as the harness knows them.
_NAMES_OF_LENGTH = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_READ = {*_NAMES_OF_LENGTH, "until", "do_sample", "temperature", "top_k", "top_p"}
# Of what is not read: values that change nothing.
_DEFAULTS = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "repetition_penalty", "length_penalty"), 1),
    **dict.fromkeys(("min_p", "no_repeat_ngram_size"), 0),
    "use_cache": True,
}
_NEW_TOKENS = 256  # if the task does not say: the harness's own default
_LENGTHS = (64, 256)  # texts are padded to one of these, or to a multiple of the last: each is compiled once


class HarnessModel(TemplateLM):
    """The methods that the harness calls: `loglikelihood`, `loglikelihood_rolling` and `generate_until`.

    Texts are tokenized without special tokens; an empty context becomes the begin-of-text token, or the end-of-text
    token. Texts longer than the model's context are truncated from the left. Both match the harness's behaviour for
    transformers models. Differs from it where a task does not say how many tokens it wants, and 256 would leave less
    than half of the context for the prompt: it gets at least that half, or all that the prompt leaves.
    """

    def __init__(self, model: LmHeadModel, writer: Writer, batch_size: int):
        """
        Args:
            model: in inference mode, with its weights evaluated.
            writer: the same model prepared for generation.
            batch_size: number of texts per batch.
        """
        super().__init__()
        self._model, self._writer, self._size = model, writer, batch_size
        self._codec: MarinTokenizer = writer.tokenizer
        self.max_length = writer.prepared.max_seq_len

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        begin, end = self._codec.bos_token_id, self._codec.eos_token_id
        found = end if begin is None else begin
        if found is None:
            raise UserError("the tokenizer has no begin-of-text or end-of-text token, which tasks put before a text")
        return found

    @property
    def tokenizer_name(self) -> str:
        return self._writer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options) -> list[int]:
        """Without special tokens by default."""
        return list(self._codec.encode(string, add_special_tokens=bool(add_special_tokens)))

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, cut into windows of the model's context."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((("", ""), *make_disjoint_window(window)))
                owners.append(i)
        total = [0.0] * len(requests)
        for i, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            total[i] += value
        return total

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **options) -> list[tuple[float, bool]]:
        """For each (texts, context, continuation): log p of the continuation, and whether greedy decoding gives it."""
        rows = [(list(context) + list(behind))[-(self.max_length + 1) :] for _, context, behind in requests]
        counts = [min(len(behind), len(row) - 1) for row, (_, _, behind) in zip(rows, requests, strict=True)]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # batches of similar lengths
        for start in range(0, len(rows), self._size):
            batch = longest_first[start : start + self._size]
            value, greedy = self._score([rows[i] for i in batch])
            for k, i in enumerate(batch):
                end = len(rows[i]) - 1
                told = slice(end - counts[i], end)
                found[i] = float(value[k, told].sum(dtype=np.float64)), bool(greedy[k, told].all())
        return found

    def _score(self, rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """log p of the next token at each position of each row, and whether it is the likeliest: [rows, positions]."""
        longest = max(len(row) for row in rows) - 1
        length = next((n for n in _LENGTHS if longest <= n), -(-longest // _LENGTHS[-1]) * _LENGTHS[-1])
        length = min(length, self.max_length)
        tokens, targets = np.zeros((2, self._size, length), np.int32)
        for k, row in enumerate(rows):
            tokens[k, : len(row) - 1], targets[k, : len(row) - 1] = row[:-1], row[1:]
        axes = (Axis(BATCH, self._size), Axis(POSITION, length))
        told = _told(self._model, hax.named(tokens, axes), jnp.asarray(targets), len(self._writer.vocabulary))
        return jax.device_get(told)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The texts generated after the contexts, each up to the first of its stop strings."""
        jobs = [self._job(seed, *request.args) for seed, request in enumerate(requests)]
        texts = [""] * len(jobs)
        some = [i for i, (_, new, *_) in enumerate(jobs) if new > 0]
        longest_first = sorted(some, key=lambda i: -len(jobs[i][0]))
        for start in range(0, len(some), self._size):
            batch = longest_first[start : start + self._size]
            for i, text in zip(batch, self._write([jobs[i] for i in batch]), strict=True):
                texts[i] = text
        return texts

    def _job(
        self, seed: int, context: str, options: dict[str, Any]
    ) -> tuple[list[int], int, list[str], SamplingOptions]:
        """The prompt, the number of new tokens, the stop strings, and the sampling options. seed: another for each
        request, since a task that samples may repeat one."""
        unread = {key: value for key, value in options.items() if key not in _READ and value != _DEFAULTS.get(key)}
        if unread:
            asked = ", ".join(f"{key}: {value!r}" for key, value in unread.items())
            text = f"a task asks for {asked} (generation_kwargs), which generation does not have: it goes without"
            warnings.warn(Notice(text), stacklevel=2)
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        default = min(_NEW_TOKENS, self.max_length - min(len(prompt), self.max_length // 2))
        new = int(next((options[name] for name in _NAMES_OF_LENGTH if options.get(name) is not None), default))
        if new >= self.max_length:
            raise UserError(
                f"a task asks for {new} new tokens (max_gen_toks), which leave nothing of the model's {self.max_length}"
                " positions (model.max_seq_len) for a prompt"
            )
        prompt = prompt[-(self.max_length - new) :]
        given = options.get("temperature")
        if not options.get("do_sample", (given or 0) > 0):
            return prompt, new, stops, SamplingOptions(0.0, seed=seed)
        top_k = int(options.get("top_k") or 0)
        top_k = top_k if top_k > 0 else None  # 0 is no limit, as in transformers
        temperature = float(1.0 if given is None else given)
        return prompt, new, stops, SamplingOptions(temperature, top_k, options.get("top_p"), seed)

    def _write(self, jobs) -> list[str]:
        engine = self._writer.engine(self._size, max(len(prompt) + new for prompt, new, _, _ in jobs))
        for slot, (prompt, new, _, options) in enumerate(jobs):
            engine.admit(slot, prompt, new, options)
        engine.prefill_all(max(len(prompt) for prompt, *_ in jobs) - 1)
        writer = self._writer
        going = [Continuation(writer.vocabulary, prompt, stops, writer.stop_tokens) for prompt, _, stops, _ in jobs]
        texts = [""] * len(jobs)
        while any(text.reason is None for text in going):
            step = engine.decode(1)
            for slot, text in enumerate(going):
                if text.reason is None:
                    texts[slot] += text.push(int(step.token[slot]), bool(step.complete[slot]))
                    if text.reason is not None and not step.complete[slot]:
                        engine.cancel(slot)
        return texts


def task_manager(names: Sequence[str], folder: str | None) -> TaskManager:
    """The harness's tasks plus those of a folder; checks that their data is available.

    Raises:
        UserError: a task name is unknown, or its data is not available.
    """
    manager = _manager_of(names, folder)
    missing = [name for name in names if not manager.match_tasks([name])]
    if missing:
        raise UserError(
            f"lm-evaluation-harness has no task {', '.join(map(repr, missing))}: `lm_eval ls tasks` lists its tasks;"
            " --tasks_folder DIR adds your own"
        )
    try:
        manager.load(list(names))
    except Exception as error:  # the harness and datasets raise many kinds
        raise UserError(
            f"the tasks {', '.join(names)} cannot be loaded: {first_line(error)}. Tasks in --tasks_folder DIR with"
            " local data need no network"
        ) from None
    return manager


def run_tasks(
    model: HarnessModel, manager: TaskManager, names: Sequence[str], limit: int | None = None, shots: int | None = None
) -> dict[str, dict[str, float]]:
    """The harness's results: task -> name of the metric -> value (`acc`, `acc_stderr`, ...).

    Args:
        limit: number of documents per task; all by default.
        shots: number of examples before each question; the task's own default if not given.
    """
    found = simple_evaluate(
        model,
        tasks=list(names),
        task_manager=manager,
        num_fewshot=shots,
        limit=limit,
        log_samples=False,
        torch_random_seed=None,  # nothing here uses torch's random numbers
    )
    assert found is not None
    return {task: _numbers(values) for task, values in (found.get("results") or {}).items()}


def _manager_of(names: Sequence[str], folder: str | None) -> TaskManager:
    if folder is not None:  # loading the harness's own tasks takes half a minute
        own = TaskManager(include_path=folder, include_defaults=False)
        if all(own.match_tasks([name]) for name in names):
            return own
    return TaskManager(include_path=folder)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    numbers = {key.removesuffix(",none"): value for key, value in values.items() if key != "alias"}
    return {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}


@eqx.filter_jit
def _told(model: LmHeadModel, tokens: NamedArray, targets: jax.Array, vocab: int):
    x = model.activations(tokens, AttentionMask.causal())
    x = x[0] if isinstance(x, tuple) else x  # some Levanter models add a loss
    x, head = x.rearrange((BATCH, POSITION, EMBED)), model.get_lm_head()

    def row(x_and_targets):
        """Logits for one row at a time: those of all rows would be by far the largest array."""
        x, targets = x_and_targets
        logits = hax.dot(hax.named(x, (POSITION, EMBED)), head, axis=EMBED, preferred_element_type=jnp.float32)
        logits = logits.rearrange((POSITION, ...)).array[:, :vocab]
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), chosen == logits.max(axis=-1)

    return jax.lax.map(row, (x.array, targets))
