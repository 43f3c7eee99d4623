"""The buffers that every backend's attention plans have in common, by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from flashtile.plan.backend import ROW_STATISTICS, Direction, Gradients
from flashtile.plan.call import Buffer
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import AppendProblem, CachedProblem
from flashtile.problem.dropout import SEED_WORDS, Origin


def shapes(p: AttentionProblem) -> dict[str, tuple[int, ...]]:
    """Shapes of q, k, v, out and lse."""
    return {
        "q": (p.slabs, p.span_q, p.heads_q, p.head_dim),
        "k": (p.slabs, p.span_k, p.heads_kv, p.head_dim),
        "v": (p.slabs, p.span_k, p.heads_kv, p.head_dim_v),
        "out": (p.slabs, p.span_q, p.heads_q, p.head_dim_v),
        "lse": (p.slabs, p.heads_q, p.span_q),
    }


def input_buffers(p: AttentionProblem) -> tuple[Buffer, ...]:
    """q, k, v; the captured tensors `score.I.J`; `sink`; `q_scale`, `k_scale`, `v_scale` of what is stored; `seed`, the words
    of dropout's (seed, offset) and, if it has one, its Origin; the tensors `mask.I.J` of predicates, those of block lists, and
    those that hold the items' lengths.
    """
    captured = [
        Buffer(f"score.{i}.{j}", tensor.shape, tensor.dtype, "input")
        for i, spec in enumerate(p.score)
        for j, tensor in enumerate(spec.tensors)
    ]
    if p.sink is not None:
        captured.append(Buffer("sink", p.sink.shape, p.sink.dtype, "input"))
    captured += [Buffer(f"{n}_scale", shape, "fp32", "input") for n, shape in scale_shapes(p).items()]
    if p.dropout is not None:
        words = SEED_WORDS if p.origin is None else SEED_WORDS + len(Origin().words)
        captured.append(Buffer("seed", (words,), "int32", "input"))
    blocks = [Buffer(name, shape, "int32", "input") for name, shape in block_shapes(p).items()]
    lengths = [Buffer(n, (p.batch + n.startswith("cu_"),), "int32", "input") for n in p.lengths.tensors]
    return (
        *(Buffer(n, shapes(p)[n], input_dtype(p, n), "input") for n in "qkv"),
        *captured,
        *mask_buffers(p),
        *blocks,
        *lengths,
    )


def input_dtype(p: AttentionProblem, name: str) -> str:
    """In which q, k or v comes."""
    stored = p.stored
    if stored is None or (name == "q" and stored.queries is None):
        return p.dtype.value
    return stored.buffer_dtype


def scale_shapes(p: AttentionProblem) -> dict[str, tuple[int, ...]]:
    """Of the scales that q, k and v have, by whose they are."""
    rows = {"q": (p.span_q, p.heads_q), "k": (p.span_k, p.heads_kv), "v": (p.span_k, p.heads_kv)}
    return {
        side: (p.slabs, *rows[side]) if how == "token" else (p.batch, rows[side][1])
        for side, how in ({} if p.stored is None else p.stored.scaled).items()
    }


def place_of(name: str) -> tuple[int, int]:
    """(I, J) of a buffer `score.I.J`, `dscore.I.J` or `mask.I.J`: whose tensor it is, and which of those."""
    _, i, j = name.split(".")
    return int(i), int(j)


def mask_buffers(p: AttentionProblem) -> tuple[Buffer, ...]:
    """The tensors of predicates."""
    return tuple(
        Buffer(f"mask.{i}.{j}", shape, dtype, "input")
        for i, leaf in enumerate(p.leaves)
        for j, (shape, dtype) in enumerate(leaf.tensors)
    )


def block_shapes(p: AttentionProblem) -> dict[str, tuple[int, ...]]:
    """Of the block lists' tensors, by name; none where there are no lists."""
    return {} if p.blocks is None else p.blocks.shapes(p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)


def forward_buffers(p: AttentionProblem) -> tuple[Buffer, ...]:
    """The inputs, and the outputs out and lse."""
    out = Buffer("out", shapes(p)["out"], p.dtype.value, "output", like="q")
    return (*input_buffers(p), out, Buffer("lse", shapes(p)["lse"], p.sum_dtype, "output"))


def cached_buffers(problem: CachedProblem) -> tuple[Buffer, ...]:
    """Those of a cached forward: k and v are the pools, of bytes where they are `stored` so; `page_table`, `first_k`,
    `k_scale`, `v_scale` where there are such, and no v where values are columns of keys that do not lie apart.
    """
    p, pages, stored = problem.attention, problem.pages, problem.stored
    pool = (pages.pages, pages.page_size, p.heads_kv)
    shapes, dtype = (
        {"k": (*pool, problem.columns_k), "v": (*pool, p.head_dim_v)},
        None if stored is None else stored.buffer_dtype,
    )
    left_out = {"cu_seqlens_k", *(["v"] if problem.one_pool else [])}
    given = [
        replace(b, shape=shapes[b.name], dtype=dtype or b.dtype) if b.name in shapes else b
        for b in forward_buffers(p)
        if b.name not in left_out
    ]
    for side in "kv" if stored is not None else "":
        scaling = getattr(stored, f"{side}_scale")
        if scaling:
            given.append(Buffer(f"{side}_scale", pool if scaling == "token" else (p.batch, p.heads_kv), "fp32", "input"))
    if pages.table:
        given.append(Buffer("page_table", (p.batch, pages.columns), "int32", "input"))
    if pages.first:
        given.append(Buffer("first_k", (p.batch,), "int32", "input"))
    return tuple(given)


