"""quantize: 16-bit q, k, v as e4m3 and scales, for `Options(precision="fp8")`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.kernels.device.available import unavailable
from flashtile.kernels.portable.quantize import QuantizeProblem, plan_quantize
from flashtile.memory import Memory
from flashtile.problem.number import told
from flashtile.problem.stored import LARGEST
from flashtile.torch.call.inputs import check_tensors
from flashtile.torch.call.lengths import Given, given_lengths
from flashtile.torch.call.rows import rows_of_items
from flashtile.torch.call.stored import check_kind, number_of
from flashtile.torch.execute.bound import DTYPES, Bound, device_of
from flashtile.torch.execute.plain import is_traced

METHODS = ("amax", "mean", "hadamard", "mean+hadamard")
LEAST_SCALE = 2.0**-100  # of rows of zeros; what it multiplies is then 0, too


class Quantized(NamedTuple):
    """q, k, v as float8_e4m3fn, in the shapes and order that they came in; a number is what is stored times its scale.

    An infinity, which e4m3 has not, is stored as NaN.

    q_scale: float32 (batch, heads_q); k_scale, v_scale: (batch, heads_kv). shift: None, or where the mean was taken from k,
    float32 as lse: what lse lacks, in units of q k^T. `lse` adds it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    shift: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, as `attention` takes them."""
        return self.q, self.k, self.v

    @property
    def scales(self) -> dict[str, Any]:
        """q_scale, k_scale and v_scale, as `attention` takes them by name."""
        return {"q_scale": self.q_scale, "k_scale": self.k_scale, "v_scale": self.v_scale}

    def lse(self, lse: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """The lse of scores with k's mean in them, of the one that `attention` returned under the same scale."""
        if self.shift is None:
            return lse
        return lse + self.shift * (1.0 / math.sqrt(self.q.shape[-1]) if scale is None else scale)

    def __reduce__(self) -> Any:
        """pickle and torch.save: pickle alone cannot read what it has written of a tensor of float8 (PyTorch 2.11)."""
        return _of_bytes, (*(t.view(torch.uint8) for t in self.tensors), *self[3:])


def _of_bytes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Quantized:
    """What `__reduce__` took apart."""
    return Quantized(*(t.view(torch.float8_e4m3fn) for t in (q, k, v)), *rest)


