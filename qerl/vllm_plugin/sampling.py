"""vLLM's sampler with its last steps in one pass: a token and its logprob from the logits, read once.

vLLM 0.25.1 (v1/worker/gpu/sample) copies the logits to float32, then draws (Gumbel-max), sums the exponentials in one
program a sequence and counts the token's rank, which a rollout does not read: 0.16 ms of a step at one sequence and
0.68 ms at 256 (7B, H200). `FusedSampler` takes two launches. The noise is vLLM's (Philox by the request's seed and
position, -log(-log1p(-u))), but all four numbers of a Philox call are used, so a seed gives other tokens than in vLLM.

A batch with a request that asks for more (top-k, top-p, min-p, penalties, biases, bad words, more logprobs) goes to
vLLM's own sampler. Ranks are not computed: they are 0.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

BLOCK = 4096  # logits of a program; `rows` is not specialized, or the first odd number of sequences would compile anew


class FusedSampler(Sampler):
    """See the module docstring."""

    def __init__(self, replaced: Sampler) -> None:
        """Take over the state of vLLM's sampler, whose requests are added to the same arrays."""
        self.__dict__.update(replaced.__dict__)

    def __call__(self, logits: torch.Tensor, input_batch) -> SamplerOutput:
        if not self._covers(input_batch.idx_mapping_np, logits.shape[0]):
            return super().__call__(logits, input_batch)
        states = self.sampling_states
        positions = input_batch.positions[input_batch.logits_indices]
        tokens, logprobs = draw(
            logits, input_batch.expanded_idx_mapping, states.temperature.gpu, states.seeds.gpu, positions
        )
        counts = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens.view(-1, 1),
            logprobs_tensors=LogprobsTensors(
                logprob_token_ids=tokens.view(-1, 1),
                logprobs=logprobs.view(-1, 1),
                selected_token_ranks=torch.zeros_like(tokens),
                cu_num_generated_tokens=None,
            ),
            num_nans=None,
            num_sampled=counts[0],
            num_rejected=counts[1],
        )

    def _covers(self, rows: np.ndarray, logits: int) -> bool:
        """Whether no request of the batch asks for more than a temperature, a seed and the token's own logprob."""
        states = self.sampling_states
        return (
            logits == len(rows)
            and self.logprobs_mode == "processed_logprobs"
            and not self.compute_nans
            and bool((states.num_logprobs[rows] == 0).all())
            and bool((states.top_k.np[rows] == states.vocab_size).all())
            and bool((states.top_p.np[rows] == 1.0).all())
            and bool((states.min_p.np[rows] == 0.0).all())
            and not self.penalties_state.use_penalty[rows].any()
            and not self.logit_bias_state.use_logit_bias[rows].any()
            and not self.bad_words_state.num_bad_words.np[rows].any()
            and self.logprob_token_ids_state.max_num_token_ids(rows) == 0
        )


def draw(
    logits: torch.Tensor,
    request: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token (n,) int64, its logprob (n,) float32) for each row of `logits` (n, vocabulary).

    `request` (n,) indexes `temperature` and `seeds`. The logprob is of softmax(logits / temperature); at temperature 0
    the token is the largest logit and the logprob that of softmax(logits).
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    partial = torch.empty(3, rows, blocks, dtype=torch.float32, device=logits.device)  # maximum, sum of exp, best
    best = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    common = (logits, logits.stride(0), request, temperature)
    _block_kernel[(rows, blocks)](
        *common, seeds, positions.contiguous(), partial, best, rows, vocabulary, QUARTER=BLOCK // 4, num_warps=8
    )
    width = triton.next_power_of_2(blocks)
    _row_kernel[(rows,)](*common, partial, best, tokens, logprobs, rows, blocks, WIDTH=width, num_warps=1)
    return tokens, logprobs


@triton.jit
def _gumbel(bits):
    """Standard Gumbel noise from 32 random bits; the large values come from u near 0, where float32 is fine."""
    bits = bits.to(tl.int32, bitcast=True)
    uniform = tl.where(bits < 0, -bits - 1, bits).to(tl.float32) * 4.6566127342e-10
    return -tl.log(-libdevice.log1p(-tl.maximum(uniform, 4.6566127342e-10)))


@triton.jit(do_not_specialize=["rows"])
def _block_kernel(
    logits_ptr,
    stride,
    request_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    partial_ptr,
    best_ptr,
    rows,
    vocabulary,
    QUARTER: tl.constexpr,
):
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    request = tl.load(request_ptr + row)
    temperature = tl.load(temperature_ptr + request)
    inverse = tl.where(temperature == 0.0, 1.0, 1.0 / temperature)
    seed = tl.randint(tl.load(seeds_ptr + request), tl.load(positions_ptr + row))
    lane = tl.arange(0, QUARTER)
    r0, r1, r2, r3 = tl.randint4x(seed, block * QUARTER + lane)
    maximum = float("-inf")
    total = 0.0
    best_value = float("-inf")
    best_index = 0
    for part in tl.static_range(4):
        index = block * (4 * QUARTER) + part * QUARTER + lane
        logits = tl.load(logits_ptr + row * stride + index, mask=index < vocabulary, other=float("-inf"))
        logits = logits.to(tl.float32) * inverse
        here = tl.maximum(maximum, tl.max(logits))
        safe = tl.where(here == float("-inf"), 0.0, here)
        total = total * tl.exp(maximum - safe) + tl.sum(tl.exp(logits - safe))
        maximum = here
        noise = _gumbel(r0 if part == 0 else r1 if part == 1 else r2 if part == 2 else r3)
        noisy = tl.where(temperature == 0.0, logits, logits + noise)
        value, where = tl.max(noisy, axis=0, return_indices=True)
        better = value > best_value
        best_index = tl.where(better, block * (4 * QUARTER) + part * QUARTER + where, best_index)
        best_value = tl.where(better, value, best_value)
    place = row * blocks + block
    tl.store(partial_ptr + place, maximum)
    tl.store(partial_ptr + rows * blocks + place, total)
    tl.store(partial_ptr + 2 * rows * blocks + place, best_value)
    tl.store(best_ptr + place, best_index)


@triton.jit(do_not_specialize=["rows"])
def _row_kernel(
    logits_ptr,
    stride,
    request_ptr,
    temperature_ptr,
    partial_ptr,
    best_ptr,
    tokens_ptr,
    logprobs_ptr,
    rows,
    blocks,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    place, inside = row * blocks + lane, lane < blocks
    maxima = tl.load(partial_ptr + place, mask=inside, other=float("-inf"))
    totals = tl.load(partial_ptr + rows * blocks + place, mask=inside, other=0.0)
    values = tl.load(partial_ptr + 2 * rows * blocks + place, mask=inside, other=float("-inf"))
    maximum = tl.max(maxima)
    log_total = maximum + tl.log(tl.sum(tl.where(totals > 0, totals * tl.exp(maxima - maximum), 0.0)))
    _, where = tl.max(values, axis=0, return_indices=True)
    token = tl.load(best_ptr + row * blocks + where)
    temperature = tl.load(temperature_ptr + tl.load(request_ptr + row))
    inverse = tl.where(temperature == 0.0, 1.0, 1.0 / temperature)
    logit = tl.load(logits_ptr + row * stride + token).to(tl.float32) * inverse
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, logit - log_total)
