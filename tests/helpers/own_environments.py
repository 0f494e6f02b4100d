"""Environments and tools of users, good and bad, which the tests name by path."""

import time


class Guess:
    """Asks for the row's answer; says what was wrong."""

    def __init__(self, patience=0.0):
        self.patience = patience

    def reset(self, example, seed):
        self.answer, self.tries = example["answer"], 0
        return f"Seed {seed}."

    def step(self, action):
        time.sleep(self.patience)
        self.tries += 1
        if action.strip() == self.answer:
            return None, 1.0, True
        return f"not {action.strip()}", -0.1, False


class Faulty(Guess):
    """Does what the model says, which may be bad."""

    def step(self, action):
        if "raise" in action:
            raise KeyError("nothing\nhere")
        if "hang" in action:
            time.sleep(60)
        if "exit" in action:
            import os

            os._exit(3)
        if "nan" in action:
            return "", float("nan"), False
        if "four" in action:
            return "", 0.0, False, {}
        return super().step(action)


ODD_ANSWERS = {
    "half": "a\ud800b",
    "half role": [{"role": "us\ud800er", "content": "x"}],
    "number": [{"role": "user", "content": 7}],
    "mapping": {"role": "user", "content": {"a": 1}},
    "picture": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    "bytes": [{"role": "user", "content": b"x"}],
    "key": [{"role": "user", "content": "x", "more": {(1, 2): 3}}],
    "role": [{"role": "nobody", "content": "x"}],
    "message": "x",
}
ODD_REWARDS = {"huge": 1e308, "infinite": float("inf"), "long": 10**400, "nan": float("nan")}


class Odd(Guess):
    """Answers what the model names, which no chat template and no log can take as it is."""

    def step(self, action):
        if action in ODD_REWARDS:
            return "go on", ODD_REWARDS[action], False
        if action in ODD_ANSWERS:
            return ODD_ANSWERS[action], 0.0, False
        if action == "mark":
            return "\x02turn\x02 \x02turn0\x02", 0.0, False
        if action == "parts":
            return (
                [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}],
                0,
                False,
            )
        if action == "none":
            return [{"role": "user", "content": None}], 0.0, False
        if action == "flood":
            return "word " * 10_000_000, 0.0, False
        if action == "last flood":
            return "word " * 10_000_000, 0.5, True
        if action == "flood in a role":
            return [{"role": "word " * 10_000_000, "content": "x"}], 0.0, False
        if action == "flood in a name":
            return [{"role": "tool", "name": "word " * 10_000_000, "content": "x"}], 0.0, False
        if action == "false as text":
            return "go on", 0.0, "False"
        if action == "raise half":
            raise ValueError("a\ud800b")
        return super().step(action)


class OddReset(Odd):
    """The same in its first answer, which the row names."""

    def reset(self, example, seed):
        super().reset(example, seed)
        return "word " * 10_000_000 if self.answer == "flood" else ODD_ANSWERS[self.answer]

    def step(self, action):
        return (None, 1.0, True) if action == self.answer else super().step(action)


class Trl:
    """As TRL's environment_factory takes it."""

    def __init__(self):
        self.counter = 0

    def reset(self, **row):
        self.target = int(row["answer"])
        return " Use the tool."

    def increment(self, by: int) -> int:
        """Count on.

        Args:
            by: how far to count

        Returns:
            Where the counter is.
        """
        self.counter += by
        return self.counter

    async def peek(self) -> int:
        """Look at the counter.

        Returns:
            Where the counter is.
        """
        return self.counter

    def get_reward(self) -> float:
        return float(self.counter == self.target)


class Silent:
    def reset(self):
        return None


class Stepless:
    pass


def untyped(expression):
    """Has no types."""


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: what is doubled

    Returns:
        The double.
    """
    return 2 * number


def solve(base_url, example, seed, tries=3):
    """A program that asks its model over HTTP, until the answer comes."""
    messages = [{"role": "user", "content": f"Say {len(example['answer'])} letters."}]
    for _ in range(tries):
        said = post(base_url, {"model": "any", "messages": messages, "temperature": 0.3})
        if "broken" in said["content"]:
            raise ValueError("broken program")
        if said["content"].strip() == example["answer"]:
            return 1.0
        if "forget" in said["content"]:
            messages = [{"role": "user", "content": "Another."}]
            continue
        messages = [*messages, said, {"role": "user", "content": [{"type": "text", "text": "No."}]}]
    return 0.25


def post(base_url, body):
    """The message that the endpoint answers."""
    import json
    import urllib.request

    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())["choices"][0]["message"]


async def with_tool(base_url, example):
    """A program with a tool of its own, in OpenAI's form."""
    import json

    messages = [{"role": "user", "content": "Use it."}]
    said = post(base_url, {"messages": messages, "tools": with_tool.tools})
    call = said["tool_calls"][0]
    result = 2 * json.loads(call["function"]["arguments"])["number"]
    messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": str(result)}]
    return float(post(base_url, {"messages": messages, "tools": with_tool.tools})["content"] == example["answer"])


with_tool.tools = [
    {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Twice a number.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    }
]


def asks_nothing(base_url):
    return 1.0


def sleeps(base_url):
    time.sleep(60)


def bad_request(base_url, body):
    """Raises what the endpoint says of a request that it refuses."""
    import json
    import urllib.error

    try:
        post(base_url, json.loads(body))
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.loads(error.read())["error"]["message"]) from None


class Chosen:
    """As TRL documents an environment that chooses its task by itself."""

    def reset(self, seed, **kwargs) -> str:
        self.count, self.goal = 0, 2
        return f"Count to {self.goal}."

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def add(self, step: int) -> int:
        """Count on.

        Args:
            step: how far to count

        Returns:
            Where the count is.
        """
        self.count += step
        return self.count


class Mute(Chosen):
    def reset(self) -> None:
        super().reset(0)


class Given(Chosen):
    """As TRL documents one whose task comes as a column of the data."""

    def reset(self, answer, **kwargs) -> None:
        self.count, self.goal = 0, int(answer)


def streams(base_url, example):
    """A program whose client streams, as some do."""
    import json
    import urllib.request

    body = json.dumps({"stream": True, "messages": [{"role": "user", "content": "Say it."}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body), timeout=30) as response:
        events = [line.decode().removeprefix("data: ").strip() for line in response if line.strip()]
    chunks = [json.loads(event) for event in events[:-1]]
    said = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    ended = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return float((said, ended, events[-1]) == (example["answer"], [None, "stop"], "[DONE]"))


def echo(text: str) -> str:
    """Say something again.

    Args:
        text: what to say

    Returns:
        The same.
    """
    return text
