"""Rounding to NVFP4 under the weights of the inputs: searched block scales, and GPTQ on them. Tensors in, tensors out.

What is minimized for a linear W (out, in) is tr((W - Q) R (W - Q)'), where R (in, in) is the second moment of its
inputs, the mean of x'x over tokens: the mean square error of its outputs. Linears that read the same input (q/k/v,
gate/up) come as rows one below the other, and share R and the global scale. `searched_scales` judges the candidates for
a block scale by R's diagonal; `gptq` then rounds; `best_factors` is the low-rank part of what is left. Departures from
llm-compressor's GPTQ and observers:

1. The global scale is 448 * 3 / amax instead of 448 * 6 / amax (`roomy_global_scale`).
2. Candidates are compared after they were rounded to e4m3, as they are stored.
3. GPTQ needs no inverse (`gptq`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from qerl.formats.nvfp4.layout import BLOCK, CODE_MAX, SCALE_MAX
from qerl.formats.nvfp4.reference import (
    ZERO_SCALE,
    GlobalScaleKind,
    NVFP4Tensor,
    encode_e2m1,
    pack_codes,
    shared_global_scale,
)

USUAL = 6.0  # the largest weight of a block becomes the largest code
CANDIDATES = (USUAL, 5.5, 5.0, 4.5, 4.0, 3.5, 3.0, 7.0, 8.0)  # codes that it may become; above 6 it is cut off
DAMPING = 0.01  # of GPTQ, times the mean of R's diagonal
COLUMNS = 128  # that GPTQ rounds between two products with all columns before them
EXPONENT = 0x7F800000  # these bits of a float32 are the largest power of two that is not above it
CHUNK = 1 << 18  # weights whose candidates are compared at once on a CPU; they stay in its cache
CUDA_CHUNK = 1 << 25
SMALL = 1 << 23  # weights of a linear for which one thread is enough, see `one_thread`


def roomy_global_scale(weights: Sequence[torch.Tensor], kind: GlobalScaleKind = "amax") -> torch.Tensor:
    """float32 (1,): 448 * 3 / amax of linears that are fused, or for "pow2" the largest power of two up to it.

    It is half of `shared_global_scale`, whose rules for dtypes and for an amax near zero it follows. Raises what that
    raises. So a block may have any scale up to twice the usual one, and the block of the largest weight is not bound to
    448. The price is that scales under 2^-6 are subnormal in e4m3, which Marlin takes for zero: 0.0004% of SmolLM2's
         block scales, whose blocks hold next to nothing.
    """
    return shared_global_scale(weights, kind) / 2


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The e2m1 value nearest to each of `values` (float32, any shape), ties to the even code, saturating at 6."""
    step = values.abs().clamp_(1.0, 4.0).view(torch.int32).bitwise_and_(EXPONENT).view(torch.float32).mul_(0.5)
    return values.div(step).round_().mul_(step).clamp_(-CODE_MAX, CODE_MAX)


