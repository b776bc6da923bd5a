"""All benchmarks, one after the other: `make bench`."""

from experiments.bench import analysis, training_step

for benchmark in (training_step, analysis):
    benchmark.main()
