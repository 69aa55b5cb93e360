"""Planners to compare `lowtide.planning.solve` with: `python -m benchmarks.planners`."""
