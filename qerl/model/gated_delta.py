"""Linear attention with a state, Gated DeltaNet (arXiv 2412.06464), over the sequences of a packed row.

Each value head has a state S (key dim, value dim), which a token decays, corrects and reads:

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t / sqrt(key dim)

q, k and v come out of a causal convolution over the last few tokens; q and k have length 1. In a packed row each
sequence begins with a state and a convolution of its own: of zeros, or of the end of the prompt that it shares with
others. The gradient of a prompt's state is the sum over its completions, as for keys and values (`gather_rows`).

transformers 5.17 leaves the boundaries out: without kernels it drops `cu_seq_lens_q`, so that a sequence reads the
state of the one before it. So packed rows never go through its module, and its module is used for sampling alone.

On a card the recurrence is fla-core's (`chunk_gated_delta_rule`), and the convolution before it and the norm after it
are Triton kernels (`qerl.model.delta_kernels`); elsewhere they are their twins here.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from qerl.base.errors import EngineError
from qerl.model.lora import lora_linear, parts_of
from qerl.model.packing import Copies, Sequences, copies_of, gather_rows

logger = logging.getLogger(__name__)


class States(NamedTuple):
    """How the N sequences of a packed row of T tokens go through layers with a state."""

    tokens: int  # of the N1 sequences that begin at zero; they come first in the row
    starts: torch.Tensor  # (N1 + 1,) int64: where each of them begins
    later_starts: torch.Tensor  # (N2 + 1,) int64: where each of the others begins, counted from `tokens`
    prompts: Copies | None  # (N2,) the sequence at whose end each of the others begins; None if all begin at zero
    reads: Copies  # (T * taps,) the rows that the convolution reads for each token, the last its own; row T is zeros


class DeltaLayer(NamedTuple):
    """What a layer keeps: log_decay and bias (value heads,), gain (value dim,) of the norm, and the norm's eps."""

    log_decay: torch.Tensor
    bias: torch.Tensor
    gain: torch.Tensor
    eps: float


def states_of(sequences: Sequences, tokens: int, taps: int) -> States:
    """The states of a packed row of `tokens`, for a convolution over `taps` of them. Nothing waits for the GPU."""
    queries, keys = sequences.query_starts.long(), sequences.key_starts.long()
    count, device = len(queries) - 1, queries.device
    lengths, numbers = queries.diff(), torch.arange(count, device=device)
    first = queries[:-1] if sequences.keys is None else sequences.keys.rows[keys[:-1]]  # a shared prompt's, or its own
    of = numbers if sequences.keys is None else torch.searchsorted(queries, first, right=True) - 1
    assert sequences.begun is not None, "a row for a model with states is packed with prompts first"
    begun, begun_tokens = sequences.begun
    number = numbers.repeat_interleave(lengths, output_size=tokens)[:, None]
    place = torch.arange(tokens, device=device)[:, None] - queries[number] + torch.arange(1 - taps, 1, device=device)
    reached = queries[of + 1][number] + place  # negative places count back from the end of the shared prompt
    shared = (of != numbers)[number] & (reached >= first[number])
    rows = torch.where(place >= 0, queries[number] + place, torch.where(shared, reached, tokens))
    return States(
        begun_tokens,
        queries[: begun + 1],
        queries[begun:] - begun_tokens,
        copies_of(of[begun:], begun) if begun < count else None,
        copies_of(rows.flatten(), tokens + 1),
    )


def delta_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    cache_params: Any = None,
    attention_mask: torch.Tensor | None = None,
    *,
    sequences: Sequences | None = None,
    states: States | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Replaces the forward of transformers' Gated DeltaNet; a packed row (1, T, hidden) needs its `states`."""
    if states is None:
        if sequences is not None:
            raise EngineError("a packed row has no states for linear attention, and would read those of other rows")
        return type(self).forward(self, hidden_states, cache_params, attention_mask, **kwargs)
    x = hidden_states.squeeze(0)
    parts = parts_of(self.in_proj_qkv, self.in_proj_z)
    both = torch.cat([self.in_proj_qkv(x), self.in_proj_z(x)], -1) if parts is None else lora_linear(x, parts)
    wide = torch.promote_types(x.dtype, torch.float32)
    beta = self.in_proj_b(x).to(wide).sigmoid()
    decay = -self.A_log.to(wide).exp() * F.softplus(self.in_proj_a(x).to(wide) + self.dt_bias.to(wide))
    q, k, v, gate = convolve(both, self.conv1d.weight.squeeze(1), states.reads, (self.key_dim, self.value_dim))
    q, k = q.unflatten(1, (-1, self.head_k_dim)), k.unflatten(1, (-1, self.head_k_dim))
    inputs = q, k, v.unflatten(1, (-1, self.head_v_dim)), decay, beta
    out = _through_states(inputs, states)
    normed = gated_norm(out, gate, self.norm.weight, self.norm.variance_epsilon)
    return self.out_proj(normed.view(1, len(x), -1))


