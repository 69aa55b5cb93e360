"""Reports and their views. Does not import torch.

report.py        a planned step            frontier.py        step time against peak bytes
fit_report.py    a fitted model            timeline.py        live bytes in every interval of a step
module_totals.py bytes and values by module  longest_size.py  the longest size that fits
Views of a report:
terminal.py      rich tables               figure.py          matplotlib
page.py          HTML (page.css, page.js)  chrome_trace.py    Chrome and Perfetto
stack_chart.py   SVG of live bytes         frontier_chart.py  SVG of a frontier
Shared by the views:
bands.py         data of stacked charts    summary.py         titles, captions, key numbers
svg.py           scales, lines, labels     markup.py          escaped HTML
palette.py       colours                   ticks.py           axis ticks
"""
