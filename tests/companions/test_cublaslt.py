"""Products with epilogues: how cuBLASLt is asked, held against PyTorch by a library of its names that computes on the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flashtile.kernels.ops import cublaslt
from flashtile.kernels.ops.catalogue import OPS
from flashtile.kernels.ops.dense import APART, DENSE
from flashtile.plan.call import HostCall, KernelCall, Plan, Pointer
from flashtile.plan.device import A100, B200, H100, Device
from flashtile.plan.op import Op, plan_backward, plan_forward
from flashtile.problem.op import Companion
from flashtile.torch.execute.bound import TORCH_DTYPES, Bound
from flashtile.triton_glue import language as _triton

COMPILER = shutil.which("cc")
needs_a_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the library with")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("cublaslt") / "libcublaslt.so"
    source = Path(__file__).with_name("libcublaslt.c")
    subprocess.run([str(COMPILER), "-O1", "-shared", "-fPIC", str(source), "-o", str(path), "-lm"], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def product(built: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`_product` as on a GPU, by that library; holds the epilogues asked for."""
    asked: list[int] = []

    def on_the_host(epilogue: int, left: Any, right: Any, vector: Any, other: Any) -> Any:
        (left, left_transposed), (right, right_transposed) = cublaslt._dense(left), cublaslt._dense(right)
        out = left.new_full((left.shape[0], right.shape[1]), torch.nan)
        sizes = (right.shape[1], left.shape[0], left.shape[1])
        found = cublaslt._find((0, *sizes, right_transposed, left_transposed, epilogue, 14, len(asked) % 2 == 0))
        assert found is not None
        found.run(right, left, out, vector, other, torch.empty(found.workspace_bytes, dtype=torch.uint8), 0)
        asked.append(epilogue)
        return out

    monkeypatch.setattr(cublaslt, "library", lambda: built)
    monkeypatch.setattr(cublaslt, "_product", on_the_host)
    monkeypatch.setattr(cublaslt, "_handles", {})
    monkeypatch.setattr(cublaslt, "_found", {})
    return asked


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


def plainly(function: Any, *given: Any) -> Any:
    """What PyTorch makes of it, in float64."""
    found = function(*(t if t is None else t.double() for t in given))
    return found if isinstance(found, tuple) else (found,)