def block_steps(block_scale: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The distance between codes 2 and 4 of each block, float32 (out, in / 16), as `dequantize` computes it."""
    return block_scale.to(torch.float32) / scale


def searched_scales(weight: torch.Tensor, scale: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """For each block of `weight` (out, in) the candidate scale, e4m3 (out, in / 16), under which its error is smallest.

    The error is the sum of (q - w)^2 times `importance`, float32 (in,) for the columns; None: all are equal. Of equal
    errors the first candidate's is taken, the usual scale.
    """
    rows, columns = weight.shape
    found = torch.empty((rows, columns // BLOCK), dtype=torch.float8_e4m3fn, device=weight.device)
    if importance is not None:
        importance = importance.to(torch.float32).view(-1, BLOCK)
    at_once = max(1, (CUDA_CHUNK if weight.is_cuda else CHUNK) // columns)

    def search(first: int) -> None:
        part = weight[first : first + at_once].to(torch.float32).unflatten(1, (-1, BLOCK))
        found[first : first + at_once] = _best_scales(part, scale, importance)

    _in_threads(search, range(0, rows, at_once), weight.device)
    return found


def _in_threads(work: Callable[[int], None], items: Sequence[int], device: torch.device) -> None:
    """Do `work` for each item; on a CPU in as many threads as torch may use, each of which computes alone."""
    threads = min(torch.get_num_threads(), len(items)) if device.type == "cpu" else 1
    if threads == 1:
        with one_thread(device):
            for item in items:
                work(item)
        return
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(work, items))


def _best_scales(blocks: torch.Tensor, scale: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """e4m3 (rows, blocks) for blocks (rows, blocks, 16) in float32."""
    amax = blocks.abs().amax(dim=-1)
    best = least = None
    for candidate in CANDIDATES:
        # Divide by a tensor, because CUDA would multiply by the reciprocal, which rounds differently.
        exact = (amax / torch.full_like(amax, candidate)) * scale
        stored = exact.clamp_(max=SCALE_MAX).to(torch.float8_e4m3fn).to(torch.float32)
        stored = stored.where(stored != 0, ZERO_SCALE)
        step = stored / scale
        in_codes = blocks / step.unsqueeze(-1)
        error = nearest_e2m1(in_codes).sub_(in_codes).square_()
        error = (error if importance is None else error.mul_(importance)).sum(dim=-1).mul_(step).mul_(step)
        if best is None:
            best, least = stored, error
        else:
            better = error < least
            best, least = torch.where(better, stored, best), torch.where(better, error, least)
    return best.to(torch.float8_e4m3fn)


def round_to(weight: torch.Tensor, block_scale: torch.Tensor, scale: torch.Tensor) -> NVFP4Tensor:
    """`weight` (out, in), each element rounded to nearest under given block scales and global scale."""
    blocks = weight.to(torch.float32).unflatten(1, (-1, BLOCK))
    codes = encode_e2m1(blocks / block_steps(block_scale, scale).unsqueeze(-1))
    return NVFP4Tensor(pack_codes(codes.flatten(1)), block_scale, scale.clone())


def gptq(weight: torch.Tensor, block_scale: torch.Tensor, scale: torch.Tensor, moment: torch.Tensor) -> NVFP4Tensor:
    """`weight` (out, in) rounded by GPTQ under given block scales and global scale; `moment` is R, float32 (in, in).

    GPTQ (arXiv 2210.17323) rounds column by column and moves the error to the columns that are left. With R = M M' for
    an upper triangular M, column j is rounded at w_j + sum_{i < j} (w_i - q_i) M_ij / M_jj. That is Babai's nearest
    plane algorithm and equals the usual form, in which the inverse of R is factored.

    Columns go in the order of R's diagonal, the largest first. An input that was zero in all tokens (a row and column
    of zeros in R) neither gets nor gives an error. Raises torch.linalg.LinAlgError for an R that is not a moment.
    """
    order = moment.diagonal().argsort(descending=True, stable=True)
    shares = error_shares(moment, order)
    # Transposed, so that what is one column of the weight is contiguous.
    columns = weight.to(torch.float32).T[order].contiguous()
    steps = block_steps(block_scale, scale).T.contiguous()
    block_of = order // BLOCK
    codes = torch.empty_like(columns)
    errors = torch.empty_like(columns)
    round_ = columns_rounder(weight.device)
    for first in range(0, len(order), COLUMNS):
        part = slice(first, min(first + COLUMNS, len(order)))
        targets = torch.addmm(columns[part], shares[:first, part].T, errors[:first])
        round_(targets, columns[part], steps[block_of[part]], shares[part, part], codes[part], errors[part])
    in_place = torch.empty_like(order)
    in_place[order] = torch.arange(len(order), device=order.device)
    packed = pack_codes(encode_e2m1(codes[in_place].T.contiguous()))
    return NVFP4Tensor(packed, block_scale, scale.clone())


def error_shares(moment: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """What share of an earlier column's error a later one takes: M_ij / M_jj, float32 (in, in), zero unless i < j.

    M is the upper triangular factor of the damped `moment` with its rows and columns in `order`.
    """
    turned = order.flip(0)  # H = L L' in the turned order is H = M M' in the order itself, with M = L turned
    damped = moment[turned][:, turned].to(torch.float64)
    diagonal = damped.diagonal()
    damping = DAMPING * diagonal.mean()
    diagonal.masked_fill_(diagonal == 0, 1.0)
    diagonal.add_(damping)
    with one_thread(moment.device) if moment.numel() <= SMALL else nullcontext():
        factor = torch.linalg.cholesky(damped)
    del damped
    factor.div_(factor.diagonal().clone())
    return factor.to(torch.float32).tril_(-1).flip(0, 1).contiguous()


def round_columns_(
    targets: torch.Tensor,
    columns: torch.Tensor,
    steps: torch.Tensor,
    shares: torch.Tensor,
    codes: torch.Tensor,
    errors: torch.Tensor,
) -> None:
    """Round some columns one after the other. All are (columns, out) and `shares` (columns, columns), in float32.

    `targets` has what to round, without the errors of these columns themselves; it is overwritten. Writes `codes`, the
    e2m1 values, and `errors`, the columns minus their quantized values.
    """
    with one_thread(targets.device):
        for j in range(len(targets)):
            codes[j] = nearest_e2m1(targets[j] / steps[j])
            torch.addcmul(columns[j], codes[j], steps[j], value=-1, out=errors[j])
            targets[j + 1 :].addcmul_(shares[j, j + 1 :, None], errors[j])


def columns_rounder(device: torch.device) -> Callable[..., None]:
    """`round_columns_`, or its twin for cards."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return round_columns_
    from quantize import gptq_kernel

    return gptq_kernel.round_columns_


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, let torch compute with one thread: operations this small take longer with several, which wait for one
    another, and up to a hundred times as long where the cores have other work."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


