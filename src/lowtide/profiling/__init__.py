"""Measure the live bytes of a step."""
