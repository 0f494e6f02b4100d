"""The decoder layer's parts as few kernels with short backward passes, for training a LoRA on a frozen base.

`place.fuse_` puts them into a transformers model of a known family; everything else keeps transformers' and PEFT's own
path, and so does a module whose adapter is off, merged, with dropout, or anything but plain LoRA.
"""
