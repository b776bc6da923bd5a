"""All benchmarks, one after the other: `make bench`."""

from experiments.bench import adjoints, analysis, general, generation, ssm, training_step

for benchmark in (training_step, adjoints, general, ssm, generation, analysis):
    benchmark.main()
