"""`qerl merge`: turn an adapter into something to publish: a PEFT folder, a BF16 model, or an NVFP4 model.

    run.py       the command, step by step         command.py  its options
    adapter.py   the PEFT folder                   base.py     the base and the adapter as one 16-bit checkpoint
    original.py  choose the weights to merge onto: those trained on, or the 16-bit model behind them
    weights.py   write, reopen, compare            effect.py   logprobs and greedy tokens, base, adapter and merged
    report.py    merge_report.json and the table   card.py     README.md, the model card
    serve.py     the lines that try the result

The package is part of `quantize` because it reads, rounds, writes and verifies checkpoints with quantize's own modules,
and no stage may import another.
"""
