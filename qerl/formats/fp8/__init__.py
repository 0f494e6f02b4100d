"""FP8 with block scales: 8-bit e4m3 weights in blocks of 128 x 128, and activations in groups of 128 per token.

`layout.py` names the tensors, `reference.py` is the arithmetic in plain torch, `linear.py` the trainer's linear.
"""
