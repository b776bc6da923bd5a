"""The snippets of docs/lens.md run as they stand, one after the other."""

import re
from pathlib import Path

import haliax as hax
import numpy as np
from support.models import build, random_tokens, small_config

from qkvflow import lens

PAGE = (Path(__file__).parents[2] / "docs" / "lens.md").read_text(encoding="utf-8")


def test_snippets():
    model = build(small_config())
    tokens, corrupted = random_tokens(length=6), random_tokens(seed=8, length=6)
    names = {"model": model, "tokens": tokens, "corrupted": corrupted}
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 4
    for snippet in snippets:
        exec(re.sub(r"\b3\.(attn|mlp)", r"2.\1", snippet), names)  # the model of this test has three steps
    plain = model(tokens)
    # Patching one head at the last position moves the logits there alone.
    moved = np.abs(np.asarray((names["patched"] - plain).array)).max((0, 2))
    assert (moved[:-1] == 0).all()
    assert moved[-1] > 0
    assert min(names["damage"].values()) > 0
    # The steered state is the one that was asked for.
    _, cache = lens.run_with_cache(
        model, corrupted, "state.0.3333", edits={"state.1/3": lambda x: x + 4.0 * names["direction"]}
    )
    shifted = names["other"]["state.0.3333"] + 4.0 * names["direction"]
    np.testing.assert_allclose(
        cache["state.0.3333"].array, shifted.rearrange(cache["state.0.3333"].axes).array, atol=1e-6
    )
    assert not hax.all(names["steered"] == model(corrupted)).item()
