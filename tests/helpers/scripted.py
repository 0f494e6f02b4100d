"""Episodes against an engine that says what a script has."""

from qerl.engine.interface import Completion, SamplingParams
from qerl.episodes.build import Source
from qerl.episodes.driven import Limits, Start
from qerl.episodes.endpoint import Chat
from qerl.episodes.play import Environments
from qerl.episodes.runner import Runner

END = 2


class Scripted:
    """An engine that says what a script has for each episode and turn, and notes what it was asked."""

    def __init__(self, tokenizer, *lines, cut=()):
        self.lines, self.cut, self.asked, self.waves = [list(each) for each in lines], cut, [], []
        self._encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]

    def run(self, conversations, seed=None):
        while requests := conversations.begin(wait=True, together=False):
            self.waves.append([request.index for request in requests])
            for request in requests:
                self.asked.append(request)
                ids = [*self._encode(self.lines[request.index].pop(0)), END]
                short = ids[: request.sampling.max_new_tokens]
                reason = "stop" if short == ids else "length"
                conversations.finished(request.index, Completion(short, [-0.5] * len(short), reason))


def scripted_environments(tokenizer, *names, processes=1, args=None, program=False, **limits):
    tools = tuple(name for name in names if name.rpartition(":")[2][0].islower() and not program)
    name = next((name for name in names if name not in tools), None)
    runner = Runner(Source(name, tools, args or {}), processes)
    return Environments(runner, Chat(tokenizer, runner.schemas, [END]), Limits(**{"timeout_s": 30.0, **limits}))


def starts(chat, *answers, question="Say it."):
    messages = ({"role": "user", "content": question},)
    return [Start({"answer": answer}, messages, chat.prompt(messages), 7) for answer in answers]


def run(tokenizer, made, answers, *lines):
    engine = Scripted(tokenizer, *lines)
    try:
        return engine, made.play(engine, starts(made.chat, *answers), SamplingParams(50), 0)
    finally:
        made.close()
