"""What a run did, for people: `qerl report RUN`.

    read.py     a run directory as it is: metrics, configuration, samples, evaluations
    stages.py   the steps of each noise stage, and what their metrics were
    curves.py   metrics over the steps, drawn (curves.png)
    text.py     before and after, stages, completions side by side (report.md)

Reads what a run and `qerl eval` wrote, and imports neither.
"""
