"""Rows of prompt and completion without padding or repetition: cut by tokens, laid end to end in one packed row.

A packed row holds the prompt of a group once, and each completion after it: keys and values of the prompt are the same
for all of them, and its gradient is the sum of theirs. Positions go on from the prompt's in each completion. The model
sees no pad token, and only the positions that predict a completion token reach the head. For a model with states
(`qerl.model.gated_delta`) the completions of shared prompts come last, because they begin with a prompt's state.

Attention reads the prompt's keys and values once for each completion, from a copy, and keeps the copies for its
backward pass. So the budget of a packed row counts REPEATED repeated prompt tokens as one token more. The gradients of
copies are summed in float32, always in the same order (`gather_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from qerl.model.costs import BEGUN, REPEATED, even_budget

if TYPE_CHECKING:
    from qerl.model.experts import Replay


class Copies(NamedTuple):
    """K copies of T rows. `order` and `starts` invert `rows`: they list the copies of each row, for the sum."""

    rows: torch.Tensor  # (K,) the row that each copy is taken from
    order: torch.Tensor  # (K,) the copies sorted by row, stably
    starts: torch.Tensor  # (T + 1,) where the copies of each row begin in `order`


def copies_of(rows: torch.Tensor, count: int) -> Copies:
    """The copies that take `rows` (K,) out of `count` rows."""
    ordered, order = torch.sort(rows, stable=True)
    return Copies(rows, order, torch.searchsorted(ordered, torch.arange(count + 1, device=rows.device)))


def gather_rows(rows: torch.Tensor, copies: Copies) -> torch.Tensor:
    """The copies (K, ...) of rows (T, ...). Their gradients are summed in float32, always in the same order."""
    return _Gather.apply(rows, *copies)


class _Gather(torch.autograd.Function):
    """See `gather_rows`."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, index: torch.Tensor, order: torch.Tensor, starts: torch.Tensor):
        ctx.save_for_backward(index, order, starts)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        copies = Copies(*ctx.saved_tensors)
        if not grad.is_cuda:
            return sum_copies(grad, copies), None, None, None
        from qerl.model import kernels

        return kernels.sum_copies(grad, copies), None, None, None


def sum_copies(grad: torch.Tensor, copies: Copies) -> torch.Tensor:
    """(T, ...): the sum of grad (K, ...) over each row's copies, rounded once; on a CPU in the order of the copies."""
    total = grad.new_zeros(len(copies.starts) - 1, *grad.shape[1:], dtype=torch.float32)
    return total.index_add_(0, copies.rows, grad.float()).to(grad.dtype)


class Sequences(NamedTuple):
    """What attends to what: N sequences of queries (T in all), each causal over keys that end where they end."""

    query_starts: torch.Tensor  # (N + 1,) int32: where each sequence's queries begin in T, and T
    key_starts: torch.Tensor  # (N + 1,) int32: where its keys begin in `keys`
    keys: Copies | None  # all sequences' keys, copied from the T tokens; None: the queries' own
    longest_query: int
    longest_key: int
    begun: tuple[int, int] | None = None  # sequences that begin at zero and their tokens, if these come first


