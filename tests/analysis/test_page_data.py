"""What the report shows, as data: eigenvalues that can be followed, attention in characters, sentences with nulls."""

import numpy as np
import pytest
from support.models import build, random_tokens, small_config

from qkvflow.analysis import spectral, trajectory
from qkvflow.analysis.page import findings, render
from qkvflow.analysis.page.spectra import _followed, has_weights_between, layer_times
from qkvflow.analysis.page.texts import _ALPHABET, encoded, output_positions, uniform_places
from qkvflow.depth import DepthConfig


def test_the_page_is_safe_and_alone():
    """Texts cannot end the script, and nothing is fetched from anywhere."""
    html = render({"runs": [], "text": "</script><b>"})
    assert "</script><b>" not in html
    assert html.count("</script>") == 2
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in html.replace("http://www.w3.org/2000/svg", "")
    assert "@DATA@" not in html
    assert "@SCRIPT@" not in html
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in html


def test_eigenvalues_are_followed_through_a_crossing():
    """Two that turn past each other stay themselves, though their order by modulus changes."""
    angle = np.linspace(0, np.pi, 12)
    a, b = (1 + 0.3 * np.cos(angle)) * np.exp(0.2j * angle), -(1 - 0.3 * np.cos(angle)) * np.exp(0.2j * angle)
    paths = np.stack([a, b], axis=-1)[:, None]
    order = np.argsort(-np.abs(paths), axis=-1)
    assert (order[0] != order[-1]).any()
    mixed = np.take_along_axis(paths, order, axis=-1)
    found = _followed(mixed)
    np.testing.assert_array_equal(found, paths)
    np.testing.assert_array_equal(np.sort_complex(found[5, 0]), np.sort_complex(mixed[5, 0]))


def test_times_lie_between_those_of_training_where_weights_do():
    flow, layers = build(small_config()), build(small_config("per_layer"))
    trained = spectral.training_times(flow)
    times = layer_times(flow, None)
    assert has_weights_between(flow)
    assert set(trained) < set(times)
    assert list(times) == sorted(times)
    assert np.diff(times).min() > 1e-6
    assert layer_times(flow, (0.9, 0.1)) == (0.1, 0.9)
    assert not has_weights_between(layers)
    assert layer_times(layers, (0.9, 0.1)) == spectral.training_times(layers)


def test_attention_in_characters():
    p = np.tril(np.random.default_rng(0).dirichlet(np.ones(6), 6))
    code = encoded(p)
    assert len(code) == 21
    back = (np.asarray([_ALPHABET.index(c) for c in code]) / 63) ** 2
    np.testing.assert_allclose(np.sqrt(back), np.sqrt(p[np.tril_indices(6)]), atol=0.5 / 63 + 1e-9)
    assert encoded(np.eye(3)) == "/A/AA/"


def test_places_of_even_attention():
    even = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
    expected = {"first": even[1:, 0].mean(), "previous": even[range(1, 5), range(4)].mean()}
    found = uniform_places(5)
    assert found["first"] == pytest.approx(expected["first"])
    assert found["previous"] == pytest.approx(expected["previous"])


def test_attention_sums_to_one_and_its_entropy_is_told():
    model = build(small_config("constant", depth=DepthConfig(steps=2)))
    tokens = random_tokens(batch=1, length=5)["batch", 0]
    p = trajectory.attention(model, tokens)
    assert p.shape == (2, 2, 5, 5)
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-5)
    assert (np.triu(p, 1) == 0).all()
    with np.errstate(divide="ignore", invalid="ignore"):
        direct = -np.nansum(p * np.log(p), axis=-1)
    np.testing.assert_allclose(trajectory.attention_entropy(model, tokens), direct, atol=1e-6)


def test_lens_against_its_definition():
    """Rank, entropy and divergence from the logits themselves."""
    from qkvflow.analysis.reading import read, sequence
    from qkvflow.analysis.reading import trajectory as states

    reading = read(build(small_config()))
    tokens = sequence(reading, random_tokens(batch=1, length=5)["batch", 0])
    lens = trajectory.logit_lens(reading, tokens)
    x, ids = states(reading, tokens), np.asarray(tokens.array)
    logits = np.stack(
        [
            np.asarray(reading.logits(x["layers", n]).rearrange(("position", "vocab")).array, np.float64)
            for n in range(4)
        ]
    )
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-log_p, axis=-1)
    rank = [[list(order[n, i]).index(ids[i + 1]) for i in range(4)] for n in range(4)]
    np.testing.assert_array_equal(lens.rank, rank)
    np.testing.assert_allclose(lens.entropy, -(np.exp(log_p) * log_p).sum(-1), atol=1e-4)
    np.testing.assert_allclose(lens.divergence, (np.exp(log_p[-1]) * (log_p[-1] - log_p)).sum(-1), atol=1e-4)
    assert np.abs(lens.divergence[-1]).max() < 1e-6


@pytest.mark.parametrize(("length", "count"), [(1, 3), (2, 3), (10, 3), (64, 5), (3, 9)])
def test_outputs_are_positions_and_hold_the_last(length, count):
    found = output_positions(length, count)
    assert found == sorted(set(found))
    assert found[-1] == length - 1
    assert found[0] >= 0
    assert len(found) <= count


def spectrum(radius, positive=0.5, symmetric=0.5):
    return {"radius": [[r] for r in radius], "positive": [[positive]] * 3, "symmetric": [[symmetric]] * 3}


BAND = {"radius": [[1.0] * 3, [2.0] * 3], "positive": [[0.4] * 3, [0.6] * 3], "symmetric": [[0.45] * 3, [0.55] * 3]}


