"""A mixture of experts in the vllm engine: its weights, what its routers chose, and the adapter on experts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from engine_checks.compare import mismatch, policy_logprobs, same
from engine_checks.context import Context
from engine_checks.memory import storages
from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.shards import read_json
from qerl.engine.interface import UNRECORDED, SamplingParams, of_length
from qerl.engine.update import AdapterUpdate, deliver
from qerl.engine.vllm.engine import VLLMEngine
from qerl.model.experts import Replay

ALPHA = 16.0
LONG = 700  # tokens of a prompt that is longer than every CUDA graph, so that Python runs in its forward pass


class ExpertContext(Context):
    """An engine that records experts, with an adapter on them."""

    def open(self) -> VLLMEngine:
        kind = self.arguments.experts
        rank = 0 if kind == "none" else self.arguments.expert_rank
        return super().open(experts=kind, expert_rank=rank, records_experts=True)


def one_copy(context: Context) -> dict:
    """Every tensor of the trainer's experts, and every other parameter of it, lies in a tensor of the engine."""
    engine = storages(context.engine.found.model)
    held = {name: tensors_of(experts) for name, experts in experts_of(context.policy).items()}
    own = {f"{name}[{place}]": tensor for name, tensors in held.items() for place, tensor in enumerate(tensors)}
    own |= dict(context.policy.named_parameters())
    foreign = [name for name, tensor in own.items() if tensor.untyped_storage().data_ptr() not in engine]
    return {
        "experts": len(held),
        "foreign": foreign,
        "engine_gib": sum(engine.values()) / 2**30,
        "adapter_gib": sum(slot.nbytes for slot in context.engine.found.expert_slots.values()) / 2**30,
    }


def decoded(context: Context) -> dict:
    """The engine's experts decode to the bits of the checkpoint's own decoding, in the first and the last layer."""
    from qerl.checkpoint.shards import TensorReader, read_tensors
    from qerl.formats import get

    folder, format = Path(context.arguments.model), get(context.arguments.format)
    decoder, found, different = (
        decoder_of(read_json(folder / "config.json"), str(folder)),
        experts_of(context.policy),
        {},
    )
    with TensorReader(read_tensors(folder)) as read:
        for layer in sorted({decoder.sparse[0], decoder.sparse[-1]}):
            linears = [linear for expert in decoder.experts_of(layer) for linear in expert]
            dense = {
                name: found[name].dense(torch.bfloat16) for name in {decoder.place_of(each).tensor for each in linears}
            }
            for linear in linears:
                stored = {part: read(f"{linear}.{part}").cuda() for part in format.tensors or ("weight",)}
                right = format.dequantize(stored, torch.bfloat16) if format.quantized else stored["weight"]
                place = decoder.place_of(linear)
                rows = dense[place.tensor][place.expert, place.first_row : place.first_row + len(right)]
                if wrong := int((rows.view(torch.int16) != right.view(torch.int16)).sum()):
                    different[linear] = wrong
    return {
        "count": len(different),
        "different": dict(list(different.items())[:8]),
        "decode_s": seconds_to_decode(found),
    }


