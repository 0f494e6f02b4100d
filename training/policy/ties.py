"""Masters that do not lie on ties, so that the size of a first step is what the learning rate says.

A 16-bit weight has so few digits that it often lies exactly between two codes, and the largest of a block exactly
between two block scales. An update then moves it to the other side however small it is: with the embedded model in
bfloat16 and any learning rate, 4% of what NVFP4 decodes to changes at once, along the gradient of one batch
(scripts/study/first_step.py). So a master begins a random piece nearer to the value that its weight was packed to. It
stays so near to the 16-bit weight that it rounds to it, and what is packed first has the same bits. Masters in bfloat16
cannot leave ties, but random rounding lets few of them move at a time.
"""

from __future__ import annotations

import torch

FEW_DIGITS = (torch.bfloat16, torch.float16)
# Weights below this share of the matrix's largest stay where they are. A block that has no larger ones may have a scale
# below e4m3's normal numbers, which is rounded so coarsely that a weight can change it by moving towards its packed
# value. In a block that has larger ones they round to zero, far from a tie.
SMALLEST = 1 / 256


def off_ties(weight: torch.Tensor, packed: torch.Tensor, seed: int) -> torch.Tensor:
    """`weight` in float32, on the device of `packed`, moved towards `packed` (float32), the value that it is packed to.

    A move is uniform between 0 and a quarter of a unit of the weight's last place, by random numbers from `seed` (0 to
    2^63 - 1). Weights that are packed exactly stay, and so do all of a wider dtype than 16 bits.
    """
    wide = weight.to(packed.device, torch.float32)
    if weight.dtype not in FEW_DIGITS:
        return wide
    random = torch.Generator(packed.device).manual_seed(seed)
    move = torch.rand(wide.shape, generator=random, device=wide.device, dtype=torch.float32)
    move *= torch.finfo(weight.dtype).eps / 8  # of mantissas from 0.5 to 1, a unit of the last place is eps / 2
    move = torch.ldexp(move, torch.frexp(wide).exponent)
    move *= torch.sign(packed - wide)
    move *= wide.abs() > SMALLEST * wide.abs().max()
    return torch.where(move == 0, wide, move + wide)  # -0.0 + 0.0 would be 0.0, which some formats pack otherwise
