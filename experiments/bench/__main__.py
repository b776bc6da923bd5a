"""All benchmarks, one after the other: `make bench`."""

from experiments.bench import adjoints, ssm, training_step

for benchmark in (training_step, adjoints, ssm):
    benchmark.main()
