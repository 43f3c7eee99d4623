"""A measuring process that is none: it answers by a script."""

from flashtile.bench.revision import LIBRARY
from flashtile.bench.worker import PATIENCE_S, WorkerLostError


class FakeWorker:
    """A process that answers by a script: `statuses` of prepare, `deaths` as {(verb, provider, direction): hung}."""

    def __init__(self, names, statuses=None, deaths=None, base=False, kind="cuda"):
        self.greeting = {"providers": names, "kind": kind, "compiling": names, "facts": {}}
        self.statuses, self.deaths, self.base = statuses or {}, deaths or {}, base
        self.process, self.patience_s, self.starts = None, dict(PATIENCE_S), 0
        self.library, self.log, self.also = LIBRARY, None, None
        self.asked: list[tuple[str, str, str]] = []

    def start(self):
        self.process, self.starts = object(), self.starts + 1

    def ask(self, verb, patience_s=None, name="", direction="", **rest):
        self.asked.append((verb, name, direction))
        if (verb, name, direction) in self.deaths:
            self.process = None
            raise WorkerLostError("process died of SIGSEGV", hung=self.deaths[verb, name, direction])
        reply = {"prepare": {"status": "ok", "error": 1e-4, "ms": 1.0}, "burst": {"ms": 2.0}, "host": {"us": 30.0}}
        return self.statuses.get(name, reply["prepare"]) if verb == "prepare" else reply.get(verb, {})

    def stop(self):
        self.process = None
