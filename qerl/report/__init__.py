"""The report on one or more runs: `qerl report RUN [RUN ...]`.

    read.py         read a run directory: metrics, configuration, samples, evaluations
    shapes.py       the fields that the report needs of each file
    stages.py       the steps and the mean metrics of each noise stage
    sampling.py     what dynamic sampling did, and what it cost
    verdict.py      whether it learned, in one sentence
    summary.py      first steps against last, time and memory by phase, how configurations differ
    completions.py  the best and the worst of the sampled completions
    validations.py  the validations of a run as a table
    evaluations.py  results of `qerl eval`: a table, a drawing, completions before and after
    warnings.py     the warnings that a run logged
    curves.py       metrics drawn over the steps, and time by phase as a bar (curves.png)
    figures.py      the same drawings as SVG for the page, for light and dark screens
    text.py         report.md, which is also shown on the terminal
    page.py         report.html (page.html.j2): a single file that loads nothing from any server
    write.py        the function that `qerl report` calls

It reads what a run and `qerl eval` wrote, without importing either.
"""
