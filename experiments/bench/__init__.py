"""Benchmarks: each module measures one thing, prints a table and writes JSON below experiments/bench/results/."""
