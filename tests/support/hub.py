"""Small transformers models, and comparisons of their outputs with qkvflow's on the same texts."""

import equinox as eqx
import haliax as hax
import numpy as np
import torch
import transformers
from levanter.layers.attention import AttentionMask
from levanter.utils.tree_utils import inference_mode
from support.models import VOCAB

import qkvflow
from qkvflow.models import NeuralOdeLMHeadModel

SMALL = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
GPT2 = transformers.GPT2Config(vocab_size=257, n_embd=16, n_layer=2, n_head=2, n_positions=32, n_inner=48)


def drawn(settings, seed: int = 0):
    """A transformers model with noise on every parameter."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def texts(vocab: int = VOCAB.size) -> list[np.ndarray]:
    """Three texts of different lengths."""
    draw = np.random.default_rng(3)
    return [draw.integers(0, vocab, n) for n in (7, 2, 5)]


def padded(rows: list[np.ndarray], *, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """The rows as one array, and a mask of the real tokens."""
    tokens, real = np.zeros((2, len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        place = slice(-len(row), None) if left else slice(len(row))
        tokens[i, place], real[i, place] = row, 1
    return tokens, real


def assert_same_logits(ours, theirs, control=None) -> None:
    """Each text on its own here, padded on the left and on the right there."""
    rows = texts(min(256, ours.Vocab.size))
    options = {} if control is None else {"control": torch.tensor(control)}
    expected = _logits(ours, rows, control)
    for left in (False, True):
        tokens, real = padded(rows, left=left)
        mask = torch.tensor(real)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            found = theirs(torch.tensor(tokens), attention_mask=mask, position_ids=positions, **options).logits.numpy()
        for i, row in enumerate(rows):
            place = slice(-len(row), None) if left else slice(len(row))
            np.testing.assert_allclose(found[i, place], expected[i, : len(row)], atol=1e-4)


def assert_same_texts(ours, theirs, control=None, new: int = 4) -> None:
    """Greedy generation from prompts of different lengths."""
    rows = texts(min(256, ours.Vocab.size))
    given = {} if control is None else {"control": hax.named(control, ("batch", "control"))}
    tokens, _ = padded(rows, left=False)
    lengths = [len(row) for row in rows]
    named = hax.named(tokens.astype(np.int32), ("batch", "position"))
    written = np.asarray(qkvflow.generate(ours, named, new, lengths=lengths, **given).array)
    tokens, real = padded(rows, left=True)
    options = {} if control is None else {"control": torch.tensor(control)}
    for cached in (True, False):
        found = theirs.generate(
            torch.tensor(tokens),
            attention_mask=torch.tensor(real),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=cached,
            **options,
        ).numpy()
        for i, n in enumerate(lengths):
            np.testing.assert_array_equal(found[i, -new:], written[i, n : n + new])


def _logits(model, rows, control) -> np.ndarray:
    """The model is causal: what follows a text does not change its logits."""
    tokens, _ = padded(rows, left=False)
    given = {} if control is None else {"control": hax.named(control, ("batch", "control"))}
    mask = {} if isinstance(model, NeuralOdeLMHeadModel) else {"attn_mask": AttentionMask.causal()}
    tokens = hax.named(tokens, ("batch", "position"))
    return np.asarray(_call(inference_mode(model, True), tokens, mask, given).array)


@eqx.filter_jit
def _call(model, tokens, mask, given):
    return model(tokens, **mask, **given)
