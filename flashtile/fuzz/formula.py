"""Attention by its definition, of a case's tensors: float64 for the truth, the case's own dtype for what plain PyTorch makes.

Nothing here is shared with what is judged but the bits that dropout keeps: masks, modifiers and items are written out anew.
All items are one batch, padded to the longest, so that a GPU is never waited for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashtile.fuzz.case import BIASES, Case
from flashtile.fuzz.make import BANDS, CHUNK, STEP, TORCH, Inputs, Tensors, as_held, offset_of, scale_of
from flashtile.torch.call.dropout import dropout_mask


@dataclass(frozen=True)
class Places:
    """Where each item's tokens lie: (items, most) indices of the flattened (slab, token), past its end where there is none."""

    index: torch.Tensor
    there: torch.Tensor
    total: int
    whole: bool  # every item has a slab of its own, and all of it

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """(items, most, heads, columns) of a tensor whose last axes are (heads, columns)."""
        if self.whole:
            return tensor
        flat = tensor.reshape(self.total, *tensor.shape[-2:])
        return torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))])[self.index]

    def put(self, items: torch.Tensor, empty: float) -> torch.Tensor:
        """The inverse, (total, ...): `empty` where no item has a token."""
        rest = items.shape[2:]
        if self.whole:
            return items.reshape(self.total, *rest)
        base = torch.full((self.total + 1, *rest), empty, dtype=items.dtype, device=items.device)
        return base.index_put((self.index.reshape(-1),), items.reshape(-1, *rest))[:-1]


def places(tokens: tuple[tuple[int, ...], ...], span: int, slabs: bool, device: torch.device) -> Places:
    total = span * (len(tokens) if slabs else 1)
    if slabs and tokens and all(len(found) == span for found in tokens):  # nothing to copy, which a GPU would be waited for
        index = torch.arange(total, device=device).view(len(tokens), span)
        return Places(index, torch.ones_like(index, dtype=torch.bool), total, True)
    most = max(map(len, tokens), default=0)
    rows = [
        [t + (item * span if slabs else 0) for t in found] + [total] * (most - len(found)) for item, found in enumerate(tokens)
    ]
    index = torch.tensor(rows, dtype=torch.long).view(len(tokens), most).to(device)
    return Places(index, index < total, total, False)


