"""All benchmarks, one after the other: `make bench`."""

from experiments.bench import training_step

for benchmark in (training_step,):
    benchmark.main()
