"""The tensors of a case, the same on every device, and the call that they go into."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch

from flashtile.features.masks.chunked import Chunked
from flashtile.features.masks.dilated import Dilated
from flashtile.features.masks.document import Document
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.features.masks.prefix import Prefix
from flashtile.features.masks.stored import Stored
from flashtile.features.masks.top_left import TopLeft
from flashtile.features.masks.tree import Tree
from flashtile.features.scores.alibi import Alibi
from flashtile.features.scores.bias import Bias
from flashtile.features.scores.relative import Relative
from flashtile.features.scores.softcap import Softcap
from flashtile.fuzz.case import BIASES, SLOPES, Case, Lengths
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import Band
from flashtile.problem.options import Options
from flashtile.torch.api.attention import attention
from flashtile.torch.api.blocks import Blocks
from flashtile.torch.api.layouts import attention_kvpacked, attention_qkvpacked, attention_varlen

Tensors = dict[str, torch.Tensor]
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
POOL = 4_194_301  # normal numbers that all cases take theirs from; a prime, so that no two axes repeat alike
MARGIN = 256  # elements of NaN before and behind every input
LARGE = 1e8  # offsets from here on leave nothing of an ordinary score in float32
STORED = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
OF_INT8 = 30.0  # numbers of about 1 in int8, whose scales are about 1 / 30
HUGE = 2.0**9  # of q and k, whose scores are then up to 10^6


@cache
def pool(device: torch.device) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(POOL, generator=torch.Generator().manual_seed(54)).to(device)


def normal(shape: tuple[int, ...], key: str, device: torch.device) -> torch.Tensor:
    """float32 numbers that the key decides about."""
    count, numbers = prod(shape), pool(device)
    first = zlib.crc32(key.encode()) % POOL
    pieces, left = [numbers[first : first + count]], count - min(count, POOL - first)
    while left > 0:
        pieces.append(numbers[:left])
        left -= POOL
    return torch.cat(pieces).view(shape) if len(pieces) > 1 else pieces[0].view(shape).clone()


def chance(shape: tuple[int, ...], p: float, key: str, device: torch.device) -> torch.Tensor:
    """Booleans that are true with this chance."""
    limit = torch.special.ndtri(torch.tensor(p, dtype=torch.float64)).item() if 0 < p < 1 else (9.0 if p else -9.0)
    return normal(shape, key, device) < limit


@dataclass
class Inputs:
    """What a case is made of. `leaves`: q, k, v, sink and score.N, whose gradients are judged; `flows`: dout and dlse."""

    case: Case
    device: torch.device
    lengths: Lengths
    leaves: Tensors = field(default_factory=dict)
    flows: Tensors = field(default_factory=dict)
    where: Tensors = field(default_factory=dict)  # what masks hold
    whole: Tensors = field(default_factory=dict)  # packed tensors, by the parts' joined names

    @property
    def wanted(self) -> list[str]:
        """The leaves that want a gradient."""
        fixed = tuple(word for word in self.case.fixed.split("+") if word)
        names = [n for n in self.leaves if n in self.case.wants or n not in ("q", "k", "v")]
        return [] if self.case.upstream == "none" else [n for n in names if not (fixed and n.startswith(fixed))]

    @property
    def dropout(self) -> Dropout | None:
        return Dropout(self.case.dropout, seed=zlib.crc32(str(self.case.seed).encode()) << 20) if self.case.dropout else None


def build(case: Case, device: torch.device) -> Inputs:
    """All tensors of a case; NaN where nobody may look, if it is `dirty`, is spread by `soil`."""
    made, c = Inputs(case, device, case.lengths()), case
    slabs = () if c.items else (c.batch,)
    shapes = {
        "q": (*slabs, c.seqlen_q, c.heads_q, c.head_dim),
        "k": (*slabs, c.seqlen_k, c.heads_kv, c.head_dim),
        "v": (*slabs, c.seqlen_k, c.heads_kv, c.head_dim_v),
        "dout": (*slabs, c.seqlen_q, c.heads_q, c.head_dim_v),
    }
    values = {name: normal(shape, f"{c.seed}-{name}", device) for name, shape in shapes.items()}
    _stress(c, values)
    values = {name: value.to(TORCH[c.dtype]) for name, value in values.items()}
    if c.eight:  # numbers that 8 bits hold
        values |= {n: stored(c, values[n] * (OF_INT8 if c.eight == "int8" else 1.0)).to(TORCH[c.dtype]) for n in "kv"}
    if c.layout == "shared" and not c.items and c.batch:
        values |= {n: values[n][:1].expand(values[n].shape) for n in "kv"}
    made.flows["dout"] = lay(
        values.pop("dout"), {"odd": "constant", "packed": "bshd", "kvpacked": "bhsd"}.get(c.layout, c.layout)
    )
    made.flows["dlse"] = normal((*slabs, c.heads_q, c.seqlen_q), f"{c.seed}-dlse", device)
    if c.layout == "packed":
        if c.heads_q == c.heads_kv:
            qkv = torch.stack([values[n] for n in "qkv"], -3)
            parts = qkv.unbind(-3)
        else:
            qkv = torch.cat([values[n] for n in "qkv"], -2)
            parts = qkv.split([c.heads_q, c.heads_kv, c.heads_kv], -2)
        made.whole["qkv"], values = qkv, dict(zip("qkv", parts, strict=True))
    elif c.layout == "kvpacked":
        kv = torch.stack([values[n] for n in "kv"], -3)
        made.whole["kv"] = kv
        values |= dict(zip("kv", kv.unbind(-3), strict=True))
        values["q"] = lay(values["q"], "bshd")
    else:
        values = {
            name: value if name != "q" and c.layout == "shared" else lay(value, c.layout) for name, value in values.items()
        }
    made.leaves |= values
    if c.sink:
        made.leaves["sink"] = normal((c.heads_q,), f"{c.seed}-sink", device).mul(2.0).to(TORCH[c.sink])
    for i, name in enumerate(c.modifiers):
        shape = captured_shape(c, name)
        if shape is not None:
            made.leaves[f"score.{i}"] = _captured(c, i, name, shape, device)
    made.where |= where_of(c, device)
    return made


def stored(c: Case, numbers: torch.Tensor) -> torch.Tensor:
    """Numbers in 8 bits; NaN is the largest of int8."""
    if c.eight == "int8":
        numbers = numbers.nan_to_num(127.0).round().clamp(-127, 127)
    return numbers.to(STORED[c.eight])


def scale_of(c: Case, side: str, device: torch.device) -> torch.Tensor | None:
    """What the stored numbers of k or v are multiplied by: float32 (), (heads_kv,) or (batch, heads_kv); None is 1."""
    dice = random.Random(f"{c.seed}-{side}-scale")
    shape = dice.choice((None, (), (c.heads_kv,), (c.batch, c.heads_kv)))
    if c.eight == "int8" and shape is None:
        shape = ()
    unit = 1.0 / OF_INT8 if c.eight == "int8" else 1.0
    return None if shape is None else normal(shape, f"{c.seed}-{side}-scale", device).abs().add(0.5).mul(unit)


def _stress(c: Case, values: Tensors) -> None:
    """Values other than normal ones, in place."""
    exact = c.kind == "huge" or (c.kind == "offset" and abs(c.value) < LARGE)
    if exact:  # integers, so that float32 holds every score exactly
        for name in "qk":
            values[name].round_().clamp_(-2, 2)
    if c.kind == "huge":
        for name in "qk":
            values[name].clamp_(-1, 1).mul_(HUGE)
    elif c.kind == "peaked":
        values["q"].mul_(8.0)
    elif c.kind == "mean":
        values["v"].add_(8.0)
    elif c.kind == "channel" and values["k"].numel():
        values["k"][..., 0] = 8.0
    elif c.kind == "equal" or (c.kind == "offset" and not exact and c.dtype == "fp32"):
        values["q"].mul_(0.0)  # some rows of float32 inputs are computed in float64, which loses nothing beside an offset


def captured_shape(c: Case, name: str) -> tuple[int, ...] | None:
    """The shape of a modifier's tensor; None if it has none."""
    if name in SLOPES:
        return (c.batch, c.heads_q)[2 - len(SLOPES[name]) :]
    if name not in BIASES:
        return None
    axes = BIASES[name]
    sizes = dict(zip("bhqk", (c.batch, c.heads_q, c.seqlen_q, c.seqlen_k), strict=True))
    first = min(map("bhqk".index, axes), default=4)  # leading axes that it lacks altogether
    return tuple(sizes[axis] if axis in axes else 1 for axis in "bhqk"[first:])


