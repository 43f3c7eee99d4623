"""Bad input: a named error that says what is wrong with what, before anything is launched."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flashtile
from flashtile import (
    Alibi,
    AttentionProblem,
    Band,
    Bias,
    Captured,
    Dropout,
    InvalidProblem,
    NotSupported,
    Options,
    Prefix,
    Score,
    Softcap,
    dispatch,
)
from flashtile.plan.device import named
from flashtile.problem.dtype import DType
from flashtile.problem.score import ScoreSpec, TensorSpec
from flashtile.torch.execute import bound as executor

HALF = torch.float16


def tensor(*shape: int, dtype: torch.dtype = HALF, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def good() -> dict[str, Any]:
    return {"q": tensor(2, 6, 4, 16), "k": tensor(2, 8, 2, 16), "v": tensor(2, 8, 2, 16)}


def function(score: Any, *_: Any) -> Any:
    return score


class Scalars(Score):
    """A modifier whose scalars, tensors and captured are the test's."""

    name = "errors_scalars"
    forward, backward = function, function
    given: tuple[Any, ...] = ()

    def __init__(self, *given: Any) -> None:
        self.given = given

    def scalars(self) -> tuple[float, ...]:
        return self.given

    apply = staticmethod(function)


class OneTensor(Score):
    name = "errors_one_tensor"
    forward, backward = function, function
    captured = (Captured(function),)

    def __init__(self, *given: Any) -> None:
        self.given = given

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        return self.given

    apply = staticmethod(function)


class Formless(Score):
    name = "errors_formless"


def sparse(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=HALF).to_sparse()


def nested(*lengths: int, layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(n, 4, 16, dtype=HALF) for n in lengths], layout=layout)


def grad(t: torch.Tensor) -> torch.Tensor:
    return t.requires_grad_()


