"""`python -m eval.aime24 --model M` is `qerl eval aime24 --model M`."""

from qerl.cli.evaluate import main

if __name__ == "__main__":
    main("aime24")
