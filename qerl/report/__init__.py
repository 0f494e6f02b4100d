"""What runs did, for people: `qerl report RUN [RUN ...]`.

    read.py         a run directory as it is: metrics, configuration, samples, evaluations
    shapes.py       what it needs of each file
    stages.py       the steps of each noise stage, and what their metrics were
    sampling.py     what dynamic sampling did, and what it cost
    summary.py      first steps against last, time and memory by phase, what configurations differ in
    completions.py  the best and the worst of the sampled completions
    evaluations.py  results of `qerl eval`: table, drawing, completions before and after
    curves.py       metrics over the steps, drawn (curves.png)
    figures.py      the same as SVG for the page, for light and dark screens
    text.py         report.md, and the same on the terminal
    page.py         report.html (page.html.j2): one file that asks nothing of any server
    write.py        what `qerl report` calls

Reads what a run and `qerl eval` wrote, and imports neither.
"""
