"""The companions' machine code, compiled without a GPU: 16-byte accesses, few spills or none, within shared memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compile.conftest import NEWEST, Compiled
from tests.compile.covering import covering, some_whole

triton = pytest.importorskip("triton", reason="Triton is not installed")

WITH_NEWEST = pytest.mark.skipif(not NEWEST.is_dir(), reason="tools/setup.sh could not install the newest Triton")

# spelling -> most bytes of spill per thread in any of its kernels
NORMS = {
    "norm(x=8192x1024:bf16,weight=1024:bf16;kind='rms')": 4,  # an address that waits for the end of the loop
    **{f"norm(x=8192x{n}:bf16,weight={n}:bf16;kind='rms')": 0 for n in (4096, 16384, 65536)},
    **{f"norm(x=8192x{n}:bf16,weight={n}:bf16,bias={n}:bf16)": 0 for n in (2048, 8192, 16384, 65536)},
    "norm(x=8192x4096:bf16,residual=8192x4096:bf16,weight=4096:bf16,bias=4096:bf16,seed=1:int64;dropout_p=0.1;prenorm=True)": 0,
}
ENTROPIES = {
    "cross_entropy(logits=8192x131072:bf16,labels=8192:int64)": 0,
    "cross_entropy(logits=8192x131072:bf16,labels=8192:int64;reduction='mean';eager_gradient=True)": 0,
    "cross_entropy(logits=8192x50257:bf16,labels=8192:int64;reduction='mean';eager_gradient=True)": 0,
    "cross_entropy(logits=4096x262144:bf16,labels=4096:int64;reduction='mean';eager_gradient=True)": 0,
    "cross_entropy(logits=8192x32000:fp32,labels=8192:int64;smoothing=0.1;z_loss=0.0001)": 16,
    "cross_entropy(logits=4096x262144:bf16,labels=4096:int64;reduction='mean';softcap=30.0;eager_gradient=True)": 0,
    "cross_entropy(logits=8192x131072:bf16,labels=8192:int64;softcap=30.0)": 0,
    "cross_entropy(logits=8192x50257:bf16,labels=8192:int64,weight=50257:fp32;reduction='mean';eager_gradient=True)": 0,
    "cross_entropy(logits=8192x32000:fp32,labels=8192:int64,weight=32000:fp32;reduction='mean';smoothing=0.1;z_loss=0.0001;"
    "softcap=30.0;eager_gradient=True)": 0,
}
OTHERS = {
    "rotary(q=2x8192x32x128:bf16,k=2x8192x8x128:bf16,cos=8192x64:fp32,sin=8192x64:fp32)": 0,
    "rotary(q=2x8192x32x128:bf16,k=2x8192x8x128:bf16,cos=8192x64:fp32,sin=8192x64:fp32;interleaved=True)": 0,
    "softmax(x=4x16x2048x2048:bf16,mask=4x16x2048x2048:bool;scale=0.5)": 0,
    "softmax(x=4x16x2048x2048:bf16,mask=4x16x2048x2048:bool;masked_score=-10000.0)": 0,
    "softmax(x=1x16x4096x4096:bf16;causal=True)": 0,
    "dense(x=8192x4096:bf16,weight1=16384x4096:bf16,bias1=16384:bf16,weight2=4096x16384:bf16;recompute=True)": 0,
}
SPELLINGS = {**NORMS, **ENTROPIES, **OTHERS}

# likewise: every option, and sizes of 1, which Triton compiles as constants: the interpreter takes more than the compiler
EDGES = {
    "norm(x=1x64:bf16,weight=64:bf16,bias=64:bf16)": 0,
    "norm(x=1x1:fp32,residual=1x1:fp32,x1=1x1:fp32,weight=1:fp32,weight1=1:fp32,bias1=1:fp32,seed=1:int64;dropout_p=0.9;"
    "prenorm=True)": 0,
    "norm(x=9x40000:bf16,residual=9x40000:fp32,weight=40000:bf16,bias=40000:fp32,rowscale=9:fp32,colscale=40000:bf16,seed=1:int64;"
    "dropout_p=0.25;scale=0.5;prenorm=True)": 420,
    "norm(x=5x12:fp32,residual=8x12:fp32,weight=12:fp32,bias=12:fp32,colscale=12:fp32,x_subset=8:int32,out_subset=8:int64,"
    "seed=1:int64;dropout_p=0.2;scale=1.25;prenorm=True;out_rows=3)": 0,
    "norm(x=8192x16384:fp32,weight=16384:fp32,bias=16384:fp32;prenorm=True)": 76,
    "cross_entropy(logits=1x5:bf16,labels=1:int32)": 0,
    "cross_entropy(logits=1x1:bf16,labels=1:int32;reduction='mean';eager_gradient=True)": 0,
    "cross_entropy(logits=7x1003:fp32,labels=7:int64;smoothing=0.2;shard=True;first_class=16;classes=4000)": 0,
    "cross_entropy(logits=1x1:bf16,labels=1:int32,weight=1:fp16;reduction='sum';smoothing=0.1;softcap=1.0;"
    "eager_gradient=True)": 0,
    "cross_entropy(logits=8192x32000:bf16,labels=8192:int64,weight=32000:bf16;reduction='mean';smoothing=0.1;z_loss=0.0001;"
    "softcap=30.0)": 0,
    "cross_entropy(logits=7x103:fp32,labels=7:int64,weight=4000:bf16;smoothing=0.2;softcap=2.0;shard=True;first_class=16;"
    "classes=4000)": 0,
    "rotary(q=1x1x1x64:bf16,cos=1x32:bf16,sin=1x32:bf16)": 0,
    "rotary(q=2x9x3x80:fp32,cos=40x5:fp32,sin=40x5:fp32,positions=2x9:int32)": 0,
    "rotary(q=2x9x3x80:fp32,k=2x9x1x80:fp32,cos=40x5:fp32,sin=40x5:fp32,positions=2x9:int32;interleaved=True)": 0,
    "softmax(x=1x1x1x8:bf16;causal=True)": 0,
    "softmax(x=1x1x2x17000:fp32,mask=1x1x2x17000:uint8;masked_score=-10000.0)": 252,
    "dense(x=1x1:bf16,weight1=1x1:bf16,bias1=1:bf16)": 0,
    "dense(x=7x8:fp32,weight1=24x8:fp32,weight2=5x24:fp32;activation='sqrelu';recompute=True)": 0,
}


def traits(spelling: str) -> set[str]:
    """Of an op: each tensor; each option and odd length by dtype; whether a row is short, long or too long for registers."""
    op, tensors, options = re.fullmatch(r"(\w+)\(([^;]*);?(.*)\)", spelling).groups()  # pyright: ignore[reportOptionalMemberAccess]
    width = int(re.search(r"x(\d+):", tensors)[1])  # pyright: ignore[reportOptionalSubscript]
    dtype = re.findall(r":(\w+)", tensors)[0]
    choices = (f"{dtype} {option}" for option in (*options.split(";"), width % 16))
    return {f"{op} {word}" for word in (*re.findall(r"(\w+)=", tensors), *choices, (width > 2048) + (width > 16384))}


FEW = covering(SPELLINGS, traits)


@pytest.mark.parametrize("spelling", some_whole(SPELLINGS, FEW))
def test_hopper_code(compiled: Compiled, spelling: str, whole: bool) -> None:
    some = [one for one in SPELLINGS if (one in FEW) != whole]
    found = [f for f in compiled("companion_code.py", "sm90", "--accesses", *some) if f["spelling"] == spelling]
    assert len(found) >= 2
    for kernel in found:
        assert kernel["fits"], kernel
        assert kernel["spill_bytes"] <= SPELLINGS[spelling], kernel
        assert not kernel["idle_barriers"], kernel
        assert kernel["wide_loads"] or kernel["kernel"] == "product", kernel  # that one's loads are the bulk copy engine's


@pytest.mark.parametrize("first", some_whole(range(6), [0]))
@pytest.mark.parametrize(("target", "shift"), [("sm80", 0), ("sm86", 1), ("gfx942", 2)])
def test_other_architectures_compile(compiled: Compiled, target: str, shift: int, first: int) -> None:
    some = list(SPELLINGS)[(first + shift) % 6 :: 6]  # others on each
    for kernel in compiled("companion_code.py", target, *some):
        assert kernel["fits"], kernel


@WITH_NEWEST
def test_they_compile_under_the_newest_triton(compiled: Compiled) -> None:
    for kernel in compiled("companion_code.py", "sm90", *list(SPELLINGS)[::3], packages=NEWEST):
        assert kernel["fits"], kernel


def test_every_option_compiles(compiled: Compiled) -> None:
    for kernel in compiled("companion_code.py", "sm90", *EDGES):
        assert kernel["fits"], kernel
        assert kernel["spill_bytes"] <= EDGES[kernel["spelling"]], kernel


PRODUCTS = [
    f"dense(x=8192x2048:{dtype},weight1=8192x2048:{dtype},bias1=8192:{dtype},weight2=2048x8192:{dtype})"
    for dtype in ("bf16", "fp16")
]


@pytest.mark.parametrize("packages", [None, pytest.param(NEWEST, marks=WITH_NEWEST)], ids=["pinned", "newest"])
def test_the_product_on_hopper(compiled: Compiled, packages: Path | None) -> None:
    """Its accumulator stays in registers, and no step waits for its own product."""
    some = PRODUCTS if packages is None else PRODUCTS[:1]  # the newest Triton: of one dtype
    found = compiled("companion_code.py", "sm90", "--accesses", *some, packages=packages)
    assert [kernel["kernel"] for kernel in found] == ["product", "product", "sum_columns"] * len(some)
    for kernel in (kernel for kernel in found if kernel["kernel"] == "product"):
        assert kernel["fits"], kernel
        assert kernel["registers"] <= 168, kernel  # three warpgroups
        assert not kernel["serialised"], kernel
        assert not kernel["spill_bytes"], kernel
        steps = [loop for loop in kernel["loops"] if loop["waits"] == 1]  # the loop around one waits for its last product, too
        assert len(steps) == 2, kernel
        assert all(loop["products"] == 4 for loop in steps), kernel
