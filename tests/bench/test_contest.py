"""Rotation, and what becomes of providers that are wrong, refuse, crash or hang: with made-up processes."""

import queue
from collections import Counter

import pytest

from flashtile.bench import run as runs
from flashtile.bench.cases import DType, case
from flashtile.bench.contest import Contest, Settings, wanted
from flashtile.bench.rotation import rotate
from flashtile.bench.worker import WorkerLostError
from tests.bench.fake_worker import FakeWorker

TINY = case(1, 1, 64, 16, DType.FP32, True)
HUGE = case(4, 48, 32768, 64, DType.FP16, True)


def test_turns_alternate_in_direction() -> None:
    turns: list[str] = []
    times = rotate("abc", 3, lambda name: turns.append(name) or float(len(turns)))
    assert "".join(turns) == "abccbaabc"
    assert times == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


def test_who_drops_out_takes_no_further_turn() -> None:
    turns: list[str] = []

    def burst(name: str) -> float | None:
        turns.append(name)
        return None if name == "b" and len(turns) > 3 else 1.0

    assert set(rotate("abc", 3, burst)) == {"a", "c"}
    assert "".join(turns) == "abccbaac"


def test_short_time_saves_rounds_but_not_the_way_back() -> None:
    assert len(rotate("ab", 9, lambda name: 1.0, in_time=lambda: False)["a"]) == 4
    assert len(rotate("ab", 1, lambda name: 1.0, in_time=lambda: False)["a"]) == 1


def contest(*workers, problem=TINY, crashes=None, **settings):
    held = Contest("suite", problem, workers, Settings(**settings), Counter() if crashes is None else crashes)
    held.run()
    rows = held.results({}, {False: "new", True: "old"})
    return {(row.provider, row.direction): row for row in rows}


def test_results_of_a_quiet_contest() -> None:
    rows = contest(FakeWorker(["flashtile/a", "peer"]), rounds=3)
    assert len(rows) == 4
    forward, backward = rows["flashtile/a", "forward"], rows["flashtile/a", "backward"]
    assert (forward.status, forward.ms, forward.ms_low, forward.error) == ("ok", 2.0, 2.0, 1e-4)
    assert (forward.host_us, forward.host_step_us) == (30.0, None)
    assert (backward.host_us, backward.host_step_us) == (None, 30.0)
    assert backward.tflops == 2.5 * forward.tflops


def test_the_wrong_is_never_timed() -> None:
    wrong = {"status": "wrong", "reason": "out is off by 3e-01, limit 1e-04", "error": 0.3}
    worker = FakeWorker(["good", "bad"], {"bad": wrong})
    rows = contest(worker)
    assert not [a for a in worker.asked if a[0] in ("burst", "host") and a[1] == "bad"]
    assert ("prepare", "bad", "backward") not in worker.asked
    assert (rows["bad", "forward"].status, rows["bad", "forward"].ms) == ("wrong", None)
    assert rows["bad", "backward"].reason == "forward: out is off by 3e-01, limit 1e-04"
    assert rows["good", "backward"].ms == 2.0


def test_refusal_is_a_row_with_its_reason() -> None:
    rows = contest(FakeWorker(["good", "no"], {"no": {"status": "refused", "reason": "needs a GPU"}}))
    assert {(r.status, r.reason) for (name, _), r in rows.items() if name == "no"} == {("refused", "needs a GPU")}


def test_a_crash_is_named_and_the_others_go_on() -> None:
    worker = FakeWorker(["a", "b"], deaths={("burst", "b", "backward"): False})
    crashes = Counter()
    rows = contest(worker, crashes=crashes)
    assert worker.starts == 2
    assert rows["b", "backward"].status == "failed"
    assert rows["b", "backward"].reason == "burst: process died of SIGSEGV"
    assert {rows[key].status for key in rows if key != ("b", "backward")} == {"ok"}
    assert crashes == {("b", "backward"): 1}
    contest(worker, crashes=crashes)
    worker.asked.clear()
    rows = contest(worker, crashes=crashes)
    assert rows["b", "backward"].reason == "left out: it hung or crashed before"
    assert ("prepare", "b", "backward") not in worker.asked


def test_one_hang_is_enough_to_be_left_out() -> None:
    crashes = Counter()
    worker = FakeWorker(["a", "b"], deaths={("prepare", "a", "forward"): True})
    rows = contest(worker, crashes=crashes)
    assert rows["a", "forward"].status == rows["a", "backward"].status == "failed"
    worker.deaths = {}
    rows = contest(worker, crashes=crashes)
    assert rows["a", "forward"].reason == "left out: it hung or crashed before"
    assert rows["b", "forward"].status == "ok"


def test_a_case_that_kills_the_process_fails_for_everybody() -> None:
    rows = contest(FakeWorker(["a"], deaths={("open", "", ""): False}))
    assert {r.reason for r in rows.values()} == {"open: process died of SIGSEGV"}


def test_base_alternates_with_this_checkout() -> None:
    turns: list[str] = []
    new, old = FakeWorker(["flashtile/a", "peer"]), FakeWorker(["flashtile/a", "peer"], base=True)
    for worker, side in ((new, "new"), (old, "old")):

        def ask(verb, *args, given=worker.ask, side=side, **rest):
            turns.extend([side] if verb == "burst" else [])
            return given(verb, *args, **rest)

        worker.ask = ask
    rows = contest(new, old, patterns=("flashtile", "base"), directions=("forward",), rounds=2)
    assert turns == ["new", "old", "old", "new"]
    assert {name: row.commit for (name, _), row in rows.items()} == {"flashtile/a": "new", "base/a": "old"}


def test_a_cpu_refuses_what_is_too_large() -> None:
    worker = FakeWorker(["a"], kind="cpu")
    rows = contest(worker, problem=HUGE)
    assert not worker.asked
    assert "on a CPU the limit is 20" in rows["a", "forward"].reason


def test_patterns() -> None:
    assert wanted("sdpa/flash", ())
    assert wanted("sdpa/flash", ("flash",))
    assert wanted("sdpa/flash", ("sdpa",))
    assert wanted("flashtile/triton/split", ("flashtile/*",))
    assert wanted("flashtile/triton/split", ("flashtile/triton/split",))
    assert not wanted("flashtile/triton/split", ("flash", "flex"))


@pytest.mark.parametrize("limit_s", [60, float("inf")])
def test_compiling_ahead_covers_every_case(monkeypatch, limit_s) -> None:
    helpers: list[FakeWorker] = []

    class Helper(FakeWorker):
        def __init__(self, library, log, also, base):
            super().__init__([])
            self.process = None
            self.compiled: list[str] = []
            helpers.append(self)

        def ask(self, verb, patience_s=None, **rest):
            assert rest["names"] == ["flashtile/a"]
            replies = queue.SimpleQueue[str]()
            replies.put("")
            replies.get(timeout=patience_s)  # raises OverflowError where it cannot wait so long
            self.compiled.append(rest["spelling"])
            if len(self.compiled) == 1:
                raise WorkerLostError("told when it is timed")

    monkeypatch.setattr(runs, "Worker", Helper)
    monkeypatch.setattr(runs.os, "cpu_count", lambda: 6)
    worker = FakeWorker(["flashtile/a", "peer"])
    worker.greeting["compiling"] = ["flashtile/a"]
    cases = [case(1, 1, n, 16, DType.FP16, True) for n in (16, 32, 48, 64, 80)]
    runs.compile_ahead(cases, [worker], Settings(), limit_s, lambda line: None)
    assert sorted(s for h in helpers for s in h.compiled) == sorted(c.spell() for c in cases)
    assert all(h.process is None for h in helpers)