# name -> (the argument or arguments that differ from good(), the message)
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "q-list": ({"q": [[1.0]]}, "q is a list; it must be a torch.Tensor"),
    "q-none": ({"q": None}, "q is a NoneType; it must be a torch.Tensor"),
    "k-numpy": ({"k": np.zeros((2, 8, 2, 16), np.float16)}, "k is a ndarray; it must be a torch.Tensor"),
    "v-number": ({"v": 1.0}, "v is a float; it must be a torch.Tensor"),
    "q-rank-3": ({"q": tensor(2, 6, 16)}, "q has shape (2, 6, 16); it must be (batch, seqlen, heads, head_dim)"),
    "k-rank-5": ({"k": tensor(1, 2, 8, 2, 16)}, "k has shape (1, 2, 8, 2, 16); it must be"),
    "v-rank-0": ({"v": tensor()}, "v has shape (); it must be"),
    "q-int": ({"q": tensor(2, 6, 4, 16, dtype=torch.int32)}, "q is torch.int32; it must be float16, bfloat16, float32 or fl"),
    "q-bool": ({"q": tensor(2, 6, 4, 16, dtype=torch.bool)}, "q is torch.bool; it must be float16"),
    "q-float64": ({"q": tensor(2, 6, 4, 16, dtype=torch.float64)}, "k is torch.float16 and q is torch.float64"),
    "q-complex": ({"q": tensor(2, 6, 4, 16, dtype=torch.complex64)}, "q is torch.complex64; it must be float16"),
    "q-float8": ({"q": tensor(2, 6, 4, 16).to(torch.float8_e4m3fn)}, "q is torch.float8_e4m3fn; it must be float16"),
    "k-dtype": ({"k": tensor(2, 8, 2, 16, dtype=torch.float32)}, "k is torch.float32 and q is torch.float16; q, k and v must"),
    "v-dtype": ({"v": tensor(2, 8, 2, 16, dtype=torch.bfloat16)}, "v is torch.bfloat16 and q is torch.float16"),
    "q-sparse": ({"q": sparse(2, 6, 4, 16)}, "q has layout torch.sparse_coo; it must be strided"),
    "v-sparse": ({"v": sparse(2, 8, 2, 16)}, "v has layout torch.sparse_coo; it must be strided"),
    "q-nested": ({"q": nested(6, 5)}, "q is a nested tensor; it must be a dense one, or a nested one of layout torch.jagged"),
    "k-jagged": ({"k": nested(8, 7, layout=torch.jagged)}, "k has layout torch.jagged; it must be strided"),
    "v-negated": ({"v": torch._neg_view(tensor(2, 8, 2, 16))}, "v is a negated view; it must be a tensor of its own"),
    "slopes-negated": ({"score": (Alibi(torch._neg_view(torch.ones(4))),)}, "alibi's tensor is a negated view; it must be"),
    "prefix-negated": ({"mask": Prefix(torch._neg_view(torch.ones(2).int()))}, "prefix's tensor is a negated view; it must be"),
    "sink-sparse": ({"sink": torch.ones(4).to_sparse()}, "sink has layout torch.sparse_coo; it must be a strided"),
    "used-sparse": ({"seqused_k": torch.tensor([3, 8]).int().to_sparse()}, "seqused_k has layout torch.sparse_coo; it must"),
    "prefix-sparse": ({"mask": Prefix(torch.ones(2).int().to_sparse())}, "prefix's tensor has layout torch.sparse_coo; it"),
    "q-meta": ({"q": tensor(2, 6, 4, 16, device="meta")}, "k is on cpu and q is on meta; q, k and v must be on one device"),
    "k-meta": ({"k": tensor(2, 8, 2, 16, device="meta")}, "k is on meta and q is on cpu; q, k and v must be on one device"),
    "k-batch": ({"k": tensor(3, 8, 2, 16)}, "k has batch 3 and q has 2; they must be equal"),
    "v-batch": ({"v": tensor(1, 8, 2, 16)}, "v has batch 1 and q has 2; they must be equal"),
    "k-head_dim": ({"k": tensor(2, 8, 2, 24)}, "k has head_dim 24 and q has 16; they must be equal"),
    "v-seqlen": ({"v": tensor(2, 9, 2, 16)}, "v has seqlen 9 and k has 8; they must be equal"),
    "v-heads": ({"v": tensor(2, 8, 4, 16)}, "v has heads 4 and k has 2; they must be equal"),
    "heads-3-of-4": ({"k": tensor(2, 8, 3, 16), "v": tensor(2, 8, 3, 16)}, "heads_q is 4 and heads_kv is 3; heads_q must be"),
    "heads-8-of-4": ({"k": tensor(2, 8, 8, 16), "v": tensor(2, 8, 8, 16)}, "heads_q is 4 and heads_kv is 8"),
    "heads_q-0": ({"q": tensor(2, 6, 0, 16)}, "heads_q is 0; it must be at least 1"),
    "heads_kv-0": ({"k": tensor(2, 8, 0, 16), "v": tensor(2, 8, 0, 16)}, "heads_kv is 0; it must be at least 1"),
    "head_dim-0": ({"q": tensor(2, 6, 4, 0), "k": tensor(2, 8, 2, 0)}, "head_dim is 0; it must be at least 1"),
    "head_dim_v-0": ({"v": tensor(2, 8, 2, 0)}, "head_dim_v is 0; it must be at least 1"),
    "seqlen-2**31": ({"q": tensor(2, 1, 4, 16).expand(2, 2**31, 4, 16)}, "seqlen_q is 2147483648; it must be below 2**31"),
    "causal-text": ({"causal": "yes"}, "causal is 'yes'; it must be True or False"),
    "causal-none": ({"causal": None}, "causal is None; it must be True or False"),
    "causal-1": ({"causal": 1}, "causal is 1; it must be True or False"),
    "causal-tensor": ({"causal": torch.tensor([True, False])}, "it must be True or False"),
    "window-number": ({"window": 4}, "window is 4; it must be a pair (left, right)"),
    "window-text": ({"window": "64"}, "window is '64'; it must be a pair"),
    "window-three": ({"window": (1, 2, 3)}, "window is (1, 2, 3); it must be a pair"),
    "window-negative-left": ({"window": (-1, 0)}, "window left is -1; it must not be negative (None means unbounded)"),
    "window-negative-right": ({"window": (None, -2)}, "window right is -2; it must not be negative"),
    "window-float": ({"window": (1.5, 0)}, "window left is 1.5; it must be an int or None"),
    "window-bool": ({"window": (0, True)}, "window right is True; it must be an int or None"),
    "window-float-like-an-int": ({"window": (3.0, 2)}, "window left is 3.0; it must be an int or None"),
    "window-set": ({"window": {3, 2}}, "it must be a pair (left, right) of ints or None"),
    "window-wide": ({"window": (2**40, 0)}, "Band left is 1099511627776; it must lie within 32 bits"),
    "mask-text": ({"mask": "causal"}, "mask is a str; it must be a flashtile mask such as Band"),
    "mask-tuple": ({"mask": (3, 0)}, "mask is a tuple; it must be a flashtile mask"),
    "mask-tensor": (
        {"mask": torch.ones(6, 8, dtype=torch.bool)},
        "mask is a Tensor; it must be a flashtile mask such as Band. Booleans for every score go in as Stored(tensor)",
    ),
    "mask-function": (
        {"mask": function},
        "mask is a function; it must be a flashtile mask such as Band. A function of positions goes into flashtile.compat.flex",
    ),
    "mask-stored-sizes": (
        {"mask": flashtile.Stored(torch.ones(1, 1, 6, 6, dtype=torch.bool))},
        "stored mask has shape (1, 1, 6, 6); it must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (2, 4, 6, 8)",
    ),
    "mask-class": ({"mask": Band}, "mask is a type; it must be a flashtile mask such as Band. Calling Band makes one."),
    "score-bare": ({"score": 3.0}, "score is 3.0; it must be a sequence of score modifiers, such as (Softcap(30.0),)"),
    "score-none": ({"score": None}, "score is None; it must be a sequence of score modifiers"),
    "score-zero": ({"score": 0}, "score is 0; it must be a sequence of score modifiers"),
    "score-bare-tensor": ({"score": torch.zeros(())}, "score is a Tensor, 0.0; it must be a sequence of score modifiers"),
    "score-bias": ({"score": torch.ones(4, 4)}, "such as (Softcap(30.0),). A tensor that is added goes in as Bias"),
    "score-bare-function": ({"score": function}, "such as (Softcap(30.0),). A score_mod goes into flashtile.compat.flex"),
    "scale-of-one": ({"scale": torch.ones(1)}, "scale is a Tensor; it must be a number or None. A scale that is learned"),
    "score-text": ({"score": "softcap"}, "score is 'softcap'; it must be a sequence of score modifiers"),
    "score-tensor": ({"score": torch.ones(3)}, "score is a Tensor; it must be a sequence of score modifiers"),
    "score-number": ({"score": (30.0,)}, "score holds a float; it must hold score modifiers"),
    "score-class": ({"score": [Softcap]}, "score holds a type; it must hold score modifiers"),
    "score-function": ({"score": (function,)}, "score holds a function; it must hold score modifiers"),
    "slopes-heads": ({"score": (Alibi(torch.ones(3)),)}, "alibi slopes have shape (3,); it must be (4,) or (2, 4)"),
    "slopes-batch": ({"score": (Alibi(torch.ones(3, 4)),)}, "alibi slopes have shape (3, 4); it must be (4,) or (2, 4)"),
    "slopes-int": ({"score": (Alibi(torch.ones(4, dtype=torch.int64)),)}, "alibi's tensor is torch.int64; it must be float16"),
    "slopes-meta": ({"score": (Alibi(torch.ones(4, device="meta")),)}, "alibi's tensor is on meta and q is on cpu; they must"),
    "scalar-nan": ({"score": (Scalars(math.nan),)}, "Scalars has the parameter nan; it must be finite"),
    "scalar-bool": ({"score": (Scalars(True),)}, "errors_scalars has the scalar True; it must be a number"),
    "scalar-inf": ({"score": (Scalars(1.0, math.inf),)}, "Scalars has the parameter inf; it must be finite"),
    "scalar-text": ({"score": (Scalars("1"),)}, "errors_scalars has the scalar '1'; it must be a number"),
    "scalar-tensor": ({"score": (Scalars(torch.ones(2)),)}, "it must be a number"),
    "captured-none": ({"score": (OneTensor(),)}, "OneTensor captures 0 tensors; its class declares 1"),
    "captured-two": ({"score": (OneTensor(torch.ones(2, 4), torch.ones(2, 4)),)}, "captures 2 tensors; its class declares 1"),
    "captured-list": ({"score": (OneTensor([1.0]),)}, "errors_one_tensor captures a list; it must be a torch.Tensor"),
    "captured-shape": (
        {"score": (OneTensor(grad(torch.ones(4))),)},
        "errors_one_tensor's tensor has shape (4,); a captured tensor without `index` must be (batch, heads_q) = (2, 4)",
    ),
    "bias-shape": (
        {"score": (Bias(torch.zeros(4, 6, 7)),)},
        "bias's tensor has shape (1, 4, 6, 7); it must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (2, 4, 6, 8)",
    ),
    "bias-dtype": ({"score": (Bias(torch.zeros(6, 8).bool()),)}, "bias's tensor is torch.bool; it must be float16"),
    "sink-list": ({"sink": [0.0] * 4}, "sink is a list; it must be a torch.Tensor or None"),
    "sink-number": ({"sink": 0.5}, "sink is a float; it must be a torch.Tensor or None"),
    "sink-shape": ({"sink": torch.zeros(2)}, "sink has shape (2,); it must be (heads_q,) = (4,)"),
    "sink-batch": ({"sink": torch.zeros(2, 4)}, "sink has shape (2, 4); it must be (heads_q,) = (4,)"),
    "sink-dtype": ({"sink": torch.zeros(4).double()}, "sink is torch.float64; it must be float16, bfloat16 or float32"),
    "sink-meta": ({"sink": torch.zeros(4, device="meta")}, "sink is on meta and q is on cpu; they must be on one device"),
    "dropout-number": ({"dropout": 0.1}, "flashtile.Dropout or None. Dropout(p) drops with probability p"),
    "dropout-seed-dtype": (
        {"dropout": Dropout(0.1, torch.zeros(2, dtype=torch.int32))},
        "dropout seed has shape (2,) and is torch.int32; it must be an int64 tensor (2,): (seed, offset)",
    ),
    "dropout-seed-shape": ({"dropout": Dropout(0.1, torch.zeros(3).long())}, "dropout seed has shape (3,) and is torch.int64"),
    "dropout-seed-numpy": ({"dropout": Dropout(0.1, np.zeros(2, np.int64))}, "dropout seed has shape (2,) and is int64"),
    "dropout-seed-meta": (
        {"dropout": Dropout(0.1, torch.zeros(2, device="meta").long())},
        "dropout seed is on meta and q is on cpu; they must be on one device",
    ),
    "scale-nan": ({"scale": math.nan}, "scale is nan; it must be finite"),
    "scale-inf": ({"scale": -math.inf}, "scale is -inf; it must be finite"),
    "scale-text": ({"scale": "auto"}, "scale is 'auto'; it must be a number or None"),
    "scale-bool": ({"scale": True}, "scale is True; it must be a number or None"),
    "scale-complex": ({"scale": 1j}, "scale is 1j; it must be a number or None"),
    "scale-tensor": ({"scale": torch.ones(1)}, "scale is a Tensor; it must be a number or None"),
    "scale-learned": (
        {"scale": torch.tensor(0.5, requires_grad=True)},
        "scale is a Tensor that requires a gradient; it must be a number or None. A scale that is learned, or traced, "
        "multiplies q: attention(q * scale, k, v, scale=1.0).",
    ),
    "scale-elsewhere": ({"scale": torch.tensor(0.5, device="meta")}, "scale is a Tensor on a device, whose number"),
    "window-one": ({"window": 4}, "window is 4; it must be a pair (left, right) of ints or None: (4, 4) for 4 to either side"),
    "scale-huge": ({"scale": 10**400}, "it must be finite"),
    "return_lse-text": ({"return_lse": "no"}, "return_lse is 'no'; it must be True or False"),
    "return_lse-1": ({"return_lse": 1}, "return_lse is 1; it must be True or False"),
    "return_lse-none": ({"return_lse": None}, "return_lse is None; it must be True or False"),
    "options-dict": ({"options": {"backend": "cpu"}}, "options is a dict; it must be a flashtile.Options"),
    "options-text": ({"options": "triton"}, "options is a str; it must be a flashtile.Options"),
    "backend-unknown": ({"options": Options(backend="cuda")}, "backend is 'cuda'; it must be one of"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan may be executed, unless the test warms up first."""

    def run(self: executor.Bound, tensors: Any) -> Any:
        raise AssertionError("a plan was executed")

    monkeypatch.setattr(executor.Bound, "run", run)


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    changed, message = CALLS[name]
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        flashtile.attention(**{**good(), **changed})


@pytest.mark.parametrize("name", CALLS)
def test_call_after_a_good_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was prepared for good arguments must not let bad ones pass that compare equal (True == 1)."""
    changed, message = CALLS[name]
    monkeypatch.setattr(executor.Bound, "run", lambda self, tensors: tensors.update(out=None, lse=None) or tensors)
    for warm in (
        {},
        {"causal": True, "scale": 1.0, "window": (3, 2), "return_lse": True},
        {"window": (0, 1), "score": (Scalars(1.0),)},
    ):
        flashtile.attention(**{**good(), **warm})
        with pytest.raises(InvalidProblem, match=re.escape(message)):
            flashtile.attention(**{**good(), **warm, **changed})


MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "softcap-0": (lambda: Softcap(0), "softcap is 0; it must be a positive finite number"),
    "softcap-negative": (lambda: Softcap(-1.0), "softcap is -1.0; it must be a positive"),
    "softcap-nan": (lambda: Softcap(math.nan), "softcap is nan; it must be a positive"),
    "softcap-inf": (lambda: Softcap(math.inf), "softcap is inf; it must be a positive"),
    "softcap-text": (lambda: Softcap("30"), "softcap is '30'; it must be a positive"),
    "softcap-bool": (lambda: Softcap(True), "softcap is True; it must be a positive"),
    "softcap-tensor": (lambda: Softcap(torch.ones(1)), "softcap is a Tensor; it must be a positive"),
    "softcap-learned": (lambda: Softcap(torch.ones((), requires_grad=True)), "softcap is a Tensor that requires a"),
    "alibi-list": (lambda: Alibi([0.5, 0.25]), "alibi slopes are a list; they must be a tensor"),
    "alibi-number": (lambda: Alibi(0.5), "alibi slopes are a float; they must be a tensor"),
    "alibi-numpy": (lambda: Alibi(np.ones(4)), "alibi slopes are a ndarray; they must be a tensor"),
    "alibi-rank": (lambda: Alibi(torch.ones(1, 2, 4)), "alibi slopes have shape (1, 2, 4); it must be (heads_q,) or"),
    "bias-list": (lambda: Bias([0.5]), "bias is a list; it must be a tensor"),
    "bias-rank": (lambda: Bias(torch.zeros(1, 1, 1, 1, 1)), "bias has shape (1, 1, 1, 1, 1); it must broadcast to (batch,"),
    "dropout-1": (lambda: Dropout(1), "dropout p is 1; it must be a number, at least 0 and below 1"),
    "dropout-almost-1": (lambda: Dropout(1 - 2**-40), "it must be a number, at least 0 and below 1"),
    "dropout-negative": (lambda: Dropout(-0.1), "dropout p is -0.1; it must be a number"),
    "dropout-nan": (lambda: Dropout(math.nan), "dropout p is nan; it must be a number"),
    "dropout-bool": (lambda: Dropout(False), "dropout p is False; it must be a number"),
    "dropout-text": (lambda: Dropout("0.1"), "dropout p is '0.1'; it must be a number"),
    "dropout-seed-float": (lambda: Dropout(0.1, 3.0), "dropout seed is 3.0; it must be an int, an int64 tensor (2,) or None"),
    "dropout-seed-bool": (lambda: Dropout(0.1, True), "dropout seed is True; it must be an int"),
    "dropout-seed-wide": (lambda: Dropout(0.1, 2**63), "dropout seed is 9223372036854775808; it must lie within 64 bits"),
    "band-text": (lambda: Band("3"), "Band left is '3'; it must be an int or None"),
    "band-float": (lambda: Band(right=0.0), "Band right is 0.0; it must be an int or None"),
    "band-bool": (lambda: Band(True), "Band left is True; it must be an int or None"),
    "band-nan": (lambda: Band(right=math.nan), "Band right is nan; it must be an int or None"),
    "band-wide": (lambda: Band(2**31), "Band left is 2147483648; it must lie within 32 bits"),
    "band-wide-below": (lambda: Band(right=-(2**31)), "Band right is -2147483648; it must lie within 32 bits"),
    "options-backend": (lambda: Options(backend=3), "backend is 3; it must be a backend's name or None"),
    "options-backward": (lambda: Options(backward="both"), "backward is 'both'; it must be one of auto, split, fused"),
    "options-backward-none": (lambda: Options(backward=None), "backward is None; it must be one of auto, split, fused"),
    "options-backward-list": (lambda: Options(backward=["split"]), "backward is ['split']; it must be one of"),
    "options-deterministic": (lambda: Options(deterministic="yes"), "deterministic is 'yes'; it must be True, False or None"),
    "options-deterministic-1": (lambda: Options(deterministic=1), "deterministic is 1; it must be True, False or None"),
    "options-deterministic-tensor": (lambda: Options(deterministic=torch.ones(2)), "it must be True, False or None"),
    "options-precision": (lambda: Options(precision="fp32"), "precision is 'fp32'; it must be one of tf32x3, ieee, tf32"),
}


