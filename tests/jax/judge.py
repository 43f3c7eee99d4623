"""Attention cases for JAX, their arrays, and the rule that results are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashtile import Alibi, Dropout
from flashtile.jax import dot_product_attention
from flashtile.jax.dropout import keep, seed_words
from tests.jax.quadratic import attention

FACTOR, FLOOR_ULP = 1.5, 2.0  # of plain JAX's error; of the largest element
LSE_TOLERANCE = 1e-5
DROPOUT = Dropout(0.3, 12345678901)
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call; a bias and a mask are spelled by their axes, each 1 or a letter of bnts."""

    name: str
    batch: int = 2
    seqlen_q: int = 40
    seqlen_k: int = 40
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    dtype: str = "float32"
    bias: str = ""
    mask: str = ""
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    sinks: bool = False
    slopes: bool = False
    dropout: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def shape(self, spelled: str) -> tuple[int, ...]:
        sizes = {"b": self.batch, "n": self.heads, "t": self.seqlen_q, "s": self.seqlen_k, "1": 1}
        return tuple(sizes[c] for c in spelled)

    def leaves(self) -> Arrays:
        rng = np.random.default_rng(0)
        made: Arrays = {
            "q": rng.standard_normal((self.batch, self.seqlen_q, self.heads, self.head_dim)),
            "k": rng.standard_normal((self.batch, self.seqlen_k, self.heads_kv, self.head_dim)),
            "v": rng.standard_normal((self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v)),
        }
        if self.bias:
            made["bias"] = rng.standard_normal(self.shape(self.bias))
        made = {name: jnp.asarray(x, self.dtype) for name, x in made.items()}
        if self.sinks:
            made["sinks"] = jnp.asarray(rng.standard_normal(self.heads), jnp.float32)
        if self.slopes:
            made["slopes"] = jnp.asarray(rng.random(self.heads) / 4, jnp.float32)
        return made

    def fixed(self) -> Arrays:
        """Arrays that have no gradient."""
        rng = np.random.default_rng(1)
        made: Arrays = {"mask": jnp.asarray(rng.random(self.shape(self.mask)) < 0.6)} if self.mask else {}
        for name, lengths in (("query_seq_lengths", self.lengths_q), ("key_value_seq_lengths", self.lengths_k)):
            if lengths:
                made[name] = jnp.array(lengths, jnp.int32)
        return made

    def cotangents(self) -> tuple[Any, Any]:
        rng = np.random.default_rng(2)
        rows = (self.batch, self.seqlen_q, self.heads)
        return jnp.asarray(rng.standard_normal((*rows, self.head_dim_v)), self.dtype), jnp.asarray(rng.standard_normal(rows))

    def ours(self, leaves: Arrays, implementation: str | None = None, **more: Any) -> Any:
        extras = {**self.options, **more}
        if self.slopes:
            extras["score"] = (Alibi(leaves["slopes"]),)
        if self.dropout:
            extras["dropout"] = DROPOUT
        return dot_product_attention(
            leaves["q"], leaves["k"], leaves["v"], leaves.get("bias"), return_residual=True, sinks=leaves.get("sinks"),
            implementation=implementation, **self.fixed(), **extras,
        )  # fmt: skip

    def plain(self, leaves: Arrays) -> Any:
        options = {k: v for k, v in self.options.items() if k != "alignment"}
        options["bottom_right"] = self.options.get("alignment") == "bottom-right"
        if self.dropout:
            sizes = (self.batch, self.heads, self.seqlen_q, self.seqlen_k)
            index = (jnp.arange(n, dtype=jnp.int32).reshape(-1, *(1,) * (3 - a)) for a, n in enumerate(sizes))
            options |= dict(p=DROPOUT.p, keep=keep(DROPOUT.p, *index, self.heads, seed_words(DROPOUT)))
        named = {name: leaves.get(name) for name in ("sinks", "slopes")}
        return attention(leaves["q"], leaves["k"], leaves["v"], leaves.get("bias"), **self.fixed(), **named, **options)


def evaluate(function: Callable[[Arrays], Any], leaves: Arrays, cotangents: tuple[Any, Any]) -> Arrays:
    """out, lse and the gradient of every leaf."""

    def program(leaves: Arrays, dout: Any, dlse: Any) -> Arrays:
        (out, lse), pull = jax.vjp(function, leaves)
        (grads,) = pull((dout.astype(out.dtype), jnp.where(jnp.isfinite(lse), dlse, 0.0).astype(lse.dtype)))
        return {"out": out, "lse": lse, **{f"d{name}": grad for name, grad in grads.items()}}

    return jax.tree.map(np.asarray, jax.jit(program)(leaves, *cotangents))