EXTRA = 16  # columns beyond the rank, which make the iteration converge
ROUNDS = 4
SEED = 0


class Factors(NamedTuple):
    """A (rank, in) and B (out, rank) in one dtype."""

    a: torch.Tensor
    b: torch.Tensor

    def prefix(self, rank: int) -> Factors:
        """The factors of a smaller rank."""
        return Factors(self.a[:rank], self.b[:, :rank])


def best_factors(error: torch.Tensor, moment: torch.Tensor, rank: int) -> Factors:
    """The best factors of `error` (out, in) under `moment` (in, in), balanced; all in float32.

    For an error E = W - Q and the second moment R of the inputs, the best BA of a rank minimizes tr((E - BA) R (E -
    BA)'). With any S S' = R that is |(E - BA) S|^2, so by Eckart and Young BA S = U U' E S, where U has the first left
    singular vectors of E S, which are the first eigenvectors of E R E'. Hence B = U, A = U' E: this needs no root and
    no inverse of R, and a singular R needs no special case. Sorted by eigenvalue, the first k columns of B and rows of
    A are the best of rank k. The same optimum, by a root of R: QERA (arXiv 2410.06040), EoRA (arXiv 2410.21271).

    `rank` is at most the smaller side of the error. Subspace iteration finds the eigenvectors of E R E', which is never
    formed; after four rounds the error that is left is the least one to within a thousandth.
    """
    columns = min(rank + EXTRA, len(error))
    generator = torch.Generator().manual_seed(SEED)
    with one_thread(error.device) if error.numel() <= SMALL else nullcontext():
        basis = torch.randn(len(error), columns, generator=generator).to(error.device)
        for _ in range(ROUNDS):
            basis = torch.linalg.qr(error @ (moment @ (error.T @ basis)))[0]
        inside = basis.T @ error
        _, vectors = torch.linalg.eigh((inside @ moment @ inside.T).to(torch.float64))  # in ascending order
        b = basis @ vectors[:, -rank:].flip(1).to(torch.float32)
        return balanced(Factors(b.T @ error, b))


def balanced(factors: Factors) -> Factors:
    """The same product from a column of B and a row of A that are equally long, each pair for itself."""
    a, b = factors
    gain = (a.norm(dim=1) / b.norm(dim=0)).sqrt()
    gain = gain.where(gain.isfinite() & (gain > 0), 1.0)
    return Factors(a / gain[:, None], b * gain)


def rate_ratio(factors: Factors, moment: torch.Tensor) -> float | None:
    """How much further one step of Adam moves a linear's outputs from these factors than from a fresh pair.

    A step moves each element of A and B by the learning rate, with signs as good as random. The mean square change of
    an output is then out tr(A R A') + tr(B'B) tr R, times its square; for a fresh pair of LoRA, whose B is zero and
    whose A is uniform, it is out rank tr R / (3 in). The ratio of the roots says by what a learning rate that suits a
    fresh pair is to be divided. None for inputs that are zero throughout.
    """
    a, b = (factor.to(torch.float32) for factor in factors)
    (rank, width), out = a.shape, len(b)
    power = moment.diagonal().sum()
    fresh = out * rank * power / (3 * width)
    if not float(fresh) > 0:
        return None
    moved = out * ((a @ moment) * a).sum() + b.square().sum() * power
    return float((moved / fresh).sqrt())
