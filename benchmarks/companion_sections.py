"""The cells of `companions.py`, by section: our ops beside torch.compile of the plain formula and Liger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.companion_cells import BF16, Cell, Entrant, both, normal
from flashtile import ops

try:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    HAS_LIGER = True
except ImportError:
    HAS_LIGER = False

# -- norms ----------------------------------------------------------------------------------------------------------------

NORM_SHAPES = ((8192, 16384), (4096, 65536), (131072, 1024), (32768, 1024), (65536, 2048), (32768, 4096), (16384, 8192))


def norms() -> Iterator[Cell]:
    for rows, hidden in NORM_SHAPES:
        x, residual = (normal(rows, hidden, grad=True) for _ in range(2))
        weight, bias = (normal(hidden, grad=True) for _ in range(2))
        n, case = 2.0 * rows * hidden, f"{rows}x{hidden}"

        def layer(x: Any, w: Any, b: Any, hidden: int = hidden) -> Any:
            return F.layer_norm(x, (hidden,), w, b, 1e-6)

        def rms(x: Any, w: Any, hidden: int = hidden) -> Any:
            return F.rms_norm(x, (hidden,), w, 1e-6)

        def add_rms(x: Any, r: Any, w: Any, hidden: int = hidden) -> Any:
            return F.rms_norm(x + r, (hidden,), w, 1e-6), x + r

        found: dict[str, Callable[..., Any]] = {
            "flashtile": lambda x, w, b: ops.layer_norm(x, w, b, 1e-6), "compiled": torch.compile(layer, dynamic=False),
        }  # fmt: skip
        if HAS_LIGER:
            found["liger"] = lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-6)
        yield from both("norm", f"layer_norm {case}", found, (x, weight, bias), (2 * n, 3 * n), layer)
        found = {"flashtile": lambda x, w: ops.rms_norm(x, w, eps=1e-6), "compiled": torch.compile(rms, dynamic=False)}
        if HAS_LIGER:
            found["liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False, None)
        yield from both("norm", f"rms_norm {case}", found, (x, weight), (2 * n, 3 * n), rms)
        if hidden > 16384:
            continue
        found = {
            "flashtile": lambda x, r, w: ops.rms_norm(x, w, eps=1e-6, residual=r, prenorm=True),
            "compiled": torch.compile(add_rms, dynamic=False),
        }
        if HAS_LIGER:
            found["liger"] = lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)
        yield from both("norm", f"add_rms_norm {case}", found, (x, residual, weight), (4 * n, 4 * n), add_rms)
        yield from dropped(x, residual, weight, bias, n, case)


def dropped(x: Any, residual: Any, weight: Any, bias: Any, n: float, case: str) -> Iterator[Cell]:
    """Dropout, addition and LayerNorm in one; torch.compile draws other numbers, so that the check is of ours alone."""
    dropout = ops.Dropout.draw(0.1, x.device)
    mask = dropout.mask(x.shape)

    def compiled(x: Any, r: Any, w: Any, b: Any) -> Any:
        h = F.dropout(x, 0.1, True) + r
        return F.layer_norm(h, (h.shape[-1],), w, b, 1e-6), h

    def exact(x: Any, r: Any, w: Any, b: Any) -> Any:
        h = x * mask / 0.9 + r
        return F.layer_norm(h, (h.shape[-1],), w, b, 1e-6), h

    def ours(x: Any, r: Any, w: Any, b: Any) -> Any:
        return ops.layer_norm(x, w, b, 1e-6, residual=r, prenorm=True, dropout=dropout)

    found = {"flashtile": ours, "compiled": torch.compile(compiled, dynamic=False)}
    cells = both("norm", f"dropout_add_layer_norm {case}", found, (x, residual, weight, bias), (4 * n, 5 * n), exact)
    for cell in cells:
        make = cell.entrants

        def unchecked(make: Any = make, cell: Cell = cell) -> dict[str, Entrant]:
            found = make()
            truth = cell.exact
            found["compiled"].made = truth
            return found

        cell.entrants = unchecked
        yield cell


# -- cross-entropy --------------------------------------------------------------------------------------------------------


def cross_entropies() -> Iterator[Cell]:
    for rows, classes in ((8192, 131072), (4096, 262144), (8192, 50257), (8192, 32768), (32768, 32768)):
        x, labels = normal(rows, classes, grad=True), torch.randint(classes, (rows,), device="cuda")
        n, case = 2.0 * rows * classes, f"{rows}x{classes}"

        def plain(x: Any, labels: Any) -> Any:
            return F.cross_entropy(x.float(), labels)

        def exact(x: Any, labels: Any) -> Any:
            return F.cross_entropy(x, labels)

        found = {"flashtile": ops.cross_entropy, "compiled": torch.compile(plain, dynamic=False)}
        yield from rows_in_steps("loss", case, found, x, labels, n, exact, False)
        if HAS_LIGER:  # writes the gradient over the logits: not checked after the first call
            found["liger/inplace"] = lambda x, labels: LigerCrossEntropyFunction.apply(
                x, labels, None, -100, 0.0, 0.0, "mean", None
            )[0]
        yield from rows_in_steps("train", case, found, x, labels, 2 * n, exact, True)


def rows_in_steps(
    what: str, case: str, functions: dict[str, Callable[..., Any]], x: Any, labels: Any, size: float, exact: Any, train: bool
) -> Iterator[Cell]:
    """A cell of the loss, or of loss and gradient; the truth is computed a few rows at a time."""
    rows = x.shape[0]
    step = max(1, 2**28 // x.shape[1])

    def truth() -> tuple[torch.Tensor, ...]:
        losses, grads = [], []
        for first in range(0, rows, step):
            part = x[first : first + step].detach().float().requires_grad_()
            loss = exact(part, labels[first : first + step]) * (len(part) / rows)
            losses.append(loss.detach())
            if train:
                grads.append(torch.autograd.grad(loss, part)[0].to(BF16))
        return (torch.stack(losses).sum(), torch.cat(grads)) if train else (torch.stack(losses).sum(),)

    def entrants() -> dict[str, Entrant]:
        def entrant(name: str, function: Callable[..., Any]) -> Entrant:
            def call() -> tuple[torch.Tensor, ...]:
                if not train:
                    return (function(x.detach(), labels),)
                loss = function(x, labels)
                return loss.detach(), torch.autograd.grad(loss, x)[0]

            def on_a_copy() -> tuple[torch.Tensor, ...]:
                copy = x.detach().clone().requires_grad_()
                loss = function(copy, labels)
                return loss.detach(), torch.autograd.grad(loss, copy)[0]

            return Entrant(call, on_a_copy if name.endswith("inplace") else None)

        return {name: entrant(name, function) for name, function in functions.items()}

    yield Cell("ce", f"cross_entropy {case}", what, entrants, truth, size, memory=train)


# -- rotary, softmax, head ------------------------------------------------------------------------------------------------


def rotaries() -> Iterator[Cell]:
    batch, seqlen, heads, heads_kv, dim = 2, 8192, 32, 8, 128
    angle = torch.arange(seqlen, device="cuda")[:, None] / 10000 ** (torch.arange(0, dim, 2, device="cuda") / dim)
    cos, sin = angle.cos(), angle.sin()
    q, k = normal(batch, seqlen, heads, dim, grad=True), normal(batch, seqlen, heads_kv, dim, grad=True)
    size = 4.0 * (q.numel() + k.numel()) + 8.0 * cos.numel()
    for interleaved in (False, True):
        torch.compiler.reset()  # torch 2.11 takes the second `plain` for the first, and turns it the other way

        def turn(x: Any, interleaved: bool = interleaved) -> Any:
            c, s = cos[None, :, None], sin[None, :, None]
            first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            both = first * c - second * s, first * s + second * c
            return (torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)).to(x.dtype)

        def plain(q: Any, k: Any, turn: Any = turn) -> Any:
            return turn(q), turn(k)

        def ours(q: Any, k: Any, interleaved: bool = interleaved) -> Any:
            return ops.rotary(q, k, cos, sin, interleaved=interleaved)

        def over(q: Any, k: Any, interleaved: bool = interleaved) -> Any:
            with torch.no_grad():
                return ops.rotary(q, k, cos, sin, interleaved=interleaved, inplace=True)

        found = {"flashtile": ours, "compiled": torch.compile(plain, dynamic=False)}
        case = f"{'interleaved' if interleaved else 'neox'} {batch}x{seqlen} {heads}/{heads_kv}x{dim}"
        forward, backward = both("rotary", case, found, (q, k), (size, size), plain)
        make = forward.entrants

        def in_place(make: Any = make, over: Any = over, interleaved: bool = interleaved) -> dict[str, Entrant]:
            """Those that write over q and k turn copies, again and again: checked on fresh ones."""
            found, copies = make(), [t.detach().clone() for t in (q, k)]
            fresh = Entrant(lambda: over(*copies), lambda: over(q.detach().clone(), k.detach().clone()))
            found["flashtile/inplace"] = fresh
            if HAS_LIGER and not interleaved:
                c2, s2 = (torch.cat((t, t), -1)[None].to(BF16) for t in (cos, sin))

                def liger(q: Any, k: Any) -> Any:
                    made = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), c2, s2)
                    return tuple(t.transpose(1, 2) for t in made)

                found["liger/inplace"] = Entrant(lambda: liger(*copies), lambda: liger(q.detach().clone(), k.detach().clone()))
            return found

        forward.entrants = in_place
        yield forward
        yield backward


def softmaxes() -> Iterator[Cell]:
    for batch, heads, length in ((4, 16, 2048), (1, 16, 4096)):
        x = normal(batch, heads, length, length, grad=True)
        mask = torch.rand(batch, 1, length, length, device="cuda") < 0.2
        above = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        n, case = 2.0 * x.numel(), f"{batch}x{heads}x{length}"

        def masked(x: Any, mask: Any = mask) -> Any:
            return torch.softmax((x.float() * 0.5).masked_fill(mask, -10000.0), -1).to(x.dtype)

        def causal(x: Any, above: Any = above) -> Any:
            return torch.softmax((x.float() * 0.5).masked_fill(above, -torch.inf), -1).to(x.dtype)

        def ours_masked(x: Any, mask: Any = mask) -> Any:
            return ops.softmax(x, mask, scale=0.5, masked_score=-10000.0)

        found = {"flashtile": ours_masked, "compiled": torch.compile(masked, dynamic=False)}
        yield from both("softmax", f"masked {case}", found, (x,), (2 * n + mask.numel(), 3 * n), masked)
        found = {
            "flashtile": lambda x: ops.softmax(x, scale=0.5, causal=True),
            "compiled": torch.compile(causal, dynamic=False),
        }
        yield from both("softmax", f"causal {case}", found, (x,), (1.5 * n, 2 * n), causal)


def heads() -> Iterator[Cell]:
    rows, hidden, classes = 8192, 4096, 128256
    x, weight = normal(rows, hidden, grad=True, scale=0.1), normal(classes, hidden, grad=True, scale=0.02)
    labels = torch.randint(classes, (rows,), device="cuda")

    def plain(x: Any, weight: Any) -> Any:
        return F.cross_entropy(F.linear(x, weight).float(), labels)

    def step(function: Callable[..., Any]) -> Entrant:
        def call() -> tuple[torch.Tensor, ...]:
            loss = function(x, weight)
            return loss.detach(), *torch.autograd.grad(loss, (x, weight))

        return Entrant(call)

    def exact() -> tuple[torch.Tensor, ...]:
        wide, losses, dx = weight.detach().float(), [], []
        dweight = torch.zeros_like(wide)
        for first in range(0, rows, 512):
            part = x[first : first + 512].detach().float()
            logits = (part @ wide.t()).requires_grad_()
            loss = F.cross_entropy(logits, labels[first : first + 512], reduction="sum") / rows
            (grad,) = torch.autograd.grad(loss, logits)
            losses.append(loss.detach())
            dx.append(grad @ wide)
            dweight += grad.t() @ part
        return torch.stack(losses).sum(), torch.cat(dx), dweight

    def entrants() -> dict[str, Entrant]:
        found = {"flashtile": step(lambda x, w: ops.linear_cross_entropy(x, w, labels))}
        stored = 1056 * 2**20  # with weight's gradient memory for all logits
        found["flashtile/stored"] = step(lambda x, w: ops.linear_cross_entropy(x, w, labels, logits_bytes=stored))
        found["compiled"] = step(torch.compile(plain, dynamic=False))
        if HAS_LIGER:
            found["liger"] = step(lambda x, w: LigerFusedLinearCrossEntropyFunction.apply(x, w, labels)[0])
        return found

    case = f"linear_cross_entropy {rows}x{hidden}x{classes}"
    yield Cell("head", case, "train", entrants, exact, flops=6.0 * rows * hidden * classes, memory=True, tolerance=4e-2)


# -- dense ----------------------------------------------------------------------------------------------------------------


def denses() -> Iterator[Cell]:
    """Beside the products alone, "gemm": one forward, four backward, of which the op cannot be faster."""
    for rows, width, hidden in ((8192, 4096, 16384), (8192, 2048, 8192)):
        x, w1, b1 = normal(rows, width, grad=True), normal(hidden, width, grad=True, scale=0.02), normal(hidden, grad=True)
        w2, b2 = normal(width, hidden, grad=True, scale=0.02), normal(width, grad=True)
        flops, case = 2.0 * rows * width * hidden, f"{rows}x{width}x{hidden}"

        def act(x: Any, w1: Any, b1: Any) -> Any:
            return F.gelu(F.linear(x, w1, b1), approximate="tanh")

        def two(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
            return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)

        found: dict[str, Callable[..., Any]] = {"flashtile": ops.linear_act, "compiled": torch.compile(act, dynamic=False)}
        yield from gemms(f"linear_act {case}", found, (x, w1, b1), (flops, 2 * flops), act)
        found = {"flashtile": ops.mlp, "compiled": torch.compile(two, dynamic=False)}
        found["flashtile/recompute"] = lambda *given: ops.mlp(*given, recompute=True)
        yield from gemms(f"mlp {case}", found, (x, w1, b1, w2, b2), (2 * flops, 4 * flops), two)


def gemms(
    case: str, functions: dict[str, Callable[..., Any]], inputs: Any, flops: tuple[float, float], exact: Any
) -> Iterator[Cell]:
    """The two cells of `both`, in FLOPs, with the products alone as one more entrant."""
    x, w1, *rest = (t.detach() for t in inputs)
    inner = normal(x.shape[0], w1.shape[0])
    outer = normal(x.shape[0], rest[1].shape[0]) if len(rest) > 1 else None

    def forward() -> None:
        x @ w1.t()
        if outer is not None:
            inner @ rest[1].t()

    def backward() -> None:
        inner @ w1, inner.t() @ x
        if outer is not None:
            outer @ rest[1], outer.t() @ inner

    for cell, size, products in zip(
        both("dense", case, functions, inputs, (0.0, 0.0), exact), flops, (forward, backward), strict=True
    ):
        cell.flops = size
        make = cell.entrants

        def entrants(make: Any = make, cell: Cell = cell, products: Any = products) -> dict[str, Entrant]:
            return {**make(), "gemm": Entrant(products, cell.exact)}

        cell.entrants = entrants
        yield cell


SECTIONS: dict[str, Callable[[], Iterator[Cell]]] = {
    "rotary": rotaries, "softmax": softmaxes, "head": heads, "dense": denses, "ce": cross_entropies, "norm": norms,
}  # fmt: skip
