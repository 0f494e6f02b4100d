"""`python -m eval.amc23 --model M` is `qerl eval amc23 --model M`."""

from qerl.cli.evaluate import main

if __name__ == "__main__":
    main("amc23")
