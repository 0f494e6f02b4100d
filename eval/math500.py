"""500 problems of MATH's test split (arXiv 2103.03874, 2305.20050).

`python -m eval.math500 --model M` is `qerl eval math500 --model M`.
"""

from qerl.cli.evaluate import main

if __name__ == "__main__":
    main("math500")
