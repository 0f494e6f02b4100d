"""Options of `qerl quantize` for tests of something else than quantization: rounding to nearest alone, in a second."""

from dataclasses import replace

from quantize.options import QuantizeOptions

ROUNDING = QuantizeOptions(method="rtn", calibration="none")


def rounding(**values):
    """The same with other values."""
    return replace(ROUNDING, **values)
