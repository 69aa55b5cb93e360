"""Run a script without a budget and write its peak of live tensor bytes: `measure_peak.py PEAK_FILE SCRIPT ARGS…`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from lowtide.profiling.peak_meter import PeakMeter

if __name__ == "__main__":
    peak_file, script = sys.argv[1:3]
    sys.argv[:] = sys.argv[2:]
    with PeakMeter() as meter:
        runpy.run_path(script, run_name="__main__")
    Path(peak_file).write_text(str(meter.peak_bytes))
