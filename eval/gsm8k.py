"""`python -m eval.gsm8k --model M` is `qerl eval gsm8k --model M`."""

from qerl.cli.evaluate import main

if __name__ == "__main__":
    main("gsm8k")