def seconds_to_decode(found: dict[str, nn.Module]) -> float:
    """Of all experts of a layer, gate, up and down."""
    one = list(found.values())[:2]
    for experts in one:
        experts.dense(torch.bfloat16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for experts in one:
        experts.dense(torch.bfloat16)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def routers(context: Context) -> dict:
    """What was recorded for a long prompt is the routers' own choice for the hidden states that they read."""
    prompt = [5 + place % 200 for place in range(LONG)]
    with router_inputs(context.engine.found.model) as inputs:
        completion = context.engine.generate([prompt], SamplingParams(max_new_tokens=1), seed=1)[0]
    recorded = completion.experts.long().cuda()
    differing, gap = 0, 0.0
    for place, (layer, x) in enumerate(inputs.items()):
        logits = layer.quant_method.inner.apply(layer, torch.cat(x)[:LONG]).float()
        chosen = logits.topk(recorded.shape[2], -1).indices
        own = recorded[:, place].clamp(max=logits.shape[1] - 1)
        other = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
        differing += int(other.sum())
        worst = logits.gather(1, chosen).min(-1).values - logits.gather(1, own).min(-1).values
        gap = max(gap, float(worst.max()))  # of choices that differ: near-ties
    return {
        "shape": list(recorded.shape),
        "layers_seen": len(inputs),
        "unrecorded": int((recorded == UNRECORDED).sum()),
        "different": differing,
        "largest_gap": gap,
    }


def cached_prompts(context: Context) -> dict:
    """A prompt that was found in the prefix cache has the choices of the request that computed it."""
    prompt, sampling = context.prompts[0] + context.prompts[1], SamplingParams(max_new_tokens=8)
    first = context.engine.generate([prompt], sampling, seed=1)[0]
    again = context.engine.generate([prompt] * 3, sampling, seed=2)
    size = context.engine.llm.llm_engine.vllm_config.cache_config.block_size
    whole = (len(prompt) - 1) // size * size  # tokens of whole blocks; the others are computed again
    known = again[0] if context.arguments.deterministic else first  # then a call begins with an empty prefix cache
    equal = [torch.equal(one.experts[:whole], known.experts[:whole]) for one in again]
    missing = [len(prompt) + len(one.token_ids) - 1 - len(one.experts) for one in (first, *again)]
    return {"equal": equal, "rows_missing": missing, "tokens": whole}


def replayed(context: Context) -> dict:
    """Sampler against trainer with the engine's experts and with the trainer's own, and how many choices differ."""
    completions = context.engine.generate(context.prompts, context.sampling, seed=3)
    return agreement(context, completions)


def adapter(context: Context) -> dict:
    """An adapter on attention and experts acts in the engine as in the trainer, and zeros take it back."""
    from qerl.checkpoint.adapter import adapter_scaling, adapter_tensors, attach_lora
    from qerl.checkpoint.adapter_file import attach_to_experts_, is_of_experts, linear_targets
    from qerl.config.names import PROJECTIONS

    arguments, engine = context.arguments, context.engine
    before = engine.generate(context.prompts[:8], context.greedy)
    model = attach_lora(context.policy, arguments.rank, ALPHA, linear_targets(context.policy, PROJECTIONS))
    if arguments.experts != "none":
        attach_to_experts_(model, arguments.experts, arguments.expert_rank, ALPHA / arguments.rank)
    tensors, scaling = adapter_tensors(model), adapter_scaling(model)
    generator = torch.Generator("cuda").manual_seed(7)
    on_experts = [name for name in tensors if is_of_experts(name)]
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor.data.normal_(0, 0.02, generator=generator)
    torch.cuda.synchronize()
    started = time.perf_counter()
    count = deliver(AdapterUpdate(tensors, scaling), engine)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    completions = engine.generate(context.prompts, context.sampling, seed=3)
    result = {"count": count, "on_experts": len(on_experts), "sync_s": seconds, **agreement(context, completions)}
    greedy = engine.generate(context.prompts[:8], context.greedy)
    result["changed"] = sum(a.token_ids != b.token_ids for a, b in zip(before, greedy, strict=True))
    for name in on_experts:
        tensors[name].data.zero_()
    deliver(AdapterUpdate(tensors, scaling), engine)
    without = engine.generate(context.prompts[:8], context.greedy)
    result["changed_by_experts"] = sum(a.logprobs != b.logprobs for a, b in zip(greedy, without, strict=True))
    for tensor in tensors.values():
        tensor.data.zero_()
    deliver(AdapterUpdate(tensors, scaling), engine)
    result["zeros_restore"] = same(before, engine.generate(context.prompts[:8], context.greedy))
    for experts in experts_modules(model):
        experts.adapter = None
    context.policy = model.unload()
    return result


def agreement(context: Context, completions: list) -> dict:
    """The mismatch of sampling logprobs with those of the trainer, with replay and without."""
    prompts = context.prompts[: len(completions)]
    sampled = [completion.logprobs for completion in completions]
    own, replayed, changed, choices = [], [], 0.0, 0
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = [*prompt, *completion.token_ids]
        replay = Replay.of(of_length(completion.experts, len(tokens)), torch.device("cuda"))
        replayed += policy_logprobs(context.policy, [prompt], [completion.token_ids], replay=replay)
        own += policy_logprobs(context.policy, [prompt], [completion.token_ids])
        changed, choices = changed + float(replay.changed.sum()), choices + replay.choices
    return {
        "with_replay": mismatch(sampled, replayed),
        "without_replay": mismatch(sampled, own),
        "router_changed": changed / choices,
    }


@contextmanager
def router_inputs(model: nn.Module) -> Iterator[dict[nn.Module, list[torch.Tensor]]]:
    """Within it, what each router of vLLM's model is given where Python runs, from the first layer to the last."""
    from qerl.engine.vllm.linear import KeptMethod

    inputs: dict[nn.Module, list[torch.Tensor]] = {}
    apply = KeptMethod.apply

    def recording(self, layer, x, bias=None):
        inputs.setdefault(layer, []).append(x.clone())
        return apply(self, layer, x, bias)

    KeptMethod.apply = recording
    try:
        yield inputs
    finally:
        KeptMethod.apply = apply


def experts_modules(model: nn.Module) -> list[nn.Module]:
    from qerl.model.experts import Experts

    return [module for module in model.modules() if isinstance(module, Experts)]


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The weights of experts by their full names in memory."""
    leaves = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    return {name: module for name, module in model.named_modules() if name.endswith(leaves)}


def tensors_of(experts: nn.Module) -> tuple[torch.Tensor, ...]:
    from qerl.formats.nvfp4.kernel_layout import KernelExperts

    return (experts.words, experts.scales) if isinstance(experts, KernelExperts) else (experts.weight,)
