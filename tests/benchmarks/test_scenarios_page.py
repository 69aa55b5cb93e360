"""The page of `benchmarks.scenarios` names every fault."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.scenarios import Row, page

GOOD = Row(
    "gan", 600, 1000, exact=True, highest_bytes=600, last_bytes=590, steps=7, unplanned_calls=1, planned=True,
    plain_s=0.1, fitted_s=0.12, simple_plain_s=0.05, simple_fitted_s=0.055,
)  # fmt: skip


def test_a_scenario_within_all_limits_has_no_fault() -> None:
    text = page([GOOD], {})
    assert "1 of 1 scenarios have no fault. All are" in text
    assert "| gan | yes | 0.0 MiB | 0.0 MiB | 100.0 % | 98.3 % | yes | 100 ms | 1.20 × | 1.10 × | 1.09 × |" in text


def test_every_fault_is_named() -> None:
    rows = [
        GOOD,
        replace(GOOD, scenario="wrong", exact=False, planned=False),
        replace(GOOD, scenario="full", highest_bytes=601 + 60),
        replace(GOOD, scenario="slow", fitted_s=0.128),
        replace(GOOD, scenario="warned", warnings=("no plan fits",)),
        Row("stopped", 600, 1000, error="BudgetError: needs more\nmore lines"),
    ]
    text = page(rows, {})
    assert "1 of 6 scenarios have no fault." in text
    faults = [line for line in text.splitlines() if line.startswith("- ")]
    assert faults == [
        "- wrong: not bit-equal",
        "- wrong: not planned",
        "- full: 110 % of the budget",
        "- slow: 1.16 × the time of the simple loop",
        "- warned: warning: no plan fits",
        "- stopped: BudgetError: needs more",
    ]
