"""What ranks do together: the calls, each beside one process's, forward and backward.

The truth is one process's float32 (`judge`): float32 results, and lse and the gradients of what ranks share in any dtype, lie
within a relative RMS of 2e-6 of it; 16-bit out, dq, dk and dv within 1.1 times the error of one process in 16 bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, ClassVar

import torch

import flashtile
from flashtile import Alibi, Band, Bias, Dilated, Document, Dropout, KeyPadding, Prefix, Softcap, TopLeft, distributed
from flashtile.distributed import Context, shard, unshard

STRETCH = int(os.environ.get("STRETCHED", "1"))  # by how much sequences are longer: on GPUs (on_gpus.py) 16 times
SEQLEN, HEADS = 32 * STRETCH, 8  # 32 is a multiple of twice 4 ranks
WIDTHS = (16, 8) if STRETCH == 1 else (128, 128)  # of k and v; Hopper's own kernels know 128


@dataclass
class Data:
    """Whole tensors, alike on every rank."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    bias: torch.Tensor
    sink: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    names: ClassVar[tuple[str, ...]] = ("q", "k", "v", "slopes", "bias", "sink")

    def leaves(self) -> list[torch.Tensor]:
        return [getattr(self, name).detach().clone().requires_grad_() for name in self.names]

    def to(self, device: Any) -> Data:
        return Data(*(getattr(self, of.name).to(device) for of in fields(self)))

    def known(self, leaves: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a feature may tell a call, by name: these leaves, and KNOWN."""
        return dict(zip(self.names, leaves, strict=True)) | {name: t.to(self.q.device) for name, t in KNOWN.items()}


def data(dtype: torch.dtype, heads_kv: int, seqlen_k: int = SEQLEN, seqlen_q: int = SEQLEN) -> Data:
    generator = torch.Generator().manual_seed(heads_kv)
    shapes = {
        "q": (2, seqlen_q, HEADS, WIDTHS[0]), "k": (2, seqlen_k, heads_kv, WIDTHS[0]), "v": (2, seqlen_k, heads_kv, WIDTHS[1]),
        "slopes": (HEADS,), "bias": (1, HEADS, seqlen_q, seqlen_k), "sink": (HEADS,), "dout": (2, seqlen_q, HEADS, WIDTHS[1]),
        "dlse": (2, HEADS, seqlen_q),
    }  # fmt: skip
    made = {name: torch.randn(shape, generator=generator, device="cpu") for name, shape in shapes.items()}
    made["slopes"] = made["slopes"].abs() / 4
    return Data(**{n: t.to(dtype) if n in ("q", "k", "v", "dout") else t for n, t in made.items()})


# What a call is told, of a Data's leaves by name and of what cuts a tensor along the sequence as this rank has it.
Cut = Callable[[torch.Tensor, int], torch.Tensor]
Told = Callable[[dict[str, torch.Tensor], Cut], dict[str, Any]]
CU = torch.tensor([0, 3, 3, 20, 32], dtype=torch.int32) * STRETCH  # a document of no tokens among them
IDS = torch.searchsorted(CU[1:].long(), torch.arange(SEQLEN), right=True).to(torch.int32)
KEEP = torch.arange(2 * SEQLEN).view(2, SEQLEN) % 5 != 2
USED = torch.tensor([29, 10], dtype=torch.int32) * STRETCH
KNOWN = {"used": USED, "prefix": torch.tensor([7, 30]) * STRETCH, "seeds": torch.tensor([3, 9])}  # of which all have the whole

FEATURES: dict[str, Told] = {
    "full": lambda t, cut: {},
    "causal": lambda t, cut: {"causal": True},
    "window": lambda t, cut: {"causal": True, "window": (9, 0)},
    "both sides": lambda t, cut: {"window": (5, 3)},
    "sink": lambda t, cut: {"causal": True, "sink": t["sink"]},
    "softcap": lambda t, cut: {"causal": True, "score": (Softcap(2.0),), "scale": 0.5},
    "alibi": lambda t, cut: {"causal": True, "score": (Alibi(t["slopes"]), Softcap(3.0))},
    "alibi of all": lambda t, cut: {"score": (Alibi(t["slopes"]),)},
    "dilated": lambda t, cut: {"mask": Dilated(3)},
    "documents": lambda t, cut: {"causal": True, "mask": Document(cut(IDS, 0))},
    "padding": lambda t, cut: {"mask": KeyPadding(cut(KEEP, 1))},
    "prefix": lambda t, cut: {"mask": Prefix(t["prefix"]) | Band(right=0)},
    "top left": lambda t, cut: {"mask": TopLeft(left=8)},
    "seqused": lambda t, cut: {"causal": True, "seqused_q": t["used"], "seqused_k": t["used"]},
    "bias": lambda t, cut: {"causal": True, "score": (Bias(cut(t["bias"], 2)),)},
    "dropout": lambda t, cut: {"causal": True, "sink": t["sink"], "dropout": Dropout(0.4, 77)},
    "dropout of a window": lambda t, cut: {"window": (9, 3), "mask": KeyPadding(cut(KEEP, 1)), "dropout": Dropout(0.6, -5)},
    "dropout and lengths": lambda t, cut: {
        "seqused_q": t["used"],
        "seqused_k": t["used"],
        "dropout": Dropout(0.4, t["seeds"]),
    },
    "bias of keys": lambda t, cut: {"score": (Bias(t["bias"][:, :, :1]),)},
}
# Of `attention_varlen`: the documents of CU, or of PART, behind which there are tokens of none.
PART = torch.tensor([0, 5, 16, 27], dtype=torch.int32) * STRETCH
PACKED: dict[str, tuple[torch.Tensor, Told]] = {
    "packed": (CU, lambda t, cut: {}),
    "packed causal": (CU, lambda t, cut: {"causal": True, "sink": t["sink"]}),
    "packed window": (PART, lambda t, cut: {"causal": True, "window": (4, 0), "score": (Alibi(t["slopes"]), Softcap(3.0))}),
    "packed dropout": (PART, lambda t, cut: {"causal": True, "sink": t["sink"], "dropout": Dropout(0.4, 77)}),
    "packed both sides": (PART, lambda t, cut: {"window": (5, 3), "score": (Softcap(2.0),)}),
}
BY_DOCUMENT = ("packed", "packed causal", "packed window")  # what layout "documents" takes
WITHOUT = {
    ("ulysses", "bias"),
    *((method, name) for method in ("allgather", "ring") for name in ("alibi of all", "dilated", "packed dropout")),
}  # refused, and tested as a refusal


@dataclass(frozen=True)
class Case:
    method: Any
    layout: Any
    feature: str
    dtype: torch.dtype = torch.float32
    heads_kv: int = 4
    seqlen_q: int = SEQLEN
    lse: bool = True
    options: Any = field(default=None)

    def spell(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        rest = f"{dtype}, {self.heads_kv} kv heads, {self.seqlen_q} queries{', lse' * self.lse}"
        return f"{self.method} {self.layout}, {self.feature}, {rest}{', ' + str(self.options) if self.options else ''}"


LAYOUTS: dict[str, tuple[str, ...]] = {
    "allgather": ("contiguous", "zigzag"),
    "ulysses": ("contiguous", "zigzag", "striped"),
    "ring": ("contiguous", "zigzag", "striped"),
}


# What four ranks run in zigzag besides causal order: where more chunks, neighbours or parts of sums may matter.
OF_MORE = ("packed causal", "packed both sides", "window", "sink", "alibi", "documents", "padding", "seqused", "bias")


def cases(ranks: int) -> Iterator[Case]:
    """Two ranks run all; more ranks all layouts of causal order, and what asks more of them than of two."""
    for case in all_cases():
        more = (case.layout == "zigzag" and case.feature in OF_MORE and case.heads_kv != 8) or case.layout == "documents"
        if ranks == 2 or more or case.feature in ("causal", "dropout"):
            yield case


def all_cases() -> Iterator[Case]:
    for method, layouts in LAYOUTS.items():
        for layout, feature in product(layouts, FEATURES):
            if (method, feature) not in WITHOUT and (method != "ulysses" or layout == "zigzag" or feature == "causal"):
                yield Case(method, layout, feature)
        for layout, feature in product(layouts, PACKED):
            if (method, feature) not in WITHOUT:
                yield Case(method, layout, feature)
        yield Case(method, "zigzag", "packed causal", torch.bfloat16, lse=False)
        for feature in BY_DOCUMENT if method == "allgather" else ():
            yield Case(method, "documents", feature)
            yield Case(method, "documents", feature, torch.bfloat16, heads_kv=2, lse=False)
        for heads_kv, feature in ((1, "causal"), (2, "documents"), (8, "window")):
            yield Case(method, "zigzag", feature, heads_kv=heads_kv, lse=False)
        yield Case(method, "contiguous", "causal", seqlen_q=16)
        yield Case(method, "contiguous", "window", options=flashtile.Options(deterministic=True))
        for feature, heads_kv in product(("full", "causal", "window"), (1, 4)):
            yield Case(method, "zigzag", feature, torch.bfloat16, heads_kv=heads_kv, lse=False)
        yield Case(method, "zigzag", "sink", torch.bfloat16)
        yield Case(method, "zigzag", "dropout", torch.bfloat16)
    yield Case("auto", "zigzag", "bias")
    yield Case("auto", "striped", "bias")


def one_process(case: Case, d: Data) -> dict[str, torch.Tensor]:
    leaves, dlse = d.leaves(), d.dlse
    told, starts, call = asked(case)
    if starts:
        leaves[:3], dlse = [t[0].detach().requires_grad_() for t in leaves[:3]], dlse[0]
    how = told(d.known(leaves), lambda t, dim: t.to(d.q.device))
    made = call(flashtile)(*leaves[:3], *(t.to(d.q.device) for t in starts), return_lse=case.lse, options=case.options, **how)
    return results(made if case.lse else (made,), leaves, (d.dout[0] if starts else d.dout, dlse), d.names)


def asked(case: Case) -> tuple[Told, list[torch.Tensor], Callable[[Any], Any]]:
    """What a feature tells a call, its cu_seqlens, if any, and the function, by where it is from."""
    if case.feature in PACKED:
        starts, told = PACKED[case.feature]
        return told, [starts], lambda home: home.attention_varlen
    return FEATURES[case.feature], [], lambda home: home.attention


def over_ranks(case: Case, d: Data, context: Context) -> dict[str, torch.Tensor]:
    """The same, put together of all ranks' parts; gradients of what ranks share are summed."""
    leaves = d.leaves()
    told, starts, call = asked(case)
    given, axis = [*leaves[:3], d.dout, d.dlse], 0 if starts else 1
    given = [t[0] for t in given] if starts else given
    documents = starts[0] if starts else None
    local = [shard(t, context, axis, cu_seqlens=documents).detach().requires_grad_() for t in given[:3]]
    how = told(d.known(leaves), lambda t, dim: shard(t.to(d.q.device), context, dim))
    made = call(distributed)(
        *local, *(t.to(d.q.device) for t in starts), context=context, return_lse=case.lse, options=case.options, **how
    )
    weights = [shard(t, context, dim, cu_seqlens=documents) for t, dim in ((given[3], axis), (given[4], axis + 1))]
    found = results(made if case.lse else (made,), [*local, *leaves[3:]], tuple(weights), d.names)
    for name, tensor in found.items():
        if name in ("dslopes", "dbias", "dsink"):
            torch.distributed.all_reduce(tensor, group=context.group)
        else:
            found[name] = unshard(tensor, context, axis + (name == "lse"), cu_seqlens=documents)
    return found


def results(
    made: tuple[torch.Tensor, ...], leaves: list[torch.Tensor], weights: tuple[torch.Tensor, ...], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    visible = [torch.where(t == -torch.inf, 0.0, t) for t in made]
    grads = torch.autograd.grad(visible, leaves, list(weights[: len(made)]), allow_unused=True)
    found = dict(zip(("out", "lse"), (t.detach() for t in made), strict=False))
    return found | {f"d{name}": g for name, g in zip(names, grads, strict=True) if g is not None}


def of_reference(case: Case, d: Data) -> dict[str, torch.Tensor]:
    """One process in float32 of the same values, with ieee products: what all are compared with."""
    widened = Data(*(getattr(d, n).float() for n in (*d.names, "dout", "dlse")))
    return one_process(replace(case, dtype=torch.float32, options=flashtile.Options(precision="ieee")), widened)


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    assert found.shape == true.shape, (found.shape, true.shape)
    hidden = true == -torch.inf
    assert torch.equal(found == -torch.inf, hidden)
    difference = torch.where(hidden, 0.0, found.double() - true.double())
    return float(difference.norm() / true.double().where(~hidden, 0.0).norm().clamp(min=1e-9))


def judge(case: Case, context: Context, judging: int, device: Any = "cpu") -> str:
    """What is wrong, as the judging rank finds it; empty where nothing is.

    By relative RMS against one process's float32 of the same values: 16-bit out, dq, dk and dv may have 1.1 times the error
    that one process has in 16 bits, all else 2e-6. That process is the library itself; tests/cases.py holds it to float64.
    Of stretched sequences, as GPUs run, all else may have 1.5 times one process's error; so may 16 bits of the ring on a GPU,
    where parts of out and dq are rounded.
    """
    whole = data(case.dtype, case.heads_kv, seqlen_q=case.seqlen_q)
    d, on_gpu = whole.to(device), torch.device(device).type != "cpu"
    ours = over_ranks(case, d, context)
    if context.rank != judging:
        return ""
    one, true, wrong = one_process(case, d), of_reference(case, whole), list[str]()
    if list(ours) != list(one):
        return f"{list(ours)} are there, and of one process {list(one)}"
    for name in ours:
        error, alone = (relative(t[name].cpu(), true[name]) for t in (ours, one))
        rounded = name in ("out", "dq", "dk", "dv") and case.dtype is not torch.float32
        limit = (
            (1.5 if on_gpu and case.method == "ring" else 1.1) * alone if rounded else max(2e-6, 1.5 * alone * (STRETCH > 1))
        )
        if not error <= limit:
            wrong.append(f"{name}: {error:.3g}, one process {alone:.3g}")
    return ", ".join(wrong)
