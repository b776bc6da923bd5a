"""All benchmarks, one after the other: `make bench`."""

from experiments.bench import generation, training_step

for benchmark in (training_step, generation):
    benchmark.main()
