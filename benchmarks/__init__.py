"""Benchmarks: `python -m benchmarks --help` for lowtide beside its peers, `python -m benchmarks.NAME` for one thing."""
