"""Live bytes and the limit on them: ledger, memory budget, eviction, offloading, compression."""
