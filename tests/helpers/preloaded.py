"""What the process imports from which those of the tests are forked (run_process.py)."""

import gc

import qerl.cli.main  # noqa: F401
import training.run  # noqa: F401

gc.collect()
gc.freeze()  # a forked process would copy all this memory when it looks for garbage