@pytest.mark.parametrize("name", MADE)
def test_construction(name: str) -> None:
    make, message = MADE[name]
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        make()


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "batch-negative": ({"batch": -1}, "batch is -1; it must be at least 0"),
    "batch-float": ({"batch": 2.0}, "batch is 2.0; it must be an int"),
    "batch-bool": ({"batch": True}, "batch is True; it must be an int"),
    "batch-wide": ({"batch": 2**31}, "batch is 2147483648; it must be below 2**31"),
    "seqlen-text": ({"seqlen_k": "8"}, "seqlen_k is '8'; it must be an int"),
    "heads-0": ({"heads_kv": 0}, "heads_kv is 0; it must be at least 1"),
    "heads": ({"heads_q": 5}, "heads_q is 5 and heads_kv is 2; heads_q must be a multiple of heads_kv"),
    "head_dim-none": ({"head_dim": None}, "head_dim is None; it must be an int"),
    "dtype-text": ({"dtype": "fp16"}, "dtype is 'fp16'; it must be one of fp16, bf16, fp32, fp64"),
    "dtype-torch": ({"dtype": torch.float16}, "dtype is torch.float16; it must be one of"),
    "mask": ({"mask": None}, "mask is a NoneType; it must be a flashtile mask such as Band"),
    "score-list": ({"score": [ScoreSpec(Softcap, (3.0,))]}, "it must be a tuple of ScoreSpec"),
    "score-objects": ({"score": (Softcap(3.0),)}, "score is (Softcap(cap=3.0),); it must be a tuple of ScoreSpec"),
    "scale": ({"scale": "1"}, "scale is '1'; it must be a number"),
    "scale-nan": ({"scale": math.nan}, "scale is nan; it must be finite"),
    "precision": ({"precision": "high"}, "precision is 'high'; it must be one of tf32x3, ieee, tf32"),
    "deterministic": ({"deterministic": None}, "deterministic is None; it must be True or False"),
    "dropout": ({"dropout": 1.0}, "dropout p is 1.0; it must be a number, at least 0 and below 1"),
    "dropout-object": ({"dropout": Dropout(0.1)}, "dropout p is Dropout(p=0.1, seed=None); it must be a number"),
    "sink": ({"sink": (4,)}, "sink is (4,); it must be a TensorSpec or None"),
    "sink-shape": ({"sink": TensorSpec((3,), "fp32")}, "sink has shape (3,); it must be (heads_q,) = (4,)"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_problem(name: str) -> None:
    changed, message = FIELDS[name]
    fields = {
        "batch": 2, "seqlen_q": 6, "seqlen_k": 8, "heads_q": 4, "heads_kv": 2, "head_dim": 16, "head_dim_v": 16,
        "dtype": DType.FP16,
    }  # fmt: skip
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        AttentionProblem(**{**fields, **changed})


SPELLINGS = {
    "empty": ("", "it must be 'attention(q=...,kv=...,dtype,...)'"),
    "other-name": ("conv(q=1x2x3x4)", "it must be 'attention("),
    "unclosed": ("attention(q=2x6x4x16,kv=8x2x16,fp16", "it must be 'attention("),
    "nothing-inside": ("attention()", "spelling is 'attention()'"),
    "no-dtype": ("attention(q=2x6x4x16,kv=8x2x16)", "it lacks a dtype (fp16, bf16, fp32, fp64)."),
    "no-kv": ("attention(q=2x6x4x16,fp16)", "it lacks kv=SEQLENxHEADSxHEAD_DIM."),
    "three-of-four": ("attention(q=2x6x4,kv=8x2x16,fp16)", "'q=2x6x4' must be q=BATCHxSEQLENxHEADSxHEAD_DIM."),
    "no-number": ("attention(q=2x6x4x16,kv=8x2xd,fp16)", "'kv=8x2xd' must be kv=SEQLENxHEADSxHEAD_DIM."),
    "no-q": ("attention(kv=8x2x16)", "it lacks q=BATCHxSEQLENxHEADSxHEAD_DIM and a dtype (fp16, bf16, fp32, fp64)."),
    "dtype": ("attention(q=2x6x4x16,kv=8x2x16,fp8)", "'fp8' must be one of fp16, bf16, fp32, fp64, tf32x3, ieee, tf32, deter"),
    "unknown-part": ("attention(q=2x6x4x16,kv=8x2x16,fp16,tile=3)", "; 'tile=3' must be one of fp16, "),
    "twice": ("attention(q=2x6x4x16,kv=8x2x16,fp16,q=1x6x4x16)", "q appears twice"),
    "negative": ("attention(q=-2x6x4x16,kv=8x2x16,fp16)", "batch is -2; it must be at least 0"),
    "band": ("attention(q=2x6x4x16,kv=8x2x16,fp16,band=3)", "'band=3' must be band=LEFT:RIGHT, whole numbers or nothing."),
    "band-text": ("attention(q=2x6x4x16,kv=8x2x16,fp16,band=a:b)", "'band=a:b' must be band=LEFT:RIGHT"),
    "blocks": ("attention(q=2x6x4x16,kv=8x2x16,fp16,blocks=64)", "'blocks=64' must be blocks=QUERIESxKEYS."),
    "varlen": ("attention(q=2x6x4x16,kv=8x2x16,fp16,varlen=9)", "'varlen=9' must be varlen=TOTAL_QxTOTAL_K."),
    "used": ("attention(q=2x6x4x16,kv=8x2x16,fp16,used=v)", "'used=v' must be used=q, used=k or used=qk."),
    "scale": ("attention(q=2x6x4x16,kv=8x2x16,fp16,scale=big)", "'scale=big' must be scale=NUMBER."),
    "scale-inf": ("attention(q=2x6x4x16,kv=8x2x16,fp16,scale=inf)", "scale is inf; it must be finite"),
    "dropout": ("attention(q=2x6x4x16,kv=8x2x16,fp16,dropout=2)", "dropout p is 2.0; it must be a number"),
    "sink": ("attention(q=2x6x4x16,kv=8x2x16,fp16,sink=3:fp32)", "sink has shape (3,); it must be (heads_q,) = (4,)"),
    "sink-dtype": ("attention(q=2x6x4x16,kv=8x2x16,fp16,sink=fp32)", "'sink=fp32' must be sink=HEADS:DTYPE"),
    "score": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=hardcap(3.0))", "score modifier is 'hardcap'; known are"),
    "score-unopened": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=softcap)", "'softcap'; it must be 'name(...)'"),
    "score-unclosed": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=softcap(3.0)", "'softcap(3.0'; it must be 'name(...)'"),
    "score-rule": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=softcap(-1.0))", "softcap is -1.0; it must be a positive finite"),
    "score-none": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=softcap())", "softcap has 0 parameters; it must have one"),
    "score-two": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=softcap(1.0;2.0))", "softcap has 2 parameters; it must have one"),
    "score-text": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=softcap(high))", "'score=softcap(high)' must be score=NAME("),
    "score-scalar": (
        "attention(q=2x6x4x16,kv=8x2x16,fp16,score=alibi(1.0;2x4:fp32))",
        "Alibi has the parameters (1.0,); its class declares none",
    ),
    "tensor-shape": (
        "attention(q=2x6x4x16,kv=8x2x16,fp16,score=alibi(4:fp32))",
        "alibi's tensor has shape (4,); a captured tensor without `index` must be (batch, heads_q) = (2, 4)",
    ),
    "tensor-broadcast": (
        "attention(q=2x6x4x16,kv=8x2x16,fp16,score=bias(6x8:fp32))",
        "bias's tensor has shape (6, 8); it must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (2, 4, 6, 8)",
    ),
    "tensor-negative": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=alibi(-2x4:fp32))", "shape (-2, 4); its sizes must not be"),
    "tensor-dtype": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=alibi(2x4:fp64))", "alibi's tensor is fp64 and q is fp16"),
    "tensor-tail": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=alibi(2x4:fp32:yes))", "it must be 'shape:dtype' or"),
    "score-tensor": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=alibi())", "Alibi captures 0 tensors; its class declares 1"),
    "score-number": ("attention(q=2x6x4x16,kv=8x2x16,fp16,score=softcap(inf))", "Softcap has the parameter inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    text, message = SPELLINGS[name]
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        AttentionProblem.parse(text)


@pytest.mark.parametrize("text", [None, 3, b"attention()"])
def test_spelling_of_another_type(text: Any) -> None:
    with pytest.raises(InvalidProblem, match="it must be a str"):
        AttentionProblem.parse(text)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(513, 64), (64, 513), (1024, 1024)])
