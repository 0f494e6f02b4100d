"""`python -m eval.aime25 --model M` is `qerl eval aime25 --model M`."""

from qerl.cli.evaluate import main

if __name__ == "__main__":
    main("aime25")
