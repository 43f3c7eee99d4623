"""Which of Hopper's backwards a problem gets, found without compiling one."""

from __future__ import annotations

import pytest

from flashtile.kernels.sm90 import backend
from flashtile.plan.backend import Gradients
from flashtile.plan.call import Plan
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Variant

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("hopper_runs")

LONG = "q=2x1200x4x128,kv=1200x4x128,bf16"
NARROW, WIDE = "q=2x512x4x128,kv=512x4x128,bf16", "q=2x512x4x256,kv=512x4x256,bf16"


def plan(text: str, variant: Variant, wanted: str = "qkv") -> Plan:
    problem = AttentionProblem.parse(f"attention({text})")
    assert backend.BACKEND.unsupported(problem, H100, variant) == []
    return backend.BACKEND.backward(problem, H100, Gradients(wanted=frozenset(wanted)), variant)


@pytest.mark.parametrize(("text", "asked", "made"), [
    (NARROW, "auto", "fused"),
    (WIDE, "auto", "fused"),
    (f"{NARROW},deterministic", "auto", "fused"),  # in a fixed order
    (f"{NARROW},band=:0", "auto", "fused"),
    (f"{NARROW},band=:0,deterministic", "auto", "split"),
    (f"{NARROW},band=:0,deterministic", "fused", "fused"),
    (f"{NARROW},band=:0,score=bias(2x4x512x512:bf16:grad),deterministic", "auto", "fused"),
    (f"{LONG},band=:0,deterministic", "auto", "fused"),
    (f"{WIDE},deterministic", "auto", "split"),
    (f"{WIDE},deterministic", "fused", "fused"),
    (f"{WIDE},deterministic,where=block_table(128;128;2x4x4x4:bool),blocks=128x128", "auto", "split"),
    (f"{NARROW},varlen=900x900,deterministic", "auto", "split"),
    (f"{NARROW},varlen=900x900", "auto", "fused"),
    (NARROW, "split", "split"),
])  # fmt: skip
def test_the_variant_that_is_made(text: str, asked: Variant, made: str) -> None:
    assert plan(text, asked).variant == made


@pytest.mark.parametrize("text", [NARROW, WIDE, f"{NARROW},varlen=900x900"])
def test_a_split_one_has_no_sum_of_dq_and_takes_passes_apart(text: str) -> None:
    whole = plan(text, "split")
    assert not {"dq_sum", "locks"} & {buffer.name for buffer in whole.buffers}

    def calls(wanted: str) -> list[str]:
        made = [call.kernel.fn.__name__ for call in plan(text, "split", wanted).calls]
        return [name for name in made if name in ("attention_backward", "attention_queries")]

    assert calls("q") == ["attention_queries"]
    assert calls("v") == ["attention_backward"]
    assert calls("qkv") == ["attention_backward"] * (2 if text == WIDE else 1) + ["attention_queries"]


@pytest.mark.parametrize(("text", "asked", "reason"), [
    (f"{NARROW},varlen=900x900,deterministic", "fused", "the deterministic order is kept for batches of one length"),
    (f"{NARROW},score=bias(2x4x512x512:bf16:grad)", "split", "gradients of biases are formed by the 'fused' backward"),
])  # fmt: skip
def test_what_a_variant_refuses(text: str, asked: Variant, reason: str) -> None:
    refusals = backend.BACKEND.unsupported(AttentionProblem.parse(f"attention({text})"), H100, asked)
    assert any(reason in refusal for refusal in refusals)


@pytest.mark.parametrize(("text", "converts"), [
    ("q=2x2048x16x64,kv=2048x16x64,bf16", True),
    ("q=8x2048x16x64,kv=2048x8x64,bf16,score=softcap(30.0)", True),
    ("q=2x2048x16x64,kv=2048x16x64,bf16,band=:0", False),
    ("q=2x2048x16x64,kv=2048x16x64,bf16,band=300:", False),
    ("q=2x2048x16x64,kv=2048x16x64,bf16,deterministic", False),
    ("q=2x1024x16x64,kv=1024x16x64,bf16", False),  # two tiles for each multiprocessor
    ("q=2x2048x16x128,kv=2048x16x128,bf16", True),
    ("q=2x4096x16x128,kv=4096x16x128,bf16", False),
    ("q=2x4096x16x128,kv=4096x16x128,bf16,band=:0", True),
    ("q=2x4096x16x128,kv=4096x16x128,bf16,band=:0,dropout=0.1", True),
    ("q=2x4096x16x128,kv=4096x8x128,bf16,band=:0", False),
    ("q=2x4096x16x256,kv=4096x16x256,bf16,band=:0", False),
    ("q=2x4096x16x64,kv=4096x16x64,bf16,varlen=8192x8192", False),
    ("q=2x2048x16x64,kv=2048x16x64,bf16,where=block_table(128;128;2x16x16x16:bool),blocks=128x128", False),
])  # fmt: skip
def test_which_pass_over_keys_makes_dq_too(text: str, converts: bool) -> None:
    def after(wanted: str) -> list[str]:
        names = [call.kernel.fn.__name__ for call in plan(text, "fused", wanted).calls]
        return names[names.index("attention_backward") + 1 :]

    assert after("qkv").count("attention_dq") == (not converts)
    assert "attention_dq" not in after("kv")