def has_kernels(x: torch.Tensor) -> bool:
    """Whether kernels compute linear attention of x, and not the twins: they are for 16 bits on a card."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def convolve(
    both: torch.Tensor, weight: torch.Tensor, reads: Copies, widths: tuple[int, int]
) -> tuple[torch.Tensor, ...]:
    """q and k (T, keys), v (T, values) and the gate out of both = [q, k, v, gate], for `widths` (keys, values).

    The first three are silu(sum over j of weight[:, j] * row reads[t, j]) with `weight` (2 keys + values, taps), summed
    in float32 and rounded once. `reads` is that of `States`.
    """
    if not has_kernels(both):
        return convolve_twin(both, weight, reads, widths)
    from qerl.model import delta_kernels

    return delta_kernels.convolve(both, weight, reads, widths)


def convolve_twin(
    both: torch.Tensor, weight: torch.Tensor, reads: Copies, widths: tuple[int, int]
) -> tuple[torch.Tensor, ...]:
    """See `convolve`."""
    keys, values = widths
    mixed, gate = both.split([len(weight), both.shape[1] - len(weight)], -1)
    wide = torch.promote_types(both.dtype, torch.float32)
    read = gather_rows(F.pad(mixed.to(wide), (0, 0, 0, 1)), reads).unflatten(0, (len(both), -1))
    out = F.silu((read * weight.t().to(wide)).sum(1)).to(both.dtype)
    return *out.split([keys, keys, values], -1), gate


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(x) * silu(gate) for x (T, heads, dim) and gate (T, heads * dim), rounded once as in vLLM.

    transformers' module rounds three times.
    """
    if not has_kernels(x):
        return gated_norm_twin(x, gate, weight, eps)
    from qerl.model import delta_kernels

    return delta_kernels.gated_norm(x, gate, weight, eps)


