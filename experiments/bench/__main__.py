"""All benchmarks, one after the other: `make bench`."""

from experiments.bench import ssm, training_step

for benchmark in (training_step, ssm):
    benchmark.main()