def expected(case: Case, wide: bool) -> Arrays:
    """What plain JAX makes of the case's arrays, once for all who judge it: in float64 the truth, or in their own dtype."""
    if (spelled := (repr(case), wide)) not in _EXPECTED:
        arrays = case.leaves(), case.cotangents()
        with jax.enable_x64(wide):
            if wide:
                arrays = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), arrays)
            _EXPECTED[spelled] = evaluate(case.plain, *arrays)
    return _EXPECTED[spelled]


_EXPECTED: dict[tuple[str, bool], Arrays] = {}


def judge(case: Case, got: Arrays) -> None:
    """Assert the accuracy rule of tests/judge.py for every array; the truth is float64."""
    found = []
    for name, truth in expected(case, wide=True).items():
        mine = np.asarray(got[name], np.float64)
        assert mine.shape == truth.shape, name
        if name == "lse":
            assert np.array_equal(mine == -np.inf, truth == -np.inf)
            alive = truth != -np.inf
            off = np.abs(mine - truth)[alive] / np.maximum(np.abs(truth[alive]), 1.0)
            assert not off.size or off.max() <= LSE_TOLERANCE, off.max()
            continue
        assert np.isfinite(mine).all(), name
        if not mine.size:
            continue
        floor = FLOOR_ULP * float(jnp.finfo(case.dtype).eps) * np.abs(truth).max()
        off = np.abs(mine - truth).max()
        if off <= floor:  # what plain JAX is off by takes a program more to compile
            continue
        allowed = max(FACTOR * np.abs(np.asarray(expected(case, wide=False)[name], np.float64) - truth).max(), floor)
        if off > allowed:
            found.append(f"{name} is off by {off:.3g}, allowed {allowed:.3g}")
    assert not found, found


def cases() -> Iterator[Case]:
    base = Case("")
    for dtype in ("float32", "float16", "bfloat16"):
        yield replace(base, name=f"full-{dtype}", dtype=dtype, seqlen_k=150)
        yield replace(base, name=f"causal-{dtype}", dtype=dtype, options={"is_causal": True})
    causal = {"is_causal": True}
    low = {**causal, "alignment": "bottom-right"}
    yield replace(base, name="top-left", seqlen_k=72, options=causal)
    yield replace(base, name="bottom-right", seqlen_k=72, options=low)
    yield replace(base, name="top-left-long-queries", seqlen_q=72, options=causal)
    yield replace(base, name="bottom-right-long-queries", seqlen_q=72, options=low)
    yield replace(base, name="window", seqlen_k=60, options={"local_window_size": (9, 3)})
    yield replace(base, name="window-number", seqlen_k=60, options={"local_window_size": 5, "alignment": "bottom-right"})
    yield replace(base, name="mqa-head_dim_v", heads=3, heads_kv=1, head_dim_v=24, options=causal)
    yield replace(base, name="scale", options={"scale": -0.7})
    yield replace(base, name="one-query", seqlen_q=1, seqlen_k=9, options=low)
    for bias in ("bnts", "1nts", "b1ts", "bn1s", "1n11", "11t1"):
        yield replace(base, name=f"bias-{bias}", bias=bias, seqlen_k=150 if bias == "bnts" else 40, options=causal)
    for mask in ("bnts", "11ts", "b11s"):
        yield replace(base, name=f"mask-{mask}", mask=mask)
    yield replace(base, name="lengths", lengths_q=(40, 7), lengths_k=(0, 33))
    yield replace(base, name="lengths-top-left", lengths_q=(40, 7), lengths_k=(30, 11), options=causal)
    yield replace(base, name="lengths-bottom-right", lengths_q=(40, 7), lengths_k=(30, 11), options=low)
    yield replace(base, name="softcap", dtype="float16", options={**causal, "softcap": 2.0})
    yield replace(base, name="sinks", sinks=True, options=causal)
    yield replace(base, name="slopes", slopes=True, options=low, seqlen_k=60)
    yield replace(base, name="dropout", dropout=True, options=causal)
    yield replace(
        base, name="all", bias="1nts", mask="b11s", sinks=True, slopes=True, dropout=True, options={**causal, "softcap": 3.0}
    )
    yield replace(base, name="all-bfloat16", dtype="bfloat16", bias="1nts", sinks=True, dropout=True, options=causal)


CASES = tuple(cases())