@needs_a_compiler
@pytest.mark.parametrize("biased", [True, False])
def test_gelu_and_what_it_was_taken_of(product: list[int], biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = random(5, 16), random(24, 16), random(48)[::2] if biased else None
    made = cublaslt.activated(*given)
    assert product == [cublaslt.GELU_OF_BIASED if biased else cublaslt.GELU]
    monkeypatch.setattr(cublaslt, "_product", lambda *_: None)
    for mine, exact in zip(made, plainly(cublaslt.activated, *given), strict=True):
        assert_close(mine.double(), exact, rtol=8e-3, atol=1e-3)


@needs_a_compiler
@pytest.mark.parametrize("transposed", [False, True])
def test_times_the_derivative(product: list[int], transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left = random(16, 5).t() if transposed else random(5, 32)[:, ::2]  # one is copied first
    given = left, random(16, 24), random(24, 5).t()
    made = cublaslt.times_derivative(*given)
    assert product == [cublaslt.GELU_DERIVATIVE]
    monkeypatch.setattr(cublaslt, "_product", lambda *_: None)
    assert_close(made.double(), *plainly(cublaslt.times_derivative, *given), rtol=8e-3, atol=1e-3)


@needs_a_compiler
@pytest.mark.parametrize("transposed", [False, True])
def test_with_sums(product: list[int], transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = random(16, 24).t() if transposed else random(24, 16), random(16, 8)
    made = cublaslt.with_sums(*given)
    assert product == [cublaslt.SUMS_OF_LEFT]
    monkeypatch.setattr(cublaslt, "_product", lambda *_: None)
    for mine, exact in zip(made, plainly(cublaslt.with_sums, *given), strict=True):
        assert_close(mine.double(), exact, rtol=8e-3, atol=1e-3)


@needs_a_compiler
def test_a_size_is_looked_up_once_and_what_is_not_known_is_said(product: list[int], built: Any) -> None:
    for _ in range(2):
        cublaslt.with_sums(random(8, 8), random(8, 8))
        cublaslt.with_sums(random(8, 8), random(8, 8))
    assert len(cublaslt._found) == 2  # by alignment
    assert cublaslt._find((0, 8, 8, 8, False, False, cublaslt.SUMS_OF_LEFT, 2, True)) is None
    with pytest.raises(RuntimeError, match=r"cublasLtMatmulDescSetAttribute of cuBLASLt says 7"):
        next(iter(cublaslt._found.values())).describe(99, ctypes.c_int(0))  # type: ignore[union-attr]


@needs_a_compiler
def test_what_is_forgotten_is_given_back(product: list[int], built: Any) -> None:
    cublaslt._found.clear()
    before = ctypes.c_int.in_dll(built, "destroyed").value
    cublaslt.with_sums(random(8, 8), random(8, 8))
    assert ctypes.c_int.in_dll(built, "destroyed").value == before
    cublaslt._found.clear()
    assert ctypes.c_int.in_dll(built, "destroyed").value == before + 4  # a product, and its three matrices


MLP = "dense(x=64x32:{0},weight1={1}x32:{0},bias1={1}:{0},weight2=16x{1}:{0},bias2=16:{0}{2})"


@pytest.mark.parametrize(
    ("dtype", "hidden", "options", "fused"),
    [
        ("bf16", 48, "", True),
        ("fp16", 48, "", True),
        ("fp32", 48, "", False),
        ("bf16", 44, "", False),
        ("bf16", 48, ";activation='relu'", False),
        ("bf16", 48, ";recompute=True", False),
    ],
)
def test_which_plans_are_products_alone(dtype: str, hidden: int, options: str, fused: bool) -> None:
    problem = Companion.parse(MLP.format(dtype, hidden, options))
    forward = plan_forward(OPS["dense"], problem, H100, "triton", keeps=True)
    backward = plan_backward(OPS["dense"], problem, H100, "triton", frozenset(problem.tensors), frozenset({"out"}))
    assert all(isinstance(call, HostCall) for call in backward.calls) == fused
    assert all(isinstance(call, HostCall) for call in forward.calls) == (fused or "recompute" in options)


def test_nothing_is_compiled_ahead_of_products_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_forward(OPS["dense"], Companion.parse(MLP.format("bf16", 48, "")), H100, "triton", keeps=True)
    given = {b.name: torch.empty(b.shape, dtype=TORCH_DTYPES[b.dtype]) for b in plan.named("input")}
    monkeypatch.setattr(_triton, "side_by_side", None)
    Bound(plan, given, torch.device("cpu")).compile_ahead(given)


LARGE = "dense(x={0}x{1}:bf16,weight1={2}x{1}:bf16,bias1={2}:bf16,weight2={3}x{2}:bf16,bias2={3}:bf16{4})"
EVERY = ("x", "weight1", "bias1", "weight2", "bias2")


def names(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    """The kernels and host steps of a plan, by name, with what host steps make."""
    return [
        (call.kernel.fn.__name__, ()) if isinstance(call, KernelCall) else (call.function.__name__, call.outputs)
        for call in plan.calls
    ]


def forward_of(spelling: str, device: Device, keeps: bool = True) -> list[tuple[str, tuple[str, ...]]]:
    return names(plan_forward(OPS["dense"], Companion.parse(spelling), device, "triton", keeps))


def backward_of(spelling: str, device: Device, wanted: tuple[str, ...] = EVERY) -> list[tuple[str, tuple[str, ...]]]:
    problem = Companion.parse(spelling)
    return names(plan_backward(OPS["dense"], problem, device, "triton", frozenset(wanted), frozenset({"out"})))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("options", ["", ";recompute=True"])
def test_a_large_forward_on_hopper_has_its_own_product(keeps: bool, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    spelling = LARGE.format(8192, 2048, 8192, 2048, options)
    assert forward_of(spelling, H100, keeps) == [("product", ()), ("second_product", ("out",))]


@pytest.mark.parametrize(
    ("wanted", "kernels", "made"),
    [
        (EVERY, ("product", "sum_columns"), ("dx", "dweight1", "dweight2", "dbias2")),
        (("x", "weight2"), ("product",), ("dx", "dweight2")),
        (("bias1",), ("product", "sum_columns"), ()),
        (("weight2", "bias2"), (), ("dweight2", "dbias2")),
    ],
)
def test_a_large_backward_on_hopper_has_its_own_product(
    wanted: tuple[str, ...], kernels: tuple[str, ...], made: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    products = [("fused_gradients", made)] if made else []
    assert backward_of(LARGE.format(8192, 4096, 8192, 4096, ""), H100, wanted) == [*((k, ()) for k in kernels), *products]


def test_less_deep_a_backward_has_it_for_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    for depth, without in ((1024, ["fused_gradients"]), (2048, ["product", "fused_gradients"])):
        given = LARGE.format(8192, depth, 8192, depth, "")
        assert [name for name, _ in backward_of(given, H100)] == ["product", "sum_columns", "fused_gradients"]
        assert [name for name, _ in backward_of(given, H100, ("x", "weight1"))] == without


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        (A100, (8192, 4096, 8192, 4096)),
        (B200, (8192, 4096, 8192, 4096)),
        (H100, (8192, 4096, 8192, 512)),  # few steps a tile
        (H100, (1024, 4096, 8192, 4096)),  # few tiles
        (H100, (2304, 4096, 8192, 4096)),  # 576 tiles, in the fifth round 48 of 132
    ],
)
def test_others_are_cublaslts(device: Device, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    given = LARGE.format(*sizes, "")
    assert backward_of(given, device) == [("fused_gradients", ("dx", "dweight1", "dbias1", "dweight2", "dbias2"))]
    narrow = LARGE.format(sizes[0], sizes[3], *sizes[2:], "")  # x as wide as dout
    assert forward_of(narrow, device) == [("activated_product", ("act", "pre")), ("second_product", ("out",))]


@pytest.mark.parametrize("options", [";recompute=True", ";activation='relu'"])
def test_other_options_have_a_pass_of_their_own(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    made = [name for name, _ in backward_of(LARGE.format(8192, 2048, 8192, 2048, options), H100)]
    assert made == ["outer_gradients", "dense_backward", "sum_columns", "inner_gradients"]


SMALL = "dense(x=64x32:{0},weight1=48x32:{0},bias1=48:{0}{1})"
PLANNED = [SMALL.format(dtype, kind) for dtype in ("bf16", "fp32") for kind in ("", ";activation='relu'")]
PLANNED += [MLP.format(dtype, 48, options) for dtype in ("bf16", "fp32") for options in ("", ";recompute=True")]
PLANNED += [LARGE.format(8192, 4096, 8192, 4096, ""), MLP.format("fp16", 48, ";activation='sqrelu'")]


@pytest.mark.parametrize("spelling", PLANNED)
@pytest.mark.parametrize("op", [DENSE, APART], ids=["dense", "apart"])
@pytest.mark.parametrize("device", [A100, H100], ids=["a100", "h100"])
def test_a_backward_reads_what_was_kept(spelling: str, op: Op, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wanted: its host steps run on tensors without memory, kernels find all their buffers."""
    pytest.importorskip("triton")
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    problem = Companion.parse(spelling)
    given = [name for name, _ in problem.given]
    for wanted in (some for count in range(1, len(given) + 1) for some in combinations(given, count)):
        plan = plan_backward(op, problem, device, "triton", frozenset(wanted), frozenset({"out"}))
        here = {b.name: torch.empty(b.shape, dtype=TORCH_DTYPES[b.dtype], device="meta") for b in plan.buffers}
        made = {b.name for b in plan.named("output")}
        known = {name: tensor for name, tensor in here.items() if name not in made}
        for call in plan.calls:
            if isinstance(call, HostCall):
                found = call.function(problem, known, call.outputs)
                assert {name: tensor.shape for name, tensor in found.items()} == {n: here[n].shape for n in call.outputs}
            else:
                assert {pointer.name for pointer in pointers(call.args)} <= here.keys()


def pointers(args: Any) -> Iterator[Pointer]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from pointers(arg)
        elif isinstance(arg, Pointer):
            yield arg
