"""Run a script plainly under the meter of live tensor bytes, and say the peak: `metered.py PEAK_FILE SCRIPT ARGS…`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from lowtide.profiling.peak_meter import PeakMeter

if __name__ == "__main__":
    where, script = sys.argv[1:3]
    sys.argv[:] = sys.argv[2:]
    with PeakMeter() as meter:
        runpy.run_path(script, run_name="__main__")
    Path(where).write_text(str(meter.peak_bytes))