def test_head_dim_beyond_the_kernels(head_dim: int, head_dim_v: int) -> None:
    """It has a meaning, so every backend says why it cannot."""
    q, k, v = tensor(1, 6, 2, head_dim), tensor(1, 8, 2, head_dim), tensor(1, 8, 2, head_dim_v)
    with pytest.raises(NotSupported) as refusal:
        flashtile.attention(q, k, v)
    assert set(refusal.value.reasons) >= {"triton", "cpu"}
    name, value = ("head_dim", head_dim) if head_dim > 512 else ("head_dim_v", head_dim_v)
    text = str(refusal.value)
    assert text.startswith(f"no backend can run attention(q=1x6x2x{head_dim},")
    for backend in ("triton", "cpu"):
        assert f"  {backend}: {name} is {value}; supported up to 512" in text


@pytest.mark.parametrize("precision", ["tf32x3", "ieee", "tf32"])
def test_wide_heads_in_fp32_on_a_gpu(precision: str) -> None:
    problem = AttentionProblem.parse(f"attention(q=1x64x1x512,kv=64x1x64,fp32,{precision})")
    for variant in (None, "split", "fused"):
        with pytest.raises(NotSupported, match="fp32, whose operands are multiplied in parts, is supported up to 256"):
            dispatch.select(problem, named("sm90"), "triton", variant)


