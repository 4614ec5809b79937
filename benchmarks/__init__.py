"""Benchmarks; every figure comes with its hardware, versions, model, workload and command."""
