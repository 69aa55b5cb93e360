"""Measuring what a step does: live bytes and times."""
