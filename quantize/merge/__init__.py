"""`qerl merge`: an adapter as something to publish: a PEFT folder, a BF16 model, or an NVFP4 model.

    run.py       the command in its order          command.py  its options
    adapter.py   the PEFT folder                   base.py     the base and the adapter as one 16-bit checkpoint
    original.py  merge onto the trained weights or the 16-bit model behind them
    weights.py   write, reopen, compare            effect.py   logprobs and greedy tokens, base, adapter and merged
    report.py    merge_report.json and the table   card.py     README.md, the model card
    serve.py     the lines that try the result

It stands in `quantize` because it reads and writes checkpoints with quantize's own source, writer, verification and
rounding, and no stage may import another. Only `--to nvfp4` needs llm-compressor.
"""