@pytest.mark.parametrize(("text", "helps"), [
    ("q=1x1024x16x128,kv=1024x16x128,bf16,band=:0", True),
    ("q=2x700x6x64,kv=900x6x64,fp16,band=:0", True),
    ("q=1x1024x17x128,kv=1024x17x128,bf16,band=:0", False),  # more tiles than multiprocessors
    ("q=1x384x16x128,kv=384x16x128,bf16,band=:0", False),  # three tiles of a head: nothing to share evenly
    ("q=1x1024x16x128,kv=1024x16x128,bf16", False),
    ("q=1x1024x16x128,kv=1024x16x128,bf16,band=300:0", False),
    ("q=1x1024x16x128,kv=1024x8x128,bf16,band=:0", True),  # query heads that share keys have tiles of their own
    ("q=1x1000x16x128,kv=1000x8x128,bf16,band=:0", False),  # here they have not
    ("q=1x1024x8x256,kv=1024x8x256,bf16,band=:0", False),
    ("q=1x1024x16x128,kv=1024x16x128,bf16,band=:0,deterministic", False),
])  # fmt: skip
def test_which_blocks_help(text: str, helps: bool) -> None:
    made = plan(text, "auto")
    room = [buffer for buffer in made.buffers if buffer.name == "given"]
    assert len(room) == helps
    if helps:  # as many long tiles as blocks that can help
        (keys,) = (call for call in made.calls if call.kernel.fn.__name__ == "attention_backward")
        assert room[0].shape[0] == keys.grid[0] // 2


TABLE = "where=block_table(128;128;1x4x8x8:bool),blocks=128x128"


@pytest.mark.parametrize(("text", "tiles", "room"), [
    (f"q=1x1024x4x128,kv=1024x4x128,bf16,{TABLE}", 32, 3 * 32),
    (f"q=1x1000x4x64,kv=1000x4x64,bf16,score=softcap(30),{TABLE}", 32, 0),
    ("q=1x2000x4x64,kv=2000x4x64,bf16,score=softcap(30),where=block_table(128;128;1x4x16x16:bool),blocks=128x128", 64, 64),
    ("q=1x4096x8x128,kv=4096x8x128,bf16,where=block_table(128;128;1x8x32x32:bool),blocks=128x128", 256, 15 * 13),
    ("q=2x4096x8x128,kv=4096x8x128,bf16,where=block_table(128;128;1x8x32x32:bool),blocks=128x128", 512, 7 * 28),
    ("q=1x1024x8x128,kv=1024x2x128,bf16,band=:0,where=prefix(1:int32)|within(64;0),blocks=128x128", 16, 15 * 13),
    ("q=1x256x4x128,kv=1024x4x128,bf16,where=block_table(128;128;1x4x2x8:bool),blocks=128x128", 32, 0),
    (f"q=1x1024x4x128,kv=1024x4x128,bf16,deterministic,{TABLE}", 32, 0),
    (f"q=1x1024x4x256,kv=1024x4x256,bf16,{TABLE}", 32, 0),
    ("q=1x1024x4x128,kv=1024x4x128,bf16,where=document(1024;1024;1x1024:int32;1x1024:int32),blocks=128x128", 32, 0),
    ("q=1x1024x4x128,kv=1024x4x128,bf16,where=within(64;0),blocks=128x128", 32, 0),
])  # fmt: skip
def test_which_lists_are_taken_in_pieces(text: str, tiles: int, room: int) -> None:
    made = plan(text, "fused")
    given = [buffer.shape[0] for buffer in made.buffers if buffer.name == "given"]
    assert given == [room] * (room > 0)
    (*_, keys) = (call for call in made.calls if call.kernel.fn.__name__ == "attention_backward")
    assert keys.grid[0] == min(132, tiles + room)  # as many blocks as there may be tickets
