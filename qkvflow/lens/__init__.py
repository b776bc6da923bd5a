"""Hooks: read and edit the activations of a forward pass by name.

logits, cache = lens.run_with_cache(model, tokens, "*.attn.pattern")
logits = lens.run_with_edits(model, tokens, {"state.0.5": lambda x: x + direction})
"""

from qkvflow.lens.cache import Cache as Cache
from qkvflow.lens.paths import Clustering as Clustering
from qkvflow.lens.paths import attention_entropy as attention_entropy
from qkvflow.lens.paths import clustering as clustering
from qkvflow.lens.paths import cosine_similarity as cosine_similarity
from qkvflow.lens.paths import curvature as curvature
from qkvflow.lens.paths import effective_rank as effective_rank
from qkvflow.lens.paths import speed as speed
from qkvflow.lens.paths import states as states
from qkvflow.lens.paths import turning as turning
from qkvflow.lens.readout import LensReading as LensReading
from qkvflow.lens.readout import TunedLens as TunedLens
from qkvflow.lens.readout import logit_lens as logit_lens
from qkvflow.lens.readout import tuned_lens as tuned_lens
from qkvflow.lens.run import names as names
from qkvflow.lens.run import run_with_cache as run_with_cache
from qkvflow.lens.run import run_with_edits as run_with_edits
