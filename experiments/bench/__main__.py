"""Runs all benchmarks, or the named ones, in turn: `make bench`, `python -m experiments.bench ssm_128`."""

import sys

from experiments.bench import analysis, exits, generation, gradients, hooks, loading, together
from experiments.bench.frame import run

MODULES = (gradients, generation, analysis, hooks, exits, loading, together)
TABLE = {each.name: each for module in MODULES for each in module.BENCHMARKS}
unknown = sorted(set(sys.argv[1:]) - set(TABLE))
if unknown:
    sys.exit(f"error: there is no benchmark {', '.join(unknown)}. Choices: {', '.join(TABLE)}")
run(TABLE[name] for name in sys.argv[1:] or TABLE)
