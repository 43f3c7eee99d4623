"""The one list of attention cases; every backend runs every case (test_attention.py)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import flashtile
from flashtile import Alibi, Band, Bias, Blocks, Dilated, Document, Options, Prefix, Softcap, Stored, TopLeft
from flashtile.features.scores.relative import Relative
from tests.drafts import drafts
from tests.relative_bias import RelativeBias

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Tensors = dict[str, torch.Tensor]

# Modifiers by name: the shape of the tensor that they capture, of (batch, heads_q, seqlen_q, seqlen_k), and how they are made.
MODIFIERS: dict[str, tuple[Callable[..., tuple[int, ...]] | None, Callable[[Any], flashtile.Score]]] = {
    "softcap": (None, lambda _: Softcap(2.0)),
    **{f"softcap{cap}": (None, lambda _, cap=cap: Softcap(float(cap))) for cap in (30, 50, 1000)},
    "alibi": (lambda batch, heads, *_: (heads,), Alibi),
    "alibi-per-batch": (lambda batch, heads, *_: (batch, heads), Alibi),
    "relative": (lambda batch, heads, *_: (batch, heads), Relative),
    "bias": (lambda *scores: scores, Bias),
    "bias-heads": (lambda batch, heads, rows, keys: (heads, rows, keys), Bias),
    "bias-batch": (lambda batch, heads, rows, keys: (batch, 1, rows, keys), Bias),
    "bias-plane": (lambda batch, heads, rows, keys: (rows, keys), Bias),
    "bias-keys": (lambda batch, heads, rows, keys: (batch, 1, 1, keys), Bias),
    "bias-rows": (lambda batch, heads, rows, keys: (heads, rows, 1), Bias),
    "bias-each-head": (lambda batch, heads, rows, keys: (1, heads, 1, 1), Bias),
    "bias-each-item": (lambda batch, heads, rows, keys: (batch, 1, 1, 1), Bias),
    "table": (lambda batch, heads, *_: (heads, 16), RelativeBias),
    "bias-number": (lambda batch, heads, rows, keys: (), Bias),
}


def ids(case: Case, seqlen: int, device: torch.device) -> torch.Tensor:
    """Documents of a few keys each, also in pieces, other ones in every item: int32 (items, seqlen)."""
    generator = torch.Generator().manual_seed(seqlen)
    starts = torch.rand((case.items, seqlen), generator=generator) < 0.1
    return (starts.cumsum(1) % 3).to(device, torch.int32)


def table(case: Case, device: torch.device, size: tuple[int, int], density: float = 0.5, first: bool = False) -> Blocks:
    shape = (case.items, case.heads_q, -(-case.seqlen_q // size[0]), -(-case.seqlen_k // size[1]))
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(7))
    drawn[..., 0] *= not first  # whether all queries see the first keys
    return Blocks.from_block_mask((drawn < density).to(device), case.seqlen_q, case.seqlen_k, block_size=size)


def documents(case: Case, device: torch.device) -> Document:
    return Document(ids(case, case.seqlen_q, device), ids(case, case.seqlen_k, device))


def strangers(case: Case, device: torch.device) -> Document:
    """Documents of about 200 tokens; of every ten queries and keys one belongs to none and sees, or is seen by, nobody."""
    queries, keys = (torch.arange(n, device=device, dtype=torch.int32) for n in (case.seqlen_q, case.seqlen_k))
    return Document(torch.where(queries % 10 == 3, -1, queries // 200), torch.where(keys % 10 == 7, -2, keys // 200))


def holes(case: Case, device: torch.device) -> flashtile.KeyPadding:
    keep = torch.rand((case.items, case.seqlen_k), generator=torch.Generator().manual_seed(5)) < 0.6
    return flashtile.KeyPadding(keep.to(device))


def stored(case: Case, device: torch.device, each: bool) -> Stored:
    shape = (case.items, case.heads_q) if each else (1, 1)
    seen = torch.rand((*shape, case.seqlen_q, case.seqlen_k), generator=torch.Generator().manual_seed(3)) < 0.6
    return Stored(seen.to(device))


def prefixes(case: Case, device: torch.device) -> Prefix:
    return Prefix(torch.arange(3, 3 + 11 * case.items, 11, dtype=torch.int32, device=device))


def blocks(case: Case, device: torch.device, mask: Any, size: tuple[int, int]) -> Blocks:
    return Blocks.build(mask, case.seqlen_q, case.seqlen_k, batch=case.items, heads=1, block_size=size, device=device)


# Masks by name, made for a case and a device.
MASKS: dict[str, Callable[[Case, torch.device], Any]] = {
    "document": documents,
    "document-causal": lambda case, device: documents(case, device) & Band(right=0),
    "prefix": lambda case, device: prefixes(case, device) | Band(right=0),
    "dilated": lambda case, device: Dilated(3) & Band(left=30, right=0),
    "global-and-dilated": lambda case, device: Dilated(3) & Band(left=30, right=0) | prefixes(case, device),
    "holes": holes,
    "stored": lambda case, device: stored(case, device, True),
    "stored-one-head": lambda case, device: stored(case, device, False) & Band(right=9),
    "holes-and-documents": lambda case, device: holes(case, device) & (documents(case, device) | prefixes(case, device)),
    "top-left": lambda case, device: TopLeft(),
    "two-bands": lambda case, device: Band(left=4, right=0) | Band(left=-20, right=30),
    "document-blocks": lambda case, device: blocks(case, device, documents(case, device), (32, 32)),
    "holes-blocks": lambda case, device: blocks(case, device, holes(case, device), (32, 32)),
    "prefix-blocks": lambda case, device: blocks(case, device, prefixes(case, device) | Band(right=0), (32, 64)),
    "band-blocks": lambda case, device: blocks(case, device, Band(left=40, right=3), (64, 32)),
    "joined-blocks": lambda case, device: blocks(case, device, documents(case, device), (32, 32)) & Band(right=9) | Dilated(8),
    "table": lambda case, device: table(case, device, (128, 128)),
    "one-long": lambda case, device: table(case, device, (128, 128), 0.1, True),
    "strangers-blocks": lambda case, device: blocks(case, device, strangers(case, device), (128, 128)),
    "wide-band-blocks": lambda case, device: blocks(case, device, Band(left=150, right=40), (128, 256)),
    "first-blocks": lambda case, device: blocks(case, device, prefixes(case, device) | Band(left=70, right=0), (128, 128)),
    "flash-attn-v1": lambda case, device: table(case, device, (16, 256)),
    "top-left-window": lambda case, device: TopLeft(left=12),
    "tree": lambda case, device: drafts(case.items, case.seqlen_q, device),
    "chunks": lambda case, device: flashtile.Chunked(20) & Band(left=19, right=5),
}


@dataclass(frozen=True)
class Case:
    """One call of `flashtile.attention`, with what flows back into it. `layout`: how q, k, v lie in memory. `upstream`:
    which outputs receive a gradient. `fixed_slopes`: captured tensors need none, nor do sinks unless "score"; `fixed_sink`:
    sinks need none. `cu_q`, `cu_k`: cu_seqlens of `attention_varlen`, whose totals are seqlen_q and seqlen_k; batch is then
    1. `used_q`, `used_k`: seqused; with `holes` as masks that keep so many.
    """

    name: str
    batch: int = 1
    seqlen_q: int = 48
    seqlen_k: int = 48
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 16
    head_dim_v: int | None = None
    dtype: str = "fp32"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: Band | str | None = None  # a Band, or the name of one of MASKS
    score: tuple[str, ...] = ()
    score_dtype: str = "fp32"  # of the modifiers' tensors
    scale: float | None = None
    layout: Literal["bshd", "bhsd", "packed", "gaps"] = "bshd"
    backward: Literal["auto", "split", "fused"] = "auto"
    deterministic: bool | None = None
    precision: Literal["tf32x3", "ieee", "tf32"] = "tf32x3"
    upstream: Literal["both", "out", "lse"] = "both"
    fixed_slopes: bool | Literal["score"] = False
    sink: str | None = None  # its dtype
    fixed_sink: bool = False
    dropout: float | None = None
    refused: tuple[str, ...] = ()  # the portable backends that refuse it
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    holes: bool = False

    @property
    def items(self) -> int:
        """Items of the batch."""
        return self.batch if self.cu_q is None else len(self.cu_q) - 1

    def lengths(self, device: torch.device) -> Tensors:
        """The tensors of lengths by their arguments' names."""
        named = {"cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k, "seqused_q": self.used_q, "seqused_k": self.used_k}
        made = {name: torch.tensor(n, dtype=torch.int32) for name, n in named.items() if n is not None}
        if self.holes:
            made = {name: self.mask_of(n, self.seqlen_q if name.endswith("q") else self.seqlen_k) for name, n in made.items()}
        return {name: tensor.to(device) for name, tensor in made.items()}

    def mask_of(self, counts: torch.Tensor, seqlen: int) -> torch.Tensor:
        """A mask (batch, seqlen) that keeps so many tokens of each item; of queries and keys alike where counts are."""
        scores = torch.rand(len(counts), seqlen, generator=torch.Generator().manual_seed(seqlen))
        return scores.argsort(1).argsort(1) < counts[:, None]

    @property
    def function(self) -> Callable[..., Any]:
        return flashtile.attention if self.cu_q is None else flashtile.attention_varlen

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that `attention`, the reference and the plain computation share, `score` and mask aside."""
        return {"causal": self.causal, "window": self.window, "scale": self.scale}

    def masks(self, device: torch.device) -> dict[str, Any]:
        """The mask as a keyword argument."""
        return {"mask": MASKS[self.mask](self, device) if isinstance(self.mask, str) else self.mask}

    def options(self, backend: str) -> Options:
        return Options(backend=backend, backward=self.backward, deterministic=self.deterministic, precision=self.precision)

    def tensors(self, device: torch.device) -> Tensors:
        """q, k, v and each modifier's tensor ("score.N"), and the gradients "dout" and "dlse"; the same in every run."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        head_dim_v = self.head_dim_v or self.head_dim
        shapes = {
            "q": (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            "k": (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            "v": (self.batch, self.seqlen_k, self.heads_kv, head_dim_v),
            "dout": (self.batch, self.seqlen_q, self.heads_q, head_dim_v),
        }
        made = {name: lay_out(normal(*shape).to(device, DTYPES[self.dtype]), self.layout) for name, shape in shapes.items()}
        if self.layout == "packed":
            made["q"], made["k"], made["v"] = torch.stack([made["q"], made["k"], made["v"]], 2).unbind(2)
        made["dlse"] = normal(self.batch, self.heads_q, self.seqlen_q).to(device)
        if self.sink is not None:
            made["sink"] = normal(self.heads_q).mul(2.0).to(device, DTYPES[self.sink])
        for i, name in enumerate(self.score):
            shape = MODIFIERS[name][0]
            if shape is not None:
                made[f"score.{i}"] = (
                    normal(*shape(self.items, self.heads_q, self.seqlen_q, self.seqlen_k))
                    .abs()
                    .div(4)
                    .to(device, DTYPES[self.score_dtype])
                )
        return made if self.cu_q is None else {n: t[0] if n in ("dlse", *shapes) else t for n, t in made.items()}

    def given(self, tensors: Tensors) -> dict[str, Any]:
        """`arguments`, and those made of tensors."""
        made: dict[str, Any] = {"score": self.modifiers(tensors)}
        if self.sink is not None:
            made["sink"] = tensors["sink"]
        if self.dropout is not None:
            made["dropout"] = flashtile.Dropout(self.dropout, seed=zlib.crc32(self.name.encode()) << 20)
        return {**self.arguments, **made}

    def modifiers(self, tensors: Tensors) -> tuple[flashtile.Score, ...]:
        return tuple(MODIFIERS[name][1](tensors.get(f"score.{i}")) for i, name in enumerate(self.score))


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory order; "gaps" leaves unused, NaN-filled elements in every dimension."""
    if layout == "bhsd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "gaps":
        wide = torch.full([2 * n + 1 for n in tensor.shape], float("nan"), dtype=tensor.dtype, device=tensor.device)
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        view.copy_(tensor)
        return view
    return tensor


def variants(*cases: Case) -> Iterator[Case]:
    """Each case with the split and with the fused backward."""
    for case in cases:
        yield replace(case, name=f"{case.name}-split", backward="split")
        yield replace(case, name=f"{case.name}-fused", backward="fused")


def dtypes(*cases: Case) -> Iterator[Case]:
    """Each case in every dtype."""
    for case in cases:
        for dtype in DTYPES:
            yield replace(case, name=f"{case.name}-{dtype}", dtype=dtype)


def _heads() -> Iterator[Case]:
    yield from variants(*dtypes(Case("gqa", batch=2, heads_q=4, heads_kv=2, seqlen_q=40, seqlen_k=72)))
    yield Case("mha", batch=2, heads_q=2, heads_kv=2)
    yield from dtypes(Case("mqa", heads_q=4, causal=True))
    yield from variants(Case("group3", heads_q=3, seqlen_q=33, causal=True), Case("group7", heads_q=7, dtype="fp16"))
    yield Case("group3-of-6", heads_q=6, heads_kv=2, dtype="bf16", window=(20, 20))


def _head_dims() -> Iterator[Case]:
    for i, head_dim in enumerate((1, 5, 16, 24, 64, 80, 128, 256)):
        yield Case(f"head_dim{head_dim}", head_dim=head_dim, causal=True, seqlen_q=40, heads_q=1)
        dtype = ("fp16", "bf16")[i % 2]
        yield Case(f"head_dim{head_dim}-{dtype}", head_dim=head_dim, dtype=dtype, seqlen_k=70, heads_q=1)
    for head_dim, head_dim_v, dtype in (
        (16, 40, "fp32"), (40, 16, "fp32"), (64, 32, "fp32"), (33, 17, "fp32"), (100, 8, "fp32"), (1, 256, "fp32"),
        (5, 80, "fp16"), (64, 128, "bf16"), (192, 128, "fp16"),
    ):  # fmt: skip
        case = Case(f"head_dim{head_dim}-v{head_dim_v}", head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, heads_q=1)
        yield from variants(case)
    for head_dim, head_dim_v, dtype in (
        (320, 320, "fp16"), (512, 512, "bf16"), (512, 64, "fp16"), (40, 512, "fp16"), (257, 300, "bf16"),
    ):  # fmt: skip
        case = Case(f"head_dim{head_dim}-v{head_dim_v}", 1, 20, 36, 2, 1, head_dim, head_dim_v, dtype, causal=True)
        yield from variants(case)
    # several heads and batch entries, so that q and k, v, out step by different strides
    yield from variants(Case("head_dim5-v24-heads", 2, 20, 36, heads_q=4, heads_kv=2, head_dim=5, head_dim_v=24))


def _lengths() -> Iterator[Case]:
    for seqlen_q, seqlen_k in ((16, 80), (80, 16), (33, 65), (1, 77), (64, 64), (17, 17), (80, 80), (3, 2)):
        case = Case(f"len{seqlen_q}x{seqlen_k}", seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        yield case
        yield replace(case, name=f"{case.name}-causal", causal=True)
    yield from variants(*dtypes(Case("causal", seqlen_q=80, seqlen_k=80, causal=True)))
    yield from dtypes(Case("causal-empty-rows", seqlen_q=80, seqlen_k=33, causal=True))


def _masks() -> Iterator[Case]:
    windows: Sequence[tuple[int | None, int | None]] = ((8, 0), (8, 8), (0, 0), (None, 5), (5, None), (40, 3), (63, 64))
    for left, right in windows:
        yield Case(f"window{left}:{right}", window=(left, right), seqlen_q=72, seqlen_k=72, heads_q=1)
    yield from variants(Case("window-causal", window=(20, 20), causal=True, seqlen_q=65, seqlen_k=80, dtype="fp16"))
    yield Case("window-long-queries", window=(9, 9), seqlen_q=80, seqlen_k=30, dtype="bf16")
    bands = {
        "below": Band(right=-1), "far-below": Band(right=-20), "above": Band(left=-3), "far-above": Band(left=-20, right=40),
        "left-stripe": Band(left=30, right=-10), "nothing": Band(left=-3, right=1), "all-right": Band(left=-100),
        "extreme-left": Band(left=1 - 2**31), "extreme-right": Band(right=1 - 2**31), "extreme": Band(2**31 - 1, 2**31 - 1),
    }  # fmt: skip
    for name, band in bands.items():
        yield Case(f"band-{name}", mask=band, seqlen_q=70, seqlen_k=66, heads_q=1)
    yield from variants(Case("band-stripe", mask=Band(left=40, right=-7), seqlen_q=50, seqlen_k=80, dtype="fp16"))
    yield Case("band-and-window-and-causal", mask=Band(right=-2), window=(30, 10), causal=True, seqlen_q=60, seqlen_k=64)


def _scores() -> Iterator[Case]:
    yield from variants(*dtypes(Case("softcap", score=("softcap",), scale=1.0, causal=True)))
    yield from variants(*dtypes(Case("alibi", score=("alibi",), seqlen_q=40, seqlen_k=72)))
    yield from variants(Case("alibi-per-batch", score=("alibi-per-batch",), batch=2, heads_q=4, heads_kv=2, causal=True))
    yield from variants(Case("softcap-alibi", score=("softcap", "alibi"), heads_q=3, seqlen_q=65, seqlen_k=40, causal=True))
    yield from variants(Case("alibi-softcap", score=("alibi", "softcap"), heads_q=3, seqlen_q=40, seqlen_k=65, dtype="fp16"))
    yield from variants(*dtypes(Case("relative", score=("relative",), batch=2, seqlen_q=40, seqlen_k=72)))
    yield Case("relative-softcap", score=("relative", "softcap"), heads_q=3, seqlen_q=65, seqlen_k=40, dtype="fp16")
    yield Case("alibi-twice", score=("alibi", "softcap30", "alibi-per-batch"), batch=2, causal=True)
    yield Case("alibi-window-empty-rows", score=("alibi",), window=(9, 0), seqlen_q=70, seqlen_k=40)
    yield Case("alibi-fixed", score=("alibi",), fixed_slopes=True, deterministic=True, backward="split")
    yield Case("alibi-deterministic", score=("alibi",), deterministic=True)
    yield Case("softcap-head_dim5", score=("softcap",), head_dim=5, head_dim_v=24, dtype="bf16")


def _biases() -> Iterator[Case]:
    yield from variants(*dtypes(Case("bias", score=("bias",), batch=2, heads_q=4, heads_kv=2, seqlen_q=40, seqlen_k=72)))
    for name in ("bias-heads", "bias-batch", "bias-plane", "bias-keys", "bias-rows", "bias-each-head", "bias-number"):
        yield from variants(Case(name, score=(name,), batch=2, heads_q=4, heads_kv=2, seqlen_q=36, seqlen_k=50, causal=True))
        yield Case(f"{name}-fp16", score=(name,), batch=2, heads_q=3, seqlen_q=50, seqlen_k=36, window=(30, 9), dtype="fp16")
    yield from variants(Case("bias-softcap-alibi", score=("bias-heads", "softcap", "alibi"), heads_q=3, causal=True))
    yield from variants(Case("alibi-bias-twice", score=("alibi", "bias-keys", "softcap", "bias"), heads_q=3, seqlen_q=33))
    yield from variants(Case("bias-sink-dropout", score=("bias-heads",), sink="fp32", dropout=0.2, seqlen_q=50, seqlen_k=72))
    yield Case("bias-empty-rows", score=("bias",), causal=True, seqlen_q=70, seqlen_k=30)
    yield Case("bias-deterministic", score=("bias-plane",), batch=2, deterministic=True, dtype="bf16")
    yield Case("bias-fixed", score=("bias",), fixed_slopes=True, seqlen_k=70)


def _sinks() -> Iterator[Case]:
    yield from variants(*dtypes(Case("sink", heads_q=4, heads_kv=2, seqlen_q=40, seqlen_k=72, sink="fp32")))
    yield from variants(*dtypes(Case("sink-causal", batch=2, causal=True, seqlen_q=70, seqlen_k=70, sink="fp32")))
    yield from variants(Case("sink-empty-rows", causal=True, seqlen_q=70, seqlen_k=30, sink="bf16"))
    yield from variants(Case("sink-lone", window=(0, 0), seqlen_q=33, seqlen_k=40, sink="fp16"))
    yield Case("sink-one-key", sink="fp32", seqlen_k=1, seqlen_q=20)
    yield from variants(Case("sink-score", score=("softcap", "alibi"), window=(30, 3), heads_q=3, sink="fp32", dtype="fp16"))
    yield Case("sink-tiny-scale", scale=1e-30, seqlen_k=70, sink="fp32", dtype="bf16")
    yield Case("sink-fixed", sink="fp32", fixed_slopes=True, seqlen_q=70, deterministic=True)
    yield Case("sink-lse", sink="fp32", upstream="lse", seqlen_q=70, seqlen_k=30, causal=True)


def _dropouts() -> Iterator[Case]:
    yield from variants(*dtypes(Case("dropout", batch=2, heads_q=4, heads_kv=2, seqlen_q=40, seqlen_k=72, dropout=0.2)))
    yield from variants(*dtypes(Case("dropout-causal", causal=True, seqlen_q=70, seqlen_k=70, dropout=0.5)))
    yield from variants(Case("dropout-empty-rows", causal=True, seqlen_q=70, seqlen_k=30, dropout=0.1))
    yield from variants(Case("dropout-lone", window=(0, 0), seqlen_q=33, seqlen_k=40, dropout=0.3))
    yield from variants(Case("dropout-score", score=("softcap", "alibi"), window=(30, 3), heads_q=3, dropout=0.1))
    yield from variants(*dtypes(Case("dropout-sink", seqlen_q=33, seqlen_k=50, head_dim_v=24, sink="fp32", dropout=0.1)))
    for score in (
        ("alibi",),
        ("alibi", "softcap"),
        ("softcap",),
        ("alibi", "alibi-per-batch"),
    ):  # added unscaled
        name = "-".join(("dropout-fixed", *score))
        yield Case(name, score=score, fixed_slopes=True, dropout=0.2, dtype="fp16", seqlen_k=70)
    yield Case("dropout-most", dropout=0.9, seqlen_k=70, dtype="fp16")
    yield Case("dropout-lse", dropout=0.5, upstream="lse", seqlen_k=70)
    yield Case("dropout-long-keys", dropout=0.1, seqlen_q=20, seqlen_k=600, batch=2)


def _scales() -> Iterator[Case]:
    for name, scale in (("zero", 0.0), ("negative", -0.3), ("large", 4.0), ("tiny", 1e-6)):
        yield Case(f"scale-{name}", scale=scale, seqlen_k=70)
        yield Case(f"scale-{name}-causal-fp16", scale=scale, causal=True, dtype="fp16", score=("softcap30",))
    yield from variants(Case("scale-minus-causal", scale=-1.0, causal=True, seqlen_q=70, seqlen_k=40))


def _gradients() -> Iterator[Case]:
    base = Case("upstream", seqlen_q=50, seqlen_k=70, causal=True)
    for case in variants(base):
        for upstream in ("out", "lse"):
            yield replace(case, name=f"{case.name}-{upstream}", upstream=upstream)
    yield replace(base, name="upstream-lse-alibi", upstream="lse", score=("alibi",))
    yield replace(base, name="upstream-lse-empty-rows", upstream="lse", seqlen_k=30)


def _layouts() -> Iterator[Case]:
    for layout in ("bhsd", "packed", "gaps"):
        yield Case(f"layout-{layout}", layout=layout, heads_kv=2, batch=2, causal=True)
        yield Case(f"layout-{layout}-fused", layout=layout, heads_kv=2, backward="fused", dtype="fp16")


def _lengths_of_items() -> Iterator[Case]:
    """Uneven, empty and overlong items; tokens that belong to none."""
    uneven = Case(
        "varlen", seqlen_q=84, seqlen_k=101, heads_q=4, heads_kv=2, cu_q=(0, 33, 33, 35, 80), cu_k=(0, 20, 37, 37, 101)
    )
    yield from variants(*dtypes(uneven))
    yield from variants(*dtypes(replace(uneven, name="varlen-causal", causal=True)))
    itself = Case("varlen-itself", seqlen_q=70, seqlen_k=70, cu_q=(0, 1, 18, 70))
    yield from variants(
        replace(itself, window=(9, 3)), replace(itself, name="varlen-softcap", score=("softcap",), dtype="fp16")
    )
    yield from variants(replace(uneven, name="varlen-alibi", score=("alibi-per-batch", "softcap"), causal=True))
    yield replace(uneven, name="varlen-alibi-deterministic", score=("alibi",), deterministic=True, dtype="fp16")
    yield from variants(replace(uneven, name="varlen-used", used_q=(33, 0, 1, 20), used_k=(3, 17, 0, 40), causal=True))
    for name, cu in (("nothing", (0,)), ("empty-items", (0, 0, 0)), ("one-token", (0, 1)), ("last-empty", (0, 50, 50))):
        yield Case(f"varlen-{name}", seqlen_q=50, seqlen_k=50, cu_q=cu, causal=True, score=("alibi",) if len(cu) > 1 else ())
    yield Case("varlen-no-tokens", seqlen_q=0, seqlen_k=0, cu_q=(0, 0))
    for layout in ("bhsd", "packed", "gaps"):
        yield replace(itself, name=f"varlen-{layout}", layout=layout, heads_kv=2, dtype="fp16", causal=True)
    yield replace(uneven, name="varlen-head_dim5", head_dim=5, head_dim_v=24, causal=True)
    yield replace(uneven, name="varlen-many", cu_q=(*range(0, 84, 7), 84), cu_k=(*range(0, 84, 7), 101), dtype="fp16")
    padded = Case("padded", batch=3, seqlen_q=40, seqlen_k=72, heads_q=4, heads_kv=2, used_q=(40, 0, 17), used_k=(1, 30, 72))
    yield from variants(*dtypes(replace(padded, causal=True)))
    yield from variants(replace(padded, name="padded-alibi", score=("softcap", "alibi-per-batch")))
    yield from variants(replace(padded, name="padded-keys", used_q=None, window=(8, 4), dtype="bf16"))
    yield from variants(replace(padded, name="padded-queries", used_k=None, score=("alibi",), layout="bhsd"))
    yield replace(padded, name="padded-nothing", used_k=(0, 0, 0), upstream="lse")
    yield from variants(*dtypes(replace(padded, name="holes", holes=True, causal=True)))
    yield replace(padded, name="holes-window-keys", holes=True, used_q=None, window=(8, 4), score=("alibi-per-batch",))
    yield replace(padded, name="holes-queries", holes=True, used_k=None, score=("softcap",), sink="fp32", layout="gaps")
    alike = dict(seqlen_k=40, used_q=(40, 0, 17), used_k=(40, 0, 17), causal=True, dropout=0.2, upstream="both")
    yield replace(padded, name="holes-itself", holes=True, layout="bhsd", **alike)  # type: ignore[arg-type]


def _features_of_items() -> Iterator[Case]:
    """Sinks, dropout and biases where items differ in length, and under predicates."""
    uneven = Case(  # an item without queries, one without keys
        "varlen", seqlen_q=84, seqlen_k=101, heads_q=4, heads_kv=2, cu_q=(0, 33, 33, 35, 80), cu_k=(0, 20, 37, 37, 101)
    )
    yield from variants(*dtypes(replace(uneven, name="varlen-sink", sink="fp32", causal=True)))
    yield from variants(*dtypes(replace(uneven, name="varlen-dropout", dropout=0.2)))
    yield from variants(replace(uneven, name="varlen-sink-dropout-score", sink="bf16", dropout=0.1, score=("softcap", "alibi")))
    refused = ("triton",)
    yield from variants(
        replace(uneven, name="varlen-bias-each-head", score=("bias-each-head",), fixed_slopes=True),
        replace(uneven, name="varlen-bias", score=("bias-plane",), fixed_slopes=True, dtype="fp16", refused=refused),
        replace(uneven, name="varlen-bias-gradient", score=("bias-each-head",), causal=True),
        replace(uneven, name="varlen-bias-number", score=("bias-number", "softcap"), sink="fp32", dtype="fp16"),
        replace(uneven, name="varlen-bias-items", score=("bias-each-item",), dropout=0.2),
    )
    padded = Case("padded", batch=3, seqlen_q=40, seqlen_k=72, heads_q=4, heads_kv=2, used_q=(40, 9, 17), used_k=(1, 0, 72))
    yield from variants(*dtypes(replace(padded, name="padded-sink-dropout", sink="fp32", dropout=0.3, causal=True)))
    yield from variants(
        replace(padded, name="padded-bias", score=("bias",), fixed_slopes=True, window=(30, 9)),
        replace(padded, name="padded-bias-gradient", score=("bias-heads",), dtype="fp16"),
    )
    for bias in ("bias", "bias-batch", "bias-plane", "bias-keys", "bias-rows", "bias-each-head", "bias-each-item"):
        yield replace(
            padded, name=f"padded-{bias}-fp32", score=(bias,), window=(30, 9), backward=("split", "fused")[len(bias) % 2]
        )
    base = Case("mask", batch=2, seqlen_q=50, seqlen_k=66, heads_q=4, heads_kv=2)
    for mask in ("document", "holes-and-documents", "holes-blocks"):
        yield from variants(replace(base, name=f"mask-{mask}-sink-dropout", mask=mask, sink="fp32", dropout=0.2))
        for bias in ("bias", "bias-keys", "bias-rows", "bias-each-head"):
            yield replace(base, name=f"mask-{mask}-{bias}", mask=mask, score=(bias,), sink="fp32")
    yield replace(base, name="mask-holes-bias-fp16", mask="holes", score=("bias-batch", "softcap"), dropout=0.2, dtype="fp16")


def _predicates() -> Iterator[Case]:
    base = Case("mask", batch=2, seqlen_q=50, seqlen_k=66, heads_q=4, heads_kv=2)
    yield from variants(*dtypes(replace(base, name="mask-document", mask="document")))
    for i, name in enumerate(MASKS):
        yield replace(base, name=f"mask-{name}", mask=name, backward=("split", "fused")[i % 2])
        yield replace(base, name=f"mask-{name}-fp16", mask=name, dtype="fp16", seqlen_q=70, seqlen_k=40)
    large = replace(base, batch=1, seqlen_q=140, seqlen_k=160, heads_q=2, heads_kv=1, dtype="fp16")
    yield from variants(replace(large, name="mask-large-document-blocks", mask="document-blocks", causal=True))
    yield from variants(replace(large, name="mask-large-flash-attn-v1", mask="flash-attn-v1"))
    rich = replace(base, score=("softcap", "alibi-per-batch"), causal=True)
    yield from variants(replace(rich, name="mask-scores", mask="document"))
    yield from variants(replace(rich, name="mask-scores-blocks", mask="prefix-blocks", dtype="fp16"))
    yield replace(rich, name="mask-window", mask="holes", causal=False, window=(20, 10), layout="bhsd")
    yield replace(base, name="mask-padded", mask="document-causal", used_q=(50, 13), used_k=(40, 0))
    yield from variants(replace(base, name="mask-varlen", batch=1, mask="prefix", cu_q=(0, 20, 20, 50), cu_k=(0, 30, 40, 66)))


def _precisions() -> Iterator[Case]:
    for precision in ("ieee", "tf32"):
        yield Case(f"precision-{precision}", precision=precision, causal=True)


GROUPS: tuple[Callable[[], Iterator[Case]], ...] = (
    _heads, _head_dims, _lengths, _masks, _scores, _biases, _sinks, _dropouts, _scales, _gradients, _layouts,
    _lengths_of_items, _features_of_items, _predicates, _precisions,
)  # fmt: skip
CASES: tuple[Case, ...] = tuple(case for group in GROUPS for case in group())
assert len({case.name for case in CASES}) == len(CASES), "two cases have one name"