def append_buffers(p: AppendProblem) -> tuple[Buffer, ...]:
    """Those of an append; the pools are written over, as `k_out` and `v_out`, and so are the scales of tokens."""
    pool = p.dtype.value if p.stored is None else p.stored.buffer_dtype
    dtypes = {"slots": "int64", **dict.fromkeys(("seqused_k", "page_table", "cu_seqlens"), "int32")}
    dtypes |= {**{f"{n}_cache": pool for n in p.sides}, **{f"{n}_scale": "fp32" for n in p.sides}}
    given = [Buffer(n, shape, dtypes.get(n, p.dtype.value), "input") for n, shape in p.shapes().items()]
    shapes = p.shapes()
    made = [Buffer(f"{n}_out", shapes[f"{n}_cache"], pool, "output", over=f"{n}_cache") for n in p.sides]
    made += [
        Buffer(f"{n}_scale_out", shapes[f"{n}_scale"], "fp32", "output", over=f"{n}_scale")
        for n in p.sides
        if p.scaling(n) == "token"
    ]
    made += [Buffer("after", (p.items or 0,), "int32", "output")] if p.grows else []
    return (*given, *made)


def backward_buffers(p: AttentionProblem, gradients: Gradients, zeroed: Collection[str] = ()) -> tuple[Buffer, ...]:
    """The inputs, out, dout, lse (dlse), and the wanted gradients; those named in `zeroed` start at zero."""
    size = shapes(p)
    given = [Buffer(n, size["out"], p.dtype.value, "input") for n in ("out", "dout")]
    given += [Buffer(n, size["lse"], p.sum_dtype, "input") for n in (("lse", "dlse") if gradients.dlse else ("lse",))]
    return (*input_buffers(p), *given, *_gradients(p, gradients.wanted, zeroed, gradients.wide_keys))


def tangent_buffers(p: AttentionProblem, direction: Direction) -> tuple[Buffer, ...]:
    """The inputs, their tangents, out and lse, and the tangents of these."""
    made = forward_buffers(p)
    tangents = (replace(b, name=f"t{b.name}") for b in made if b.role == "output")
    return (*made, *_moved(p, direction), *tangents)


def second_buffers(p: AttentionProblem, direction: Direction) -> tuple[Buffer, ...]:
    """The inputs, their tangents, the gradients that arrive with theirs, and the wanted derivatives and tangents."""
    kinds = {"out": p.dtype.value, "lse": p.sum_dtype}
    arriving = [Buffer(n, shapes(p)[n[-3:]], kinds[n[-3:]], "input") for n in sorted(direction.given)]
    tangents = (
        Buffer(f"t{n}", shapes(p)[n], kinds[n], "output", like="q" if n == "out" else None)
        for n in ("out", "lse")
        if n in direction.wanted
    )
    return (*input_buffers(p), *_moved(p, direction), *arriving, *_gradients(p, direction.wanted), *tangents)


def statistics_buffers(p: AttentionProblem, direction: Direction) -> tuple[Buffer, ...]:
    """The inputs, lse, and the wanted statistics: of rows `peak` and `entropy`, of keys `mass`."""
    outputs = list(row_statistics(p, direction.wanted))
    if "mass" in direction.wanted:
        outputs.append(Buffer("mass", (p.slabs, p.heads_q, p.span_k), p.sum_dtype, "output"))
    return (*input_buffers(p), Buffer("lse", shapes(p)["lse"], p.sum_dtype, "input"), *outputs)


def row_statistics(p: AttentionProblem, wanted: Collection[str]) -> tuple[Buffer, ...]:
    """Those of ROW_STATISTICS that are wanted."""
    return tuple(Buffer(n, shapes(p)["lse"], p.sum_dtype, "output") for n in ROW_STATISTICS if n in wanted)


def entropy_buffers(p: AttentionProblem, direction: Direction) -> tuple[Buffer, ...]:
    """The inputs, lse, the entropy with its gradient, and the wanted gradients of inputs."""
    given = (Buffer(n, shapes(p)["lse"], p.sum_dtype, "input") for n in ("lse", "entropy", "dentropy"))
    return (*input_buffers(p), *given, *_gradients(p, direction.wanted))


def _moved(p: AttentionProblem, direction: Direction) -> list[Buffer]:
    return [replace(b, name=f"t{b.name}") for b in input_buffers(p) if b.name in direction.moved]


def keys_dtype(p: AttentionProblem, wide: bool) -> str:
    """In which dk and dv are stored."""
    return "fp32" if wide and p.dtype.is_narrow else p.dtype.value


def _gradients(
    p: AttentionProblem, wanted: Collection[str], zeroed: Collection[str] = (), wide_keys: bool = False
) -> list[Buffer]:
    """Those of q, k and v that are wanted, of captured tensors and sinks that say so."""
    size, dtypes = shapes(p), {"q": p.dtype.value, **dict.fromkeys("kv", keys_dtype(p, wide_keys))}
    made = [Buffer(f"d{n}", size[n], dtypes[n], "output", like=n, zeroed=f"d{n}" in zeroed) for n in "qkv" if n in wanted]
    for i, spec in enumerate(p.score):
        for j, tensor in enumerate(spec.tensors):
            if tensor.grad:
                name = f"dscore.{i}.{j}"
                dtype = tensor.dtype if spec.kind.captured[j].broadcast else p.sum_dtype
                made.append(Buffer(name, tensor.shape, dtype, "output", zeroed=name in zeroed))
    if p.sink is not None and p.sink.grad:
        made.append(Buffer("dsink", p.sink.shape, p.sum_dtype, "output"))
    return made
