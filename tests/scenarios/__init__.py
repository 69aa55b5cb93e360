"""Training loops of real code: each is exact, stays within its budget, reaches planned steps and predicts its peak.

A module per group has the loops. `training` defines what a loop is, `running` runs it plain and fitted, and
`test_scenarios` compares both runs. `benchmarks.scenarios` runs the same loops with larger batches.
"""
