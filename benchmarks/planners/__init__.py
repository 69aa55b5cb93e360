"""Planners to compare `lowtide.planning.solve` with."""
