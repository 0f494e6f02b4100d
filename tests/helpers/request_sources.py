"""Sources of requests for either engine."""

from qerl.engine.interface import Source


class Supplied(Source):
    """Requests of which `room` run at once, until `wanted` have ended. `told` are those that ended, in that order."""

    def __init__(self, wanted, requests, room=2):
        self.wanted, self.waiting, self.room, self.done, self.told = wanted, list(requests), room, {}, []

    def begin(self, wait, together):
        if len(self.done) >= self.wanted:
            return None
        given, self.waiting = self.waiting[: self.room], self.waiting[self.room :]
        self.room -= len(given)
        return given

    def ended(self, indices):
        self.told += indices
        self.room += len(indices)
        return bool(self.waiting) or len(self.told) >= self.wanted

    def finished(self, index, completion):
        self.done[index] = completion