class Scene:
    """What both computations of a case share: where tokens lie and who sees whom."""

    def __init__(self, inputs: Inputs):
        c, n, device = inputs.case, inputs.lengths, inputs.device
        self.inputs, self.device = inputs, device
        slabs = not c.items
        self.queries, self.keys = (
            places(tokens, span, slabs, device) for tokens, span in ((n.tokens_q, c.seqlen_q), (n.tokens_k, c.seqlen_k))
        )
        counts_q, counts_k = (side.there.sum(1).view(-1, 1, 1, 1) for side in (self.queries, self.keys))
        self.row = torch.arange(self.queries.index.shape[1], device=device).view(-1, 1)
        self.key = torch.arange(self.keys.index.shape[1], device=device).view(1, -1)
        self.position = self.row + (counts_k - counts_q)  # (items, 1, rows, 1)
        self.keep = self.visible()
        self.sees, self.seen = self.keep.any(3), self.keep.any(2)
        self.undropped: torch.Tensor | None = None  # what is left of each probability
        if inputs.dropout is not None:
            kept = dropout_mask(inputs.dropout, c.batch, c.heads_q, len(self.row), self.key.shape[1], device=device)
            self.undropped = kept.double() / (1.0 - c.dropout)

    def visible(self) -> torch.Tensor:
        """Boolean (items, heads_q, rows, keys)."""
        c, w = self.inputs.case, self.inputs.where
        keep = self.queries.there[:, None, :, None] & self.keys.there[:, None, None, :]
        keep = keep & self.within(*c.bounds)
        rows, keys = self.row, self.key
        if "ids_q" in w:
            documents = (w["ids_q"][:, : len(rows), None] == w["ids_k"][:, None, : keys.shape[1]])[:, None]
        else:
            documents = keep
        if c.where in ("document", "padded-document"):
            keep = keep & documents
        first = keys < w["prefix"].view(-1, 1, 1, 1) if "prefix" in w else keep
        if c.where == "prefix":
            keep = keep & (first | (keys <= self.position))
        if c.where == "holes-documents":
            keep = keep & (documents | first)
        if "keep" in w:
            keep = keep & w["keep"][:, None, None, : keys.shape[1]]
        if c.where == "dilated":
            keep = keep & ((self.position - keys) % STEP == 0)
        if c.where == "chunks":
            keep = keep & (torch.div(self.position, CHUNK, rounding_mode="floor") == keys // CHUNK)
        if c.where == "tree":
            node = keys - (self.position - rows)  # of the item's last keys, which are its nodes
            upward = ancestors(w["parents"])[:, : len(rows)]
            here = node.clamp(0, upward.shape[2] - 1).expand(-1, -1, len(rows), -1)[:, 0]
            keep = keep & ((node < 0) | upward.gather(2, here)[:, None])
        if c.where == "top-left":
            keep = keep & (keys <= rows)
        if c.where == "bands":
            either = [self.within(band.left, band.right) for band in BANDS]
            keep = keep & (either[0] | either[1])
        if "stored" in w:
            keep = keep & self.cut(w["stored"])
        if "table" in w:
            size_q, size_k = c.block_size
            keep = keep & w["table"][:, :, rows[:, 0] // size_q][..., keys[0] // size_k]
        for i, name in enumerate(c.modifiers):
            if name in BIASES and c.kind == "masked":
                keep = keep & (self.cut(self.inputs.leaves[f"score.{i}"]) > -math.inf)
        return keep.expand(c.batch, c.heads_q, -1, -1)

    def within(self, left: int | None, right: int | None) -> torch.Tensor:
        behind = self.position - self.key
        keep = torch.ones_like(behind, dtype=torch.bool)
        if left is not None:
            keep = keep & (behind <= left)
        if right is not None:
            keep = keep & (-behind <= right)
        return keep

    def cut(self, bias: torch.Tensor) -> torch.Tensor:
        """A bias of as many queries and keys as the longest items have."""
        bias = bias[(None,) * (4 - bias.dim())]
        rows, keys = len(self.row), self.key.shape[1]
        return bias[:, :, : rows if bias.shape[2] > 1 else None, : keys if bias.shape[3] > 1 else None]


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """(items, nodes, nodes): row i is true at i and at all that it descends from; a parent comes before its child."""
    items, nodes = parents.shape
    made = torch.zeros((items, nodes + 1, nodes), dtype=torch.bool, device=parents.device)  # the last row: that of no parent
    index = torch.arange(items, device=parents.device)
    for node in range(nodes):
        made[:, node] = made[index, parents[:, node].long()]
        made[:, node, node] = True
    return made[:, :nodes]


def soil(inputs: Inputs, scene: Scene) -> None:
    """NaN wherever nobody may look: padding, and keys that no query sees."""
    c = inputs.case
    per_row = {"q": scene.sees.transpose(1, 2) if not c.sink else scene.queries.there[..., None].expand(-1, -1, c.heads_q)}
    seen = scene.seen.unflatten(1, (c.heads_kv, -1)).any(2).transpose(1, 2)
    if c.kind == "masked":  # what a bias hides is multiplied all the same
        seen = scene.keys.there[..., None].expand_as(seen)
        per_row["q"] = scene.queries.there[..., None].expand(-1, -1, c.heads_q)
    used = {"q": scene.queries.put(per_row["q"], 0.0)}
    if c.layout != "shared":
        used["k"] = used["v"] = scene.keys.put(seen, 0.0)
    for name, seen in used.items():
        tensor = inputs.leaves[name]
        tensor.masked_fill_(~seen.view(*tensor.shape[:-1], 1), math.nan)
    there = scene.queries.put(scene.queries.there[..., None], 0.0)
    dout = inputs.flows["dout"]
    if 0 not in dout.stride():
        dout.masked_fill_(~there.view(*dout.shape[:-2], 1, 1), math.nan)
    dlse = inputs.flows["dlse"]
    rows = there.view(dlse.shape[0], 1, dlse.shape[-1]) if dlse.dim() == 3 else there.view(1, -1)
    dlse.masked_fill_(~rows, math.nan)


def level(inputs: Inputs, scene: Scene) -> None:
    """Queries of zeros in float32 rows, and beside 8 bits, that see nothing but keys with a large negative bias.

    Some rows of these are computed in float64, where scores differ beside such a number, others in float32, where
    they do not: both are right, and of such queries the same.
    """
    c = inputs.case
    if c.kind != "masked" or (c.dtype != "fp32" and not c.eight) or c.value == -math.inf:
        return
    bias = scene.cut(inputs.leaves[f"score.{len(c.modifiers) - 1}"])
    spared = (scene.keep & (bias != as_held(c))).any(3).transpose(1, 2)
    kept = scene.queries.put(spared, 0.0)
    q = inputs.leaves["q"]
    q.masked_fill_(~kept.view(*q.shape[:-1], 1), 0.0)


def evaluate(
    inputs: Inputs, scene: Scene, dtype: torch.dtype, loss: torch.Tensor | None = None
) -> tuple[Tensors, torch.Tensor | None]:
    """(out, lse and gradients by name, what float32 loses of the scores of offset rows).

    dtype: float64 for the truth. loss: what that returned, for the other computation, which then leaves the offset out:
    softmax is the same without.
    """
    c, s, offset = inputs.case, scene, offset_of(inputs)
    truth = dtype == torch.float64
    leaves = {n: t.detach().to(dtype if n in "qkv" or truth else t.dtype).requires_grad_(n in inputs.wanted)
              for n, t in inputs.leaves.items()}  # fmt: skip
    wide = torch.float32 if c.kind in ("huge", "masked") and not truth else dtype  # whose scores fp16 cannot hold
    q = s.queries.take(leaves["q"]).transpose(1, 2).masked_fill(~s.sees[..., None], 0.0)
    k, v = (s.keys.take(leaves[n]).transpose(1, 2) for n in "kv")
    if c.eight:
        k, v = (times(t, scale_of(c, n, s.device), c) for n, t in (("k", k), ("v", v)))
    k, v = (t.repeat_interleave(c.heads_q // c.heads_kv, 1) for t in (k, v))
    k, v = k.masked_fill(~s.seen[..., None], 0.0), v.masked_fill(~s.seen[..., None], 0.0)
    scores = q.to(wide) @ k.to(wide).transpose(2, 3) * c.scale_value
    lost = None
    for i, name in enumerate(c.modifiers):
        if name.startswith("softcap"):
            cap = float(name.removeprefix("softcap"))
            scores = cap * (scores / cap).tanh()
        elif name in BIASES:
            bias = s.cut(leaves[f"score.{i}"])
            whole = None if offset is None or i < len(c.modifiers) - 1 else s.cut(offset)
            if truth and (whole is not None or c.kind == "masked"):  # as float32 holds the sum
                exact = scores.detach() + bias.detach()
                lost = torch.where(exact.isfinite(), exact.float().double() - exact, 0.0)
                scores = scores + bias + lost
            elif whole is not None and loss is not None:
                scores = scores + (bias.double() - whole).to(wide) + loss.to(wide)
            else:
                scores = scores + bias.to(wide)
        else:
            distance = (s.position - s.key).abs() if name.startswith("alibi") else s.row - s.key
            slopes = leaves[f"score.{i}"].to(wide)
            scores = scores - (slopes[None] if slopes.dim() == 1 else slopes)[..., None, None] * distance.to(wide)
        scores = scores.to(wide)
    scores = scores.masked_fill(~s.keep, -math.inf)
    keys = scores.shape[3]
    if c.sink:
        last = leaves["sink"].to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        p, lse = softmax(torch.cat([scores, last], -1))
        p, lse = p[..., :keys], lse.masked_fill(~s.queries.there[:, None], -math.inf)
    else:
        p, lse = softmax(scores.masked_fill(~s.sees[..., None], 0.0))
        p, lse = p.masked_fill(~s.keep, 0.0), lse.masked_fill(~s.sees, -math.inf)
    if s.undropped is not None:
        p = p * s.undropped.to(wide)
    out = (p.to(dtype) @ v).transpose(1, 2)
    out = s.queries.put(out, 0.0).view(*inputs.leaves["q"].shape[:-1], c.head_dim_v)
    lse = s.queries.put(lse.transpose(1, 2), -math.inf)
    lse = lse.transpose(0, 1) if c.items else lse.view(c.batch, c.seqlen_q, c.heads_q).transpose(1, 2)
    made: Tensors = {"out": out.detach()}
    if c.returns_lse:
        made["lse"] = lse.detach()
    flowing = [(out, inputs.flows["dout"])] * (c.upstream in ("both", "out", "alone"))
    flowing += [(lse, inputs.flows["dlse"])] * (c.upstream in ("both", "lse"))
    names = inputs.wanted
    flowing = [(tensor, flow) for tensor, flow in flowing if tensor.requires_grad]  # of v alone lse knows nothing
    if names and not flowing and c.upstream != "none":
        made |= {f"d{name}": torch.zeros_like(leaves[name]) for name in names}
    if names and flowing:
        outputs = [tensor for tensor, _ in flowing]
        arriving = [flow.to(tensor.dtype) for tensor, flow in flowing]
        given = torch.autograd.grad(outputs, [leaves[n] for n in names], arriving, allow_unused=True)
        for name, gradient in zip(names, given, strict=True):
            made[f"d{name}"] = torch.zeros_like(leaves[name]) if gradient is None else gradient
    return made, lost


def times(numbers: torch.Tensor, scale: torch.Tensor | None, c: Case) -> torch.Tensor:
    """(items, heads_kv, keys, columns) of 8 bits times their scale, in their own dtype."""
    if scale is None:
        return numbers
    wide = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    return (numbers.to(wide) * scale.to(wide).expand(c.batch, c.heads_kv)[:, :, None, None]).to(numbers.dtype)


def softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax, logarithm of its denominator): largest score and logarithm of the sum stay apart as long as possible."""
    if not scores.shape[-1]:
        return scores, scores.sum(-1)
    most = scores.detach().amax(-1, keepdim=True)
    powers = (scores - most).exp()
    total = powers.sum(-1, keepdim=True)
    return powers / total, (most + total.log())[..., 0]


def fused(inputs: Inputs, scene: Scene) -> Tensors:
    """What PyTorch's own attention makes of a float32 case on a CPU; empty where it has no such function.

    It is plain PyTorch, too: its largest errors are now the one's, now the other's. `Options(precision="ieee")` asks for more.
    """
    c, s = inputs.case, scene
    default = (c.dtype, c.precision, inputs.device.type) == ("fp32", "tf32x3", "cpu") and c.upstream in ("out", "alone")
    if not default or any((c.score, c.sink, c.dropout, c.where, c.holes)):
        return {}
    leaves = {name: inputs.leaves[name].detach().requires_grad_() for name in "qkv"}
    q, k, v = (side.take(leaf).transpose(1, 2) for side, leaf in zip((s.queries, s.keys, s.keys), leaves.values(), strict=True))
    k, v = (t.repeat_interleave(c.heads_q // c.heads_kv, 1) for t in (k, v))
    made: list[torch.Tensor] = []
    for item, keep in enumerate(s.keep[:, 0]):
        rows, keys = (span_of(keep.any(axis)) for axis in (1, 0))
        seen = keep[rows, keys]
        causal = not bool(seen.all())
        if causal and not (c.scale_value > 0 and torch.equal(seen, torch.ones_like(seen).tril())):  # its mask begins at the top
            return {}
        own_q, own_k, own_v = (t[item : item + 1, :, part] for t, part in ((q, rows), (k, keys), (v, keys)))
        out = torch.nn.functional.scaled_dot_product_attention(own_q, own_k, own_v, is_causal=causal, scale=c.scale_value)
        made.append(torch.nn.functional.pad(out, (0, 0, rows.start, q.shape[2] - rows.stop)))
    if not any(out.any() for out in made):
        return {}
    out = s.queries.put(torch.cat(made).transpose(1, 2), 0.0).view(*inputs.leaves["q"].shape[:-1], c.head_dim_v)
    names = inputs.wanted
    given = torch.autograd.grad(out, [leaves[name] for name in names], inputs.flows["dout"]) if names else ()
    return {"out": out.detach(), **{f"d{name}": gradient for name, gradient in zip(names, given, strict=True)}}


def span_of(there: torch.Tensor) -> slice:
    """From the first to the last that is there."""
    found = there.nonzero()
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)


def yardsticks(inputs: Inputs, scene: Scene) -> tuple[Tensors, Tensors]:
    """(the truth, what plain PyTorch makes of the same inputs in their own dtype)."""
    truth, lost = evaluate(inputs, scene, torch.float64)
    c = inputs.case
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = c.precision == "tf32"
    try:
        plain, _ = evaluate(inputs, scene, TORCH[c.dtype], lost)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return truth, plain
