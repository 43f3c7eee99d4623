"""PyTorch and JAX in one process hand each other tensors by DLPack, without a copy: both front ends give the same numbers.

`.venv/jax` (tools/setup.sh) holds the newest JAX for this Python, where nothing else sees it. For its kernels flashtile.jax
wants 0.11; here, on a CPU, it has none to launch. The process ends by `os._exit`, once all is compared: how the
two libraries' thread pools come down together is theirs ("terminate called without an active exception" was CI's, once).
"""

from __future__ import annotations

import pytest

from tests.test_imports import ROOT, fresh

JAX = ROOT / ".venv" / "jax"
pytestmark = pytest.mark.skipif(not (JAX / "jax").is_dir(), reason="there is no JAX beside PyTorch")

CODE = """
import os

import jax, jax.numpy as jnp, numpy as np, torch
import flashtile
from flashtile import jax as ours

jax.config.update("jax_platforms", "cpu")


def to_jax(tensor):
    array = jnp.from_dlpack(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr(), "JAX made a copy"
    return array


def to_torch(array):
    tensor = torch.from_dlpack(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer(), "PyTorch made a copy"
    return tensor


def same(array, tensor):
    assert array.shape == tuple(tensor.shape)
    assert array.dtype.name == str(tensor.dtype).removeprefix("torch.")
    assert np.array_equal(np.asarray(array.astype(jnp.float32)), tensor.float().numpy())


# -- there and back: dtypes, and layouts that are a permutation of dense ones ------------------------------------------------
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    dense = torch.randn(2, 37, 4, 16).to(dtype)
    for tensor in (dense, dense[1:], dense.transpose(1, 2), dense.permute(3, 0, 2, 1)):
        array = to_jax(tensor)
        same(array, tensor)
        back = to_torch(array)
        assert back.stride()[1:] == tensor.stride()[1:] and torch.equal(back, tensor)
for view in (dense[:, 1:], dense[..., ::2]):  # with gaps: JAX has no such arrays, and says so
    try:
        jnp.from_dlpack(view)
    except Exception as error:
        assert "compact" in str(error), error
    else:
        raise SystemExit("a view with gaps was taken")
try:
    jnp.from_dlpack(dense.clone().requires_grad_())
except BufferError:
    pass
else:
    raise SystemExit("a tensor that requires a gradient was taken")


# -- attention: what came from the other library against one's own, forward and backward -------------------------------------
def torch_side(q, k, v, dout):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = flashtile.attention(q, k, v, causal=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


@jax.jit
def jax_side(q, k, v, dout):
    out, pull = jax.vjp(lambda *t: ours.dot_product_attention(*t, is_causal=True), q, k, v)
    return out, *pull(dout)


for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    shapes = (2, 37, 4, 16), (2, 37, 2, 16), (2, 37, 2, 16), (2, 37, 4, 16)
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tensors[1] = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)  # strided
    arrays = [jax.device_put(t.float().numpy(), jax.devices()[0]) for t in tensors]
    arrays = [a.astype(str(dtype).removeprefix("torch.")) for a in arrays]
    by_torch, by_jax = torch_side(*tensors), jax_side(*arrays)
    for got, own in zip(torch_side(*map(to_torch, arrays)), by_torch, strict=True):
        assert torch.equal(got, own)
    for got, own in zip(jax_side(*map(to_jax, tensors)), by_jax, strict=True):
        assert np.array_equal(np.asarray(got), np.asarray(own))
    for name, one, other in zip(("out", "dq", "dk", "dv"), by_torch, map(to_torch, by_jax), strict=True):
        close = dict(rtol=tolerance, atol=tolerance * float(one.abs().max()))
        torch.testing.assert_close(other, one, msg=lambda text: f"{name}, {dtype}: {text}", **close)
print("all compared", flush=True)
os._exit(0)
"""


def test_tensors_of_one_library_are_attended_to_by_the_other() -> None:
    assert fresh(CODE, PYTHONPATH=f"{ROOT}:{JAX}") == "all compared\n"
