"""Hooks: look at the values inside a forward pass by their names, and change them.

    logits, cache = lens.run_with_cache(model, tokens, "*.attn.pattern")
    logits = lens.run_with_edits(model, tokens, {"state.0.5": lambda x: x + direction})
"""

from qkvflow.lens.cache import Cache as Cache
from qkvflow.lens.run import names as names
from qkvflow.lens.run import run_with_cache as run_with_cache
from qkvflow.lens.run import run_with_edits as run_with_edits
