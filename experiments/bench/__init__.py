"""Benchmarks: each module measures one thing, prints a table and writes JSON to experiments/bench/results/."""
