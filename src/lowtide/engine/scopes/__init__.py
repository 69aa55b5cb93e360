"""Scopes that users open: `saving(policy)`, `budget(limit)`, `checkpoint(function)`."""