torch.serialization.add_safe_globals([_of_bytes])  # torch.load reads it also where it takes nothing but weights


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, method: str = "amax", **lengths: Any) -> Quantized:
    """A `Quantized` of fp16 or bf16 q, k, v: e4m3 and scales, each head of each item over its largest magnitude.

    q: (batch, seqlen_q, heads_q, head_dim), k, v: (batch, seqlen_k, heads_kv, head_dim), or with cu_seqlens_q packed, as
        `attention_varlen` has them.
    method: "amax"; "mean": k less its mean over an item's keys, which softmax does not see, for keys with an offset (lse then
        lacks `shift`; not beside a sink or a modifier that does more than add, such as Softcap); "hadamard": q and k times the
        Hadamard matrix over the square root of head_dim, a power of 2, for single outliers; "mean+hadamard": both.
    lengths: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: tokens that do not count decide no scale.

    `attention(*z.tensors, **z.scales, options=Options(precision="fp8"))` computes with it. No gradient: 16-bit q, k, v that go
    into `attention` with these options have one, straight through. Raises InvalidProblem.
    """
    if method not in METHODS:
        raise InvalidProblem(f"method is {told(method)}; it must be one of {', '.join(METHODS)}.")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_kind(name, tensor)
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise InvalidProblem(f"{name} is {tensor.dtype}; it must be float16 or bfloat16.")
    unknown = lengths.keys() - {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"}
    if unknown:
        raise InvalidProblem(f"quantize has no argument {sorted(unknown)[0]!r}.")
    given = given_lengths(**lengths)
    varlen = given is not None and given.varlen
    with torch.no_grad():
        q, k, v = (t[None] if varlen else t for t in (q, k, v))
        check_tensors(q, k, v, given)
        if given is not None:
            given.check(q)
        mean = None
        if "mean" in method:
            mean = _mean(k, given)
        if "hadamard" in method:
            turn = _hadamard(q.shape[3], q.device)
            q, k = q.float() @ turn, k.float() @ turn
            mean = None if mean is None else mean @ turn
        (q, q_scale), (k, k_scale), (v, v_scale) = (
            quantised(t, given, side, less) for t, side, less in ((q, "q", None), (k, "k", mean), (v, "k", None))
        )
        shift = None
        if mean is not None:
            item = rows_of_items(q, given, "q")[0]
            wide = number_of(q, q_scale[item], torch.float32)
            per_head = mean.repeat_interleave(q.shape[2] // k.shape[2], 1)[item]
            shift = (wide * per_head).sum(-1).transpose(1, 2).contiguous()
        if varlen:
            q, k, v, shift = q[0], k[0], v[0], None if shift is None else shift[0]
    return Quantized(q, k, v, q_scale, k_scale, v_scale, shift)


def quantised(
    x: torch.Tensor, given: Given | None, side: str, mean: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, float32 scales (items, heads)) of (slabs, span, heads, head_dim): a head's largest finite magnitude is 448.

    mean: (items, heads, head_dim), which is taken from it first.
    """
    if x.device.type == "cuda" and x.numel() and not is_traced(x):
        return quantised_by_kernel(x, given, side, mean)
    item, counts = rows_of_items(x, given, side)
    wide = x.float() if mean is None else x.float() - mean[item]
    size = wide.abs().where(wide.isfinite(), 0.0)
    size = size.amax(3) if x.shape[3] else size.sum(3)
    if counts is not None:
        size = size.where(counts[..., None], 0.0)
    items, heads = (x.shape[0] if given is None else given.batch(x)), x.shape[2]
    top = size.new_zeros(items, heads)
    if items:
        top = top.scatter_reduce(0, item.reshape(-1, 1).expand(-1, heads), size.flatten(0, 1), "amax")
    scale = (top / LARGEST["e4m3"]).where(top > 0, 1.0).clamp(min=LEAST_SCALE)
    if not items:
        return torch.zeros_like(x, dtype=torch.float8_e4m3fn), scale
    wide = wide.where(wide.isfinite(), torch.nan)  # e4m3 has no infinity
    return (wide / scale[item][..., None]).to(torch.float8_e4m3fn), scale


def quantised_by_kernel(
    x: torch.Tensor, given: Given | None, side: str, mean: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantised`, by kernels. Raises NotSupported where Triton is not there, or the GPU is too old."""
    device, tensors = device_of(x.device), {"x": x}
    if reasons := unavailable(device, "arithmetic"):
        raise NotSupported("quantize", {"triton": reasons})
    if given is not None and given.tensors:
        item, counts = rows_of_items(x, given, side)
        item = item if counts is None else item.where(counts, -1)
        tensors["item"] = item.expand(x.shape[:2]).to(torch.int32)
    if mean is not None:
        tensors["mean"] = mean.contiguous()
    items = x.shape[0] if given is None else given.batch(x)
    key = (x.device, x.dtype, items, *((name, t.shape, t.stride(), t.data_ptr() & 15) for name, t in tensors.items()))
    bound = _QUANTIZED.get(key)
    if bound is None:
        problem = QuantizeProblem(*x.shape, DTYPES[x.dtype].value, items, "item" in tensors, mean is not None)
        bound = _QUANTIZED[key] = Bound(plan_quantize(problem, device), tensors, x.device)
    made = bound.run(tensors)
    return made["y"].view(torch.float8_e4m3fn), made["scale"]


_QUANTIZED = Memory[Any, Bound](1024, "calls of quantize")


def _mean(k: torch.Tensor, given: Given | None) -> torch.Tensor:
    """(items, heads_kv, head_dim): of the keys that count."""
    if (given is None or not given.tensors) and k.shape[1]:
        return k.mean(1, dtype=torch.float32)
    item, counts = rows_of_items(k, given, "k")
    wide = k.float() if counts is None else k.float().masked_fill(~counts[..., None, None], 0.0)
    items = k.shape[0] if given is None else given.batch(k)
    total = wide.new_zeros(items, *k.shape[2:])
    count = wide.new_zeros(items)
    if items:
        total.index_add_(0, item.flatten(), wide.flatten(0, 1))
        ones = torch.ones_like(item, dtype=torch.float32) if counts is None else counts.float()
        count.index_add_(0, item.flatten(), ones.flatten())
    return total / count.clamp(min=1.0)[:, None, None]


def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthogonal matrix of +1 and -1, over the square root of its size."""
    if size & (size - 1):
        raise InvalidProblem(f"head_dim is {size} and method has 'hadamard'; head_dim must be a power of 2.")
    made = torch.ones(1, 1, device=device)
    while made.shape[0] < size:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made / math.sqrt(size)
