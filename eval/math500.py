"""`python -m eval.math500 --model M` is `qerl eval math500 --model M`."""

from qerl.cli.evaluate import main

if __name__ == "__main__":
    main("math500")
