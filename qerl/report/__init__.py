"""The report on one or more runs: `qerl report RUN [RUN ...]`.

    read.py      read a run directory: metrics, configuration, samples, evaluations, warnings
    sections.py  tables and sentences: changes, time, memory, noise, validations, evaluations, the verdict
    curves.py    metrics drawn over the steps, and time by phase as a bar
    page.py      report.html (page.html.j2) and report.md, and the function that `qerl report` calls

It reads what a run and `qerl eval` wrote, without importing either.
"""