def gated_norm_twin(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `gated_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = (x.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.to(wide) * scale * weight.to(wide) * F.silu(gate.view(x.shape).to(wide))).to(x.dtype)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, g and beta


def _through_states(inputs: Inputs, states: States) -> torch.Tensor:
    """o (T, value heads, value dim): first the sequences that begin at zero, then those that go on from their ends."""
    if states.prompts is None:
        return delta_rule(inputs, states.starts, ends=False)[0]
    # The gradient of a split is one copy, while those of two slices are two, with zeros, and their sum.
    begun, later = zip(*(each.split([states.tokens, len(each) - states.tokens]) for each in inputs), strict=True)
    out, ends = delta_rule(begun, states.starts)
    more, _ = delta_rule(later, states.later_starts, gather_rows(ends, states.prompts), ends=False)
    return torch.cat([out, more])


def delta_rule(
    inputs: Inputs, starts: torch.Tensor, begin: torch.Tensor | None = None, ends: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o (T, value heads, value dim) and the last states, float32 (N, value heads, key dim, value dim).

    Without `ends` a card does not keep those: a row of short sequences may have a GiB of them.

    `inputs` are q and k (T, key heads, key dim), v (T, value heads, value dim), g and beta, float32 (T, value heads),
    of N sequences that begin at `starts`, int64 (N + 1,), with the states `begin`; None: with zeros. Value heads that
    are neighbours share a key head. On a card, 16 bits go to fla-core. Raises EngineError if it is not installed.
    """
    if not has_kernels(inputs[0]):
        return delta_rule_twin(inputs, starts, begin)
    q, k, v, g, beta = (each[None] for each in inputs)
    out, states = fla_rule()(
        *(q, k, v, g, beta),
        initial_state=begin,
        output_final_state=ends,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=starts,
    )
    return out.squeeze(0), states


@cache
def fla_rule() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """fla-core's function for 16 bits on a card. Raises EngineError if it is missing."""
    keep_timings("chunk_gated_delta_rule_bwd_kernel", "step")
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise EngineError(
            "linear attention on a card needs fla-core, which is not installed: pip install fla-core==0.6.0"
        ) from error
    import triton

    if needs_products(torch.cuda.get_device_capability(), triton.__version__):
        register_products()
    return chunk_gated_delta_rule


def keep_timings(kernel: str, what: str) -> None:
    """Let Triton keep on disk which variants of kernels are fastest, and say so if none of a `kernel` has been timed.

    Timing them takes minutes, and a run that is resumed would otherwise choose anew, with other bits.
    """
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    folder = Path(
        os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    )
    if not any(folder.glob(f"*/{kernel}*.autotune.json")):
        logger.info(
            "linear attention: the first %s on a card takes two to three minutes longer, in which Triton times "
            "variants of its kernels; what it finds is kept in %s",
            what,
            folder,
        )


def needs_products(capability: tuple[int, int], triton: str) -> bool:
    """Whether fla-core 0.6.0 refuses to compute gradients by its own kernels on a card.

    On Hopper, Triton 3.4 to 3.7.0 computes `chunk_bwd_dqkwg` wrongly (fla-org/flash-linear-attention#640), so there it
    takes TileLang's, or raises in the first backward pass without it. Seen on an H200 with Triton 3.6.0.
    """
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", triton)[:3])
    return capability[0] == 9 and (3, 4) <= numbers < (3, 7, 1)


def register_products() -> None:
    """Have fla-core compute `chunk_bwd_dqkwg` by a kernel of ours. Remove it with Triton 3.7.1."""
    from fla.backends import BaseBackend, register

    class Products(BaseBackend):
        backend_type = "qerl"
        priority = 4  # TileLang's is 5, and lower ones come first

        @staticmethod
        def chunk_bwd_dqkwg(*args: Any, **names: Any) -> tuple[torch.Tensor, ...]:
            from qerl.model.delta_kernels import products_backward

            return products_backward(*args, **names)

        def chunk_bwd_dqkwg_verifier(self, *args: Any, **names: Any) -> tuple[bool, str | None]:
            packed = all(names.get(name) is not None for name in ("g", "w", "cu_seqlens"))
            return packed and not names.get("state_v_first"), "only packed rows with decays"

    register("common")(Products)


CHUNK = 64  # tokens that the twin computes at once


def delta_rule_twin(
    inputs: Inputs, starts: torch.Tensor, begin: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `delta_rule` in plain torch and float32, on any device; autograd differentiates it.

    Within a chunk with the cumulative decays c_i, what the tokens add to the state solves a triangular system (section
    3 of the paper): (I + strictly lower part of A) n = beta v - beta k exp(c) S, with A_ij = beta_i k_i k_j exp(c_i -
    c_j). Sequences are padded to the longest; a token of zeros changes no state.
    """
    q, k, v, g, beta = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in inputs)
    q, k = (_unit(each).repeat_interleave(v.shape[1] // q.shape[1], 1) for each in (q, k))
    lengths = starts.diff().tolist()
    size = -(-max(lengths) // CHUNK) * CHUNK

    def chunks(rows: torch.Tensor) -> torch.Tensor:  # (T, heads, ...) -> (N, heads, size, ...)
        padded = pad_sequence(list(rows.split(lengths)), batch_first=True).transpose(1, 2)
        return F.pad(padded, (*(0, 0) * (rows.dim() - 2), 0, size - padded.shape[2])).split(CHUNK, 2)

    shape = len(lengths), v.shape[1], q.shape[-1], v.shape[-1]
    states = v.new_zeros(shape) if begin is None else begin.to(v.dtype)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    outputs = []
    for q_, k_, v_, g_, beta_ in zip(*map(chunks, (q * q.shape[-1] ** -0.5, k, v, g, beta)), strict=True):
        total, beta_ = g_.cumsum(-1), beta_[..., None]
        decays = (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp()
        since = total.exp()[..., None]
        added = beta_ * (v_ - since * (k_ @ states))
        system = beta_ * (k_ @ k_.mT) * decays  # its diagonal is taken as 1
        added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
        outputs.append(since * (q_ @ states) + (q_ @ k_.mT * decays) @ added)
        until = (total[..., -1:] - total).exp()[..., None]
        states = since[..., -1:, :] * states + (until * k_).mT @ added
    out = torch.cat(outputs, 2).transpose(1, 2)
    return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)]).to(inputs[2].dtype), states


def delta_step_twin_(
    qkvz: torch.Tensor, ba: torch.Tensor, states: torch.Tensor, indices: torch.Tensor, layer: DeltaLayer
) -> torch.Tensor:
    """As `delta_kernels.delta_step_`, on any device, a row after the other."""
    heads, value_dim, key_dim = states.shape[1:]
    gates = heads * value_dim
    keys = (qkvz.shape[1] - 2 * gates) // 2
    out = torch.zeros(len(qkvz), heads, value_dim, dtype=qkvz.dtype, device=qkvz.device)
    for row, place in enumerate(indices.tolist()):
        if place <= 0:
            continue
        q, k, v, z = qkvz[row].float().split([keys, keys, gates, gates])
        q, k = (each.view(-1, key_dim) for each in (q, k))
        q, k = ((each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt()) for each in (q, k))
        q, k = (each.repeat_interleave(heads // len(each), 0) for each in (q * key_dim**-0.5, k))
        b, a = ba[row].float().chunk(2)
        decay = (-layer.log_decay.float().exp() * F.softplus(a + layer.bias.float())).exp()
        state = states[place].float() * decay[:, None, None]
        added = b.sigmoid()[:, None] * (v.view(heads, -1) - (state @ k[:, :, None])[:, :, 0])
        state += added[:, :, None] * k[:, None, :]
        states[place] = state
        read = (state @ q[:, :, None])[:, :, 0].to(out.dtype).float()
        scale = (read.square().mean(-1, keepdim=True) + layer.eps).rsqrt()
        out[row] = read * scale * layer.gain.float() * F.silu(z.view(heads, -1))
    return out.flatten(1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