@dataclass(frozen=True)
class PackedRow:
    """T tokens with M completion tokens to score, out of a (B, C) block of completions."""

    input_ids: torch.Tensor  # (1, T)
    position_ids: torch.Tensor  # (1, T)
    sequences: Sequences
    predicting: Copies  # the M outputs that predict a completion token, out of T
    targets: torch.Tensor  # (M,) that token
    places: torch.Tensor  # (M,) where it stands in the (B, C) block, row after row
    replay: Replay | None = None  # the experts to use; None: each layer chooses

    @property
    def cost(self) -> int:
        """Tokens that take the memory of this row: its own, and the repeated keys and values of shared prompts."""
        tokens = self.input_ids.shape[1]
        repeated = 0 if self.sequences.keys is None else len(self.sequences.keys.rows) - tokens
        begun = self.sequences.begun
        later = 0 if begun is None else len(self.sequences.query_starts) - 1 - begun[0]
        return tokens + max(repeated // REPEATED, BEGUN * later)

    def scatter(self, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """(M,) values at their places in a (B, C) block of zeros; the gradient flows back to them."""
        block = values.new_zeros(shape[0] * shape[1])
        return block.index_copy(0, self.places, values).view(shape)


class Layout(NamedTuple):
    """Where packed rows lie, and whether the completions of shared prompts come last, as a model with states needs."""

    device: torch.device
    prompts_first: bool = False


class Lengths(NamedTuple):
    """The lengths of one row, and which prompt it has. A row with 0 completion tokens is not run."""

    prompt: int
    prompt_tokens: int
    completion_tokens: int

    def added(self, repeated: bool, least: int) -> int:
        """Tokens that the row adds to others; a repeated prompt counts as `least` at least."""
        prompt = max(self.prompt_tokens // REPEATED, least) if repeated else self.prompt_tokens
        return self.completion_tokens + prompt


SHARE_PROMPTS = True  # a prompt of several rows is packed once: 17.5% fewer tokens in workload A


def row_lengths(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, completion_tokens: Sequence[int]) -> list[Lengths]:
    """The lengths of rows with prompts (B, L) padded on the left; prompts that are packed once have the same number."""
    numbers: dict[bytes, int] = {}
    keys = prompt_ids.masked_fill(~prompt_mask.bool(), -1).cpu().numpy()
    prompts = [numbers.setdefault(row.tobytes(), len(numbers)) for row in keys]
    if not SHARE_PROMPTS:
        prompts = list(range(len(keys)))
    return [Lengths(*row) for row in zip(prompts, prompt_mask.sum(1).tolist(), completion_tokens, strict=True)]


def split_by_tokens(rows: Sequence[Lengths], budget: int, ranks: int = 1, states: bool = False) -> list[list[int]]:
    """Groups of row indices that pack into at most `budget` tokens; a longer row is a group of its own.
    `states`: completions go on from states of their prompt, and count for these too.

    Rows of one prompt stand together, in the order of the prompts' numbers, and a group is closed when the next row
    does not fit: the groups follow from the lengths alone. There are no more groups than that takes, rounded up to as
    many for each of the `ranks`, and the largest is as small as that many allow: full groups and a rest would take
    longer, and more memory. Rows keep their order within a group. The largest group is the first: torch's allocator
    fits a smaller one into what that leaves, and would keep both otherwise.
    """
    order = sorted((i for i in range(len(rows)) if rows[i].completion_tokens), key=lambda i: (rows[i].prompt, i))
    least = BEGUN if states else 0
    even = even_budget(budget, lambda tokens: len(_filled(rows, order, tokens, least)), ranks)
    groups = _filled(rows, order, even, least)
    return [sorted(group) for _, group in sorted(groups, key=lambda entry: -entry[0])]


def _filled(rows: Sequence[Lengths], order: Sequence[int], budget: int, least: int) -> list[tuple[int, list[int]]]:
    """(tokens, row indices) of each group of rows in `order`."""
    groups: list[list[int]] = []
    tokens: list[int] = []
    used, prompts = budget, set()
    for index in order:
        row = rows[index]
        added = row.added(row.prompt in prompts, least)
        if not groups or used + added > budget:
            groups.append([])
            tokens.append(0)
            used, prompts = 0, set()
            added = row.added(repeated=False, least=least)
        groups[-1].append(index)
        prompts.add(row.prompt)
        used += added
        tokens[-1] = used
    return list(zip(tokens, groups, strict=True))


def pack(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    layout: Layout | None = None,
    loss_mask: torch.Tensor | None = None,
    experts: Sequence[torch.Tensor] | None = None,
) -> PackedRow:
    """Pack (B, L + C) rows, prompts padded left and completions right; C is `completion_width`.

    `loss_mask` (B, C) says which completion tokens are scored; None: all that `attention_mask` has. The others are read
    by the model as context. `layout` None: on the device of the ids. Packing happens on the CPU, so it waits for
    nothing on the GPU if the tensors are there. Rows without a token to score are left out. Every row needs
    at least one prompt token. `experts` is as in `Batch`; a prompt of several rows has the first one's.
    """
    layout = layout or Layout(input_ids.device)
    ids, mask = input_ids.cpu(), attention_mask.bool().cpu()
    scored = mask[:, -completion_width:] if loss_mask is None else loss_mask.bool().cpu()
    groups: dict[tuple[int | None, ...], list[int]] = {}
    for row in scored.any(1).nonzero()[:, 0].tolist():
        prompt = ids[row, :-completion_width][mask[row, :-completion_width]]
        groups.setdefault((None if SHARE_PROMPTS else row, *prompt.tolist()), []).append(row)
    builder = _Builder(completion_width, layout.prompts_first)
    for (_, *prompt), rows in groups.items():
        chosen = [None if experts is None else experts[row] for row in rows]
        members = [_Row(row, ids[row], mask[row], scored[row], own) for row, own in zip(rows, chosen, strict=True)]
        builder.add_group(torch.tensor(prompt), members)
    return builder.build(layout.device)


class _Row(NamedTuple):
    """A row to pack: its number in the block, ids and mask (L + C,), and which completion tokens are scored (C,)."""

    number: int
    ids: torch.Tensor
    mask: torch.Tensor
    scored: torch.Tensor
    experts: torch.Tensor | None  # of its tokens


@dataclass
class _Builder:
    """The pieces of a packed row, on the CPU, in order."""

    width: int
    prompts_first: bool
    tokens: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    query_lengths: list[int] = field(default_factory=list)
    key_lengths: list[int] = field(default_factory=list)
    predicting: list[torch.Tensor] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    places: list[torch.Tensor] = field(default_factory=list)
    experts: list[torch.Tensor] = field(default_factory=list)
    later: list[tuple[_Row, torch.Tensor]] = field(default_factory=list)  # rows of shared prompts, and these' tokens
    size: int = 0

    def add_group(self, prompt: torch.Tensor, rows: list[_Row]) -> None:
        """One prompt and the rows that have it."""
        start = torch.arange(self.size, self.size + len(prompt))
        alone = len(rows) == 1
        self._add_tokens(prompt, 0, rows[0].experts)
        if alone:
            self._add_completion(rows[0], start, alone=True)
            return
        self._add_sequence(len(prompt), start)
        if self.prompts_first:
            self.later += [(row, start) for row in rows]
            return
        for row in rows:
            self._add_completion(row, start, alone=False)

    def _add_completion(self, row: _Row, prompt: torch.Tensor, alone: bool) -> None:
        """The completion of a row whose prompt is there as the tokens `prompt`; `alone`: as one sequence with it."""
        columns = row.mask[-self.width :].nonzero()[:, 0]
        completion, scored = row.ids[-self.width :][columns], row.scored[columns]
        place = torch.arange(self.size, self.size + len(completion))
        chosen = None if row.experts is None else row.experts[len(prompt) :][columns]
        self._add_tokens(completion, len(prompt), chosen)
        self._add_sequence(len(completion) + alone * len(prompt), torch.cat([prompt, place]))
        self.predicting.append(torch.cat([prompt[-1:], place[:-1]])[scored])
        self.targets.append(completion[scored])
        self.places.append(row.number * self.width + columns[scored])

    def build(self, device: torch.device) -> PackedRow:
        begun = (len(self.query_lengths), self.size) if self.query_lengths == self.key_lengths else None
        for row, prompt in self.later:
            self._add_completion(row, prompt, alone=False)
        shared = self.query_lengths != self.key_lengths
        keys, predicting = (copies_of(_joined(rows), self.size) for rows in (self.keys, self.predicting))
        row = (self.tokens, self.positions, self.targets, self.places)
        pieces = [_starts(self.query_lengths), _starts(self.key_lengths), *(_joined(part) for part in row)]
        query_starts, key_starts, ids, positions, targets, places, *copies = _moved(
            [*pieces, *predicting, *(keys if shared else ())], device
        )
        sequences = Sequences(
            query_starts.int(),
            key_starts.int(),
            Copies(*copies[3:]) if shared else None,
            max(self.query_lengths, default=0),
            max(self.key_lengths, default=0),
            begun,
        )
        replay = None
        if self.experts:
            from qerl.model.experts import Replay

            replay = Replay.of(torch.cat(self.experts), device)
        return PackedRow(ids[None], positions[None], sequences, Copies(*copies[:3]), targets, places, replay)

    def _add_tokens(self, ids: torch.Tensor, position: int, experts: torch.Tensor | None) -> None:
        self.tokens.append(ids)
        if experts is not None:
            self.experts.append(experts[: len(ids)])
        self.positions.append(torch.arange(position, position + len(ids)))
        self.size += len(ids)

    def _add_sequence(self, queries: int, keys: torch.Tensor) -> None:
        self.query_lengths.append(queries)
        self.key_lengths.append(len(keys))
        self.keys.append(keys)


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.long), *pieces])


def _moved(pieces: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Integers to `device` in one transfer; from pinned memory, which does not wait for what the GPU has to do."""
    joined = torch.cat(pieces)
    if device.type == "cuda":
        joined = joined.pin_memory()
    return list(joined.to(device, non_blocking=True).split([len(piece) for piece in pieces]))
