"""The parts of a decoder layer, made of few kernels with short backward passes, for training a LoRA on a frozen base.

`place.fuse_` puts them into a transformers model of a known family. Any other model keeps the code of transformers and
PEFT, and so does a module whose adapter is switched off, merged, has dropout, or is anything but plain LoRA.
"""
