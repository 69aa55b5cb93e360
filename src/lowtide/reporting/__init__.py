"""What happened, as records that print themselves. Imports no torch.

scope_report.py  a scope of rules           room_report.py     a budgeted scope
fit_report.py    a fitted model             frontier.py        time against memory
report.py        a planned step, and its views:
  terminal.py    tables                     figure.py          matplotlib
  page.py        HTML (page.css, page.js)   chrome_trace.py    Chrome and Perfetto
timeline.py      every moment of a step, and who holds its bytes
bands.py         that as a stack to draw    accounts.py        by module, in numbers
charts.py        stacks as SVG              frontier_chart.py  a frontier as SVG
markup.py        escaping                   palette.py, ticks.py, summary.py   what the views share
"""
