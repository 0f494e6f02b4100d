"""vLLM's worker, named by the engine's `worker_cls`: what has to be done between loading and the CUDA graphs."""

from __future__ import annotations

from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker

from qerl.vllm_plugin.linear import Options
from qerl.vllm_plugin.products import BASES
from qerl.vllm_plugin.sampling import FusedSampler
from qerl.vllm_plugin.tune import choose_ways_


class QerlWorker(Worker):
    """Puts the sampler in, and chooses how each linear multiplies."""

    def load_model(self, **options) -> None:
        super().load_model(**options)
        runner = self.model_runner
        if type(runner.sampler) is Sampler:  # a model with a sampler of its own keeps it
            runner.sampler = FusedSampler(runner.sampler)
        asked = Options.of(self.vllm_config)
        if BASES and not asked.deterministic:  # times scatter, and another way has other bits
            choose_ways_(asked.tune)