def test_spectra_conclude_beside_the_untrained():
    times = (0.0, 0.5, 1.0)
    inside = findings.of_spectra("ov", spectrum([1.1, 1.2, 1.3]), BAND, times)
    assert "not an effect of training" in inside
    outside = findings.of_spectra("ov", spectrum([1.1, 7.5, 5.0], positive=0.9), BAND, times)
    assert "grows from 1.1 at t = 0.00 to 5 at t = 1.00, with 7.5 at t = 0.50 between" in outside
    assert (
        "an effect of training: spectral radius (67% of the times), share of positive real parts (all of the times)"
        in outside
    )
    assert "90% of the real parts are positive" in outside
    assert "allows no conclusion" in findings.of_spectra("ov", spectrum([1, 1, 1]), None, times)


def test_tokens_conclude_beside_the_shuffled():
    labels, null = list("abcdefghijk"), [{"scores": [0.5] * 11}, {"scores": [0.4] * 10 + [None]}]
    data = {"scores": [[[1.0] * 10 + [9.0]]]}
    two = findings.of_tokens(data, labels, null)
    assert "median score is 1; with the tokens before the last one shuffled (2 times), it is 0.4 to 0.5." in two
    assert "allow no conclusion; `--shuffles 39` would" in two
    for many, told in ((38, "allow no conclusion"), (39, "has an effect (p = 0.05)")):
        assert told in findings.of_tokens(data, labels, null[:1] * many)
    inside = {"scores": [[[1.0] * 3 + [0.45] * 8]]}
    assert "no detectable effect" in findings.of_tokens(inside, labels, null * 40)
    assert "allows no conclusion" in findings.of_tokens(data, labels, [])
    unmoved = {"scores": [[[None] * 10 + [9.0]]]}
    assert "median score is -inf" in findings.of_tokens(unmoved, labels, null)


def test_words_have_an_effect_as_rarely_as_they_should():
    """Texts that are shuffled texts themselves, whose positions move together."""
    rng, labels, found = np.random.default_rng(0), list("abcdefghijk"), 0
    for _ in range(400):
        texts = rng.normal(size=(40, 1)) + 0.1 * rng.normal(size=(40, 11))
        nulls = [{"scores": scores} for scores in texts[1:].tolist()]
        found += "has an effect" in findings.of_tokens({"scores": [[texts[0].tolist()]]}, labels, nulls)
    assert 8 <= found <= 34  # 20 expected, SD 4.4


def test_the_lens_concludes_beside_both_nulls():
    describe = {"labels": list("abc"), "ids": [1, 2, 3]}
    data = {
        "ends": [0.0, 0.5, 1.0],
        "lens": {
            "loss": [[5.0, 5.0], [2.0, 2.0], [1.0, 1.0]],
            "rank": [[9, 9], [1, 0], [0, 0]],
            "top": [[[1], [2], [9]]],
        },
    }
    text = findings.of_lens(data, describe, [{"loss": [5, 4, 3]}], {"loss": [6, 6, 6]})
    assert "2 of 2 next tokens are correct at t = 1, 0 at t = 0" in text
    assert "half of the 4.00 nats gained over depth is reached at t = 0.50" in text
    assert "shuffled text ends at 3.00 nats, this one at 1.00, so the model uses the order" in text
    assert "untrained model ends at 6.00" in text
    assert "does not use the order" in findings.of_lens(data, describe, [{"loss": [5, 4, 1]}], None)
    assert "2 of 3 tokens are predicted to repeat" in findings.echo(data, describe, tied=True)
    assert "same matrix" not in findings.echo(data, describe, tied=False)
    hybrid = findings.echo(data, describe, tied=True, around=(2, 1))
    assert "has passed the 2 layers before the flow, and is read through the 1 after it: 2 of 3 tokens" in hybrid


def test_training_and_depth_conclude():
    uniform = float(np.log(256))
    assert "nothing was learned" in findings.of_training({"train": [[1, 5.6]], "eval": [[1, 5.55]]}, uniform)
    assert "lower before, 2.000 at step 5" in findings.of_training({"train": [], "eval": [[5, 2.0], [9, 3.0]]}, uniform)
    rows = [{"solver": "euler", "steps": n, "loss": x} for n, x in ((3, 4.0), (6, 2.0))]
    exits = [{"rule": "kl", "loss": x, "evaluations": n, "of": 6} for x, n in ((2.0, 6), (2.1, 3))]
    text = findings.of_depth(rows, exits)
    assert "specific to their training depth" in text
    assert "save 50% of the evaluations for +0.100 nats" in text
    assert "no difference" in findings.of_depth([{**r, "loss": 2.0} for r in rows], [])
    assert findings.of_depth([], []) == ""
    heun = [{"solver": "heun", "steps": n, "loss": x} for n, x in ((3, 2.0), (6, 1.78), (12, 1.77), (48, 1.77))]
    assert findings.of_depth(heun, []).endswith("from 6 steps on, depth makes no difference.")
    measured = [("steps", "6", 2.0, 1.0), ("steps", "3", 2.5, 2.0), ("exit", "kl", 2.01, 1.2), ("draft", "4", 2.0, 1.6)]
    anytime = [dict(zip(("kind", "name", "loss", "speed"), row, strict=True)) for row in measured]
    told = "1.20 times with exits by kl (+0.010 nats), 1.60 times with drafts of 4 (no loss)."
    assert findings.of_depth([], [], anytime).endswith(f"at full depth: {told}")