def _captured(c: Case, index: int, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A modifier's tensor."""
    key = f"{c.seed}-score.{index}"
    if name in SLOPES:
        slopes = normal(shape, key, device).abs().mul(0.25)
        slopes = slopes.mul(16.0).round().div(16.0) if c.kind == "offset" else slopes
        return slopes.to(TORCH[c.score_dtype])
    dtype = TORCH[c.score_dtype]
    bias = normal(shape, key, device).mul(0.5)
    last = index == len(c.modifiers) - 1
    if c.kind == "offset" and last:
        bias = torch.where(_offset_rows(c, bias), as_held(c), bias)
    elif c.kind == "masked" and last:
        bias = torch.where(chance(tuple(bias.shape), 0.3, f"{key}-masked", device), as_held(c), bias)
    bias = bias.to(dtype)
    return lay(bias, c.layout) if bias.dim() >= 3 and c.layout in ("bhsd", "gaps", "odd") else bias


def as_held(c: Case) -> float:
    """The number of `data` as the bias's dtype holds it."""
    most = torch.finfo(TORCH[c.score_dtype]).max
    if c.kind == "masked" and c.value == -float("inf"):
        return c.value
    return float(torch.tensor(max(-most, min(most, c.value)), dtype=torch.float64).to(TORCH[c.score_dtype]))


def _offset_rows(c: Case, bias: torch.Tensor) -> torch.Tensor:
    """Which elements of the bias have the large number: whole rows of scores."""
    if bias.dim() < 2 or bias.shape[-2] == 1:
        return torch.ones_like(bias, dtype=torch.bool)
    rows = chance(
        (*bias.shape[:-1], 1), random.Random(f"{c.seed}-share").choice((0.1, 0.5, 1.0)), f"{c.seed}-rows", bias.device
    )
    return rows.expand(bias.shape)


def offset_of(inputs: Inputs) -> torch.Tensor | None:
    """What whole rows are offset by, broadcasting against scores, float64; None where nothing is."""
    c = inputs.case
    if c.kind != "offset":
        return None
    bias = inputs.leaves[f"score.{len(c.modifiers) - 1}"].double()
    return torch.where(bias == as_held(c), bias, 0.0)


def lay(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory order, beside NaN. gaps: NaN between elements too; odd: rows an odd distance apart."""
    if tensor.dim() < 2:
        return tensor
    if layout == "constant":  # as sum().backward() gives it
        return tensor[(slice(0, 1),) * tensor.dim()].reshape(()).expand(tensor.shape) if tensor.numel() else tensor
    if layout == "gaps":
        wide = torch.full([2 * n + 1 for n in tensor.shape], float("nan"), dtype=tensor.dtype, device=tensor.device)
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)
    order = list(range(tensor.dim()))
    if layout == "bhsd":
        order[-3], order[-2] = order[-2], order[-3]
    sizes = [tensor.shape[i] for i in order]
    padded = [*sizes[:-1], sizes[-1] + (layout == "odd")]
    flat = torch.full((prod(padded) + 2 * MARGIN + 1,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    first = MARGIN + (layout == "odd")
    view = (
        flat[first : first + prod(padded)].view(padded)[..., : sizes[-1]].permute([order.index(i) for i in range(len(order))])
    )
    return view.copy_(tensor)


# -- masks ----------------------------------------------------------------------------------------------------------


def where_of(c: Case, device: torch.device) -> Tensors:
    """The tensors of what masks beside the band."""
    made: Tensors = {}
    spans = {"q": max(c.seqlen_q, 1), "k": max(c.seqlen_k, 1)}
    if "document" in c.where:
        for side, n in spans.items():
            starts = chance((c.batch, n), 0.1, f"{c.seed}-ids-{side}", device)
            made[f"ids_{side}"] = (starts.cumsum(1) % 3).to(torch.int32)
    if "holes" in c.where or "padded" in c.where:
        made["keep"] = chance((c.batch, spans["k"]), 0.6, f"{c.seed}-keep", device)
    if "prefix" in c.where or c.where == "holes-documents":
        dice = random.Random(f"{c.seed}-prefix")
        lengths = [dice.randint(0, min(spans["k"], 3 * 11)) for _ in range(c.batch)]
        made["prefix"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if c.where.startswith("stored"):
        heads, rows = {"stored": (1, c.seqlen_q), "stored-heads": (c.heads_q, c.seqlen_q), "stored-keys": (1, 1)}[c.where]
        made["stored"] = chance((c.batch, heads, rows, c.seqlen_k), 0.6, f"{c.seed}-stored", device)
    if c.where == "tree":
        dice = random.Random(f"{c.seed}-tree")
        parents = [[dice.choice((row - 1, dice.randint(-1, row - 1))) for row in range(spans["q"])] for _ in range(c.batch)]
        made["parents"] = torch.tensor(parents, dtype=torch.int32, device=device).view(c.batch, spans["q"])
    if c.where == "table":
        rows, columns = c.block_size
        shape = (c.batch, c.heads_q, -(-c.seqlen_q // rows), -(-c.seqlen_k // columns))
        made["table"] = chance(shape, 0.5, f"{c.seed}-table", device)
    return made


BANDS = (Band(left=4, right=0), Band(left=-20, right=30))
STEP = 3
CHUNK = 20


def mask_of(inputs: Inputs) -> Any:
    """The mask of the call beside the band; None where there is none."""
    c, w = inputs.case, inputs.where
    if not c.where:
        return None
    if c.where == "table":
        return Blocks.from_block_mask(w["table"], c.seqlen_q, c.seqlen_k, block_size=c.block_size)
    made: dict[str, Callable[[], Any]] = {
        "document": lambda: Document(w["ids_q"], w["ids_k"]),
        "padded-document": lambda: Document(w["ids_q"], w["ids_k"]),
        "holes": lambda: KeyPadding(w["keep"]),
        "prefix": lambda: Prefix(w["prefix"]) | Band(right=0),
        "dilated": lambda: Dilated(STEP),
        "chunks": lambda: Chunked(CHUNK),
        "top-left": lambda: TopLeft(),
        "bands": lambda: BANDS[0] | BANDS[1],
        "tree": lambda: Tree(w["parents"]),
        "holes-documents": lambda: KeyPadding(w["keep"]) & (Document(w["ids_q"], w["ids_k"]) | Prefix(w["prefix"])),
    }
    mask = Stored(w["stored"]) if "stored" in w else made[c.where]()
    if c.blocks:
        heads = c.heads_q if c.where == "stored-heads" else 1
        batch = c.batch if w else 1
        mask = Blocks.build(
            mask, c.seqlen_q, c.seqlen_k, batch=batch, heads=heads, block_size=c.block_size, device=inputs.device
        )
    if c.where.startswith("padded"):
        mask = mask.padded(w["keep"]) if isinstance(mask, Blocks) else mask & KeyPadding(w["keep"])
    return mask


# -- the call -------------------------------------------------------------------------------------------------------


def modifier_of(name: str, tensor: torch.Tensor | None) -> Any:
    """The library's object for a modifier's name."""
    if name.startswith("softcap"):
        return Softcap(float(name.removeprefix("softcap")))
    kind: Any = Bias if name in BIASES else Alibi if name.startswith("alibi") else Relative
    return kind(tensor)


def arguments(inputs: Inputs, leaves: Tensors, backend: str = "") -> dict[str, Any]:
    """What a call takes by name beside q, k, v and lengths."""
    c = inputs.case
    asked = c.mask_arguments()
    mask = mask_of(inputs)
    if mask is not None:
        asked["mask"] = mask & asked["mask"] if "mask" in asked else mask
    if c.modifiers:
        asked["score"] = tuple(modifier_of(name, leaves.get(f"score.{i}")) for i, name in enumerate(c.modifiers))
    if c.scale == c.scale:
        asked["scale"] = c.scale
    if c.sink:
        asked["sink"] = leaves["sink"]
    if c.dropout:
        asked["dropout"] = inputs.dropout
    how: dict[str, Any] = {name: getattr(c, name) for name in ("backward", "precision", "delta")}
    how["deterministic"] = c.deterministic or None
    asked["options"] = Options(backend=backend or c.backend or None, **how)
    asked["return_lse"] = c.returns_lse
    return asked


def call(inputs: Inputs, backend: str = "") -> tuple[torch.Tensor, torch.Tensor | None, Tensors]:
    """(out, lse or None, the leaves that gradients are asked of) of flashtile; `backend` in the place of the case's."""
    c = inputs.case
    leaves = {n: t.detach().requires_grad_(n in inputs.wanted) for n, t in inputs.leaves.items()}
    asked = arguments(inputs, leaves, backend)
    lengths = lengths_of(inputs)
    if c.eight:
        leaves |= {n: stored(c, leaves[n]) for n in "kv"}
        scales = {f"{n}_scale": scale_of(c, n, inputs.device) for n in "kv"}
        asked |= {name: scale for name, scale in scales.items() if scale is not None}
    if c.layout == "packed":
        qkv = inputs.whole["qkv"].detach().requires_grad_(bool(inputs.wanted))
        given = {name.removesuffix("_q"): t for name, t in lengths.items() if name.endswith("_q")}
        grouped = {} if c.heads_q == c.heads_kv else {"heads_q": c.heads_q}
        made, leaves = attention_qkvpacked(qkv, **grouped, **given, **asked), _instead(leaves, {"qkv": qkv})
    elif c.layout == "kvpacked":
        kv = inputs.whole["kv"].detach().requires_grad_("k" in inputs.wanted or "v" in inputs.wanted)
        made, leaves = attention_kvpacked(leaves["q"], kv, **lengths, **asked), _instead(leaves, {"kv": kv})
    else:
        function: Any = attention_varlen if c.items else attention
        made = function(leaves["q"], leaves["k"], leaves["v"], **lengths, **asked)
    out, lse = made if c.returns_lse else (made, None)
    return out, lse, leaves


def _instead(leaves: Tensors, packed: Tensors) -> Tensors:
    """Packed leaves in the place of their parts."""
    parts = "".join(packed)
    return {**packed, **{name: leaf for name, leaf in leaves.items() if name not in parts}}


def apart(c: Case, name: str, gradient: torch.Tensor) -> Tensors:
    """The parts of a packed tensor's gradient by their names; of another tensor its own."""
    if name == "qkv" and c.heads_q != c.heads_kv:
        return dict(zip("qkv", gradient.split([c.heads_q, c.heads_kv, c.heads_kv], -2), strict=True))
    return dict(zip(name, gradient.unbind(-3), strict=True)) if name in ("qkv", "kv") else {name: gradient}


def lengths_of(inputs: Inputs) -> Tensors:
    """The tensors of lengths by their arguments' names."""
    n, c, device, made = inputs.lengths, inputs.case, inputs.device, dict[str, torch.Tensor]()
    for side, span in (("q", c.seqlen_q), ("k", c.seqlen_k)):
        cu, used, tokens = getattr(n, f"cu_{side}"), getattr(n, f"used_{side}"), getattr(n, f"tokens_{side}")
        if cu is not None and not (side == "k" and c.items == "self"):
            made[f"cu_seqlens_{side}"] = torch.tensor(cu, dtype=torch.int32, device=device)
        if used is not None and c.holes:
            keep = torch.zeros((c.batch, span), dtype=torch.bool)
            for item, places in enumerate(tokens):
                keep[item, list(places)] = True
            made[f"seqused_{side}"] = keep.to(device)
        elif used is not None:
            made[f"seqused_{side}"] = torch.tensor(used, dtype=torch.int32, device=device)
    return made
