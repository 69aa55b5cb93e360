"""Reverse long chains of plain step functions in little memory. Imports no torch."""
