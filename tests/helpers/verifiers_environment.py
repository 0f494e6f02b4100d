"""A task of verifiers 0.4 and how qerl has it solved, as docs/other-environments.md shows it."""

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers.v1.runtimes import SubprocessConfig


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))


async def solve(base_url, example):
    agent = vf.make_agent(
        vf.AgentConfig(
            harness=NullHarnessConfig(id="null"),
            runtime=SubprocessConfig(),
            model="policy",
            client=EvalClientConfig(base_url=base_url, api_key_var="UNUSED"),
        )
    )
    data = SumData(idx=0, prompt=example.get("question", "What is 2 + 2?"), answer=int(example["answer"]))
    trace = await agent.run(SumTask(data))
    if not trace.ok:
        raise RuntimeError(trace.errors[-1].message)
    return trace.reward