def test_a_backend_that_cannot() -> None:
    with pytest.raises(NotSupported, match="cpu: backward is 'fused'; the CPU has one backward") as refusal:
        flashtile.attention(**good(), options=Options(backend="cpu", backward="fused"))
    assert list(refusal.value.reasons) == ["cpu"]


def test_a_modifier_without_formulas() -> None:
    with pytest.raises(NotSupported) as refusal:
        flashtile.attention(**good(), score=(Formless(),))
    reasons = refusal.value.reasons
    assert "score modifier errors_formless has no `forward` and `backward`, its formula for kernels" in reasons["triton"]
    assert "score modifier errors_formless has no `apply`, its formula in PyTorch" in reasons["cpu"]


def test_errors_are_what_callers_expect() -> None:
    assert issubclass(InvalidProblem, ValueError)
    assert issubclass(NotSupported, NotImplementedError)
    refusal = NotSupported("this", {"one": ["a", "b"], "two": ["c"]})
    assert str(refusal) == "no backend can run this:\n  one: a\n  one: b\n  two: c"


@pytest.mark.gpu
def test_tensors_on_two_devices() -> None:
    given = good()
    with pytest.raises(InvalidProblem, match="k is on cpu and q is on cuda:0; q, k and v must be on one device"):
        flashtile.attention(given["q"].cuda(), given["k"], given["v"])


def test_a_refusal_reaches_another_process_whole() -> None:
    refusal = pickle.loads(pickle.dumps(flashtile.NotSupported("it", {"triton": ["a reason"]})))
    assert (refusal.request, refusal.reasons) == ("it", {"triton": ("a reason",)})
    assert str(refusal) == "no backend can run it:\n  triton: a reason"
