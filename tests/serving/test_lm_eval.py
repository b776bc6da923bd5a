"""lm-evaluation-harness reads the server with its own client: numbers are those of a direct computation."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.utils.tree_utils import inference_mode
from support.serving import LENGTH, complete

pytestmark = pytest.mark.slow
# Spaces stand before words: at the end of a context the harness moves them there.
PAIRS = [("Once upon", " a time"), ("The", " end."), ("2 + 2 =", " 4"), ("a", "b"), ("long " * 30 + "or", " short")]
TOLERANCE = 1e-4  # see `test_logprobs`, times the few tokens of a continuation


@pytest.fixture(scope="module")
def harness(server):
    """Batch size -> the harness's model."""
    pytest.importorskip("lm_eval", reason="lm_eval is not here: make setup EXTRA=dev,eval")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    def of(batch_size):
        url = f"{server[0]}/v1/completions"
        return LocalCompletionsAPI(
            model="tiny", base_url=url, tokenizer_backend="remote", max_length=LENGTH, batch_size=batch_size
        )

    return of


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def direct(model, writer):
    """(log-probability of the continuation, whether it is greedy) of each pair, by the model itself."""

    @jax.jit
    def of(tokens):
        logits = inference_mode(model, True)(hax.named(tokens, ("batch", "position")))
        return jax.nn.log_softmax(logits.rearrange(("batch", "position", "vocab")).array[0])

    found = []
    for context, continuation in PAIRS:
        before, behind = writer.tokenizer.encode(context), writer.tokenizer.encode(continuation)
        row = np.zeros((1, 256), np.int32)
        row[0, : len(before) + len(behind)] = before + behind
        truth = np.asarray(of(jnp.asarray(row)))[len(before) - 1 :][: len(behind)]
        found.append((truth[np.arange(len(behind)), behind].sum(), (truth.argmax(-1) == behind).all()))
    return found


def test_multiple_choice(harness, model, writer):
    """Whatever the size of a batch."""
    by_size = [harness(size).loglikelihood(requests("loglikelihood", PAIRS)) for size in (1, 4)]
    assert by_size[0] == by_size[1]
    for (found, is_greedy), (truth, was_greedy) in zip(by_size[0], direct(model, writer), strict=True):
        assert found == pytest.approx(truth, abs=TOLERANCE)
        assert is_greedy == was_greedy


def test_generation(harness, client):
    contexts = ("Once upon", "The end", "for i in")
    options = {"until": ["zz"], "max_gen_toks": 12, "temperature": 0}
    expected = [complete(client, c, max_tokens=12, stop="zz").choices[0].text for c in contexts]
    for size in (1, 3):
        found = harness(size).generate_until(requests("generate_until", [(c, dict(options)) for c in contexts]))
        assert found == expected


def test_in_process(harness, model, writer):
    """What `eval_lm --tasks` asks gives the numbers and the texts of the server, whatever the size of a batch."""
    from qkvflow.generation.harness import HarnessModel

    pairs = requests("loglikelihood", PAIRS)
    options = {"until": ["zz"], "max_gen_toks": 12, "temperature": 0}
    texts = requests("generate_until", [(c, dict(options)) for c in ("Once upon", "The end", "for i in")])
    served, written = harness(4).loglikelihood(pairs), harness(1).generate_until(texts)
    for size in (1, 3):
        ours = HarnessModel(inference_mode(model, True), writer, size)
        for (found, is_greedy), (truth, was_greedy) in zip(ours.loglikelihood(pairs), served, strict=True):
            assert found == pytest.approx(truth, abs=TOLERANCE)
            assert is_greedy == was_greedy
        assert ours.generate_until(texts) == written
