"""`python -m eval.arith --model M` is `qerl eval arith --model M`."""

from qerl.cli.evaluate import main

if __name__ == "__main__":
    main("arith")
