"""Programs of symbolic sizes: exported once, right at any batch and length; refused by name for CUDA's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from flashtile import Alibi, Band, Document, Dropout, InvalidProblem, KeyPadding, NotSupported, Prefix
from flashtile.jax import (
    cross_entropy,
    dot_product_attention,
    dot_product_attention_varlen,
    layer_norm,
    rms_norm,
    rotary,
    softmax,
    target,
)
from flashtile.jax.launch import HANDLER

SIZES = ({"b": 1, "t": 1, "s": 1}, {"b": 3, "t": 129, "s": 150})
F32, I32, BOOL = jnp.float32, jnp.int32, jnp.bool_
Spec = tuple[str, Any]
QKV: tuple[Spec, ...] = (("b, t, 4, 8", F32), ("b, s, 2, 8", F32), ("b, s, 2, 8", F32))
SELF: tuple[Spec, ...] = (("b, t, 4, 8", F32), ("b, t, 2, 8", F32), ("b, t, 2, 8", F32))
LENGTHS: tuple[Spec, ...] = (*QKV, ("b", I32), ("b", I32))
SLOPES = jnp.array([0.5, 0.25, 0.1, 0.05])


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out, lse = dot_product_attention(q, k, v, return_residual=True, **options)
    return out, jnp.where(jnp.isfinite(lse), lse, 0.0)


def low(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return attend(q, k, v, alignment="bottom-right", **options)


ATTENTIONS: dict[str, tuple[Callable[..., Any], tuple[Spec, ...]]] = {
    "full": (attend, QKV),
    "half": (attend, tuple((shape, jnp.bfloat16) for shape, _ in QKV)),
    "causal": (lambda *x: attend(*x, is_causal=True), SELF),
    "causal-cross": (lambda *x: attend(*x, is_causal=True), QKV),
    "causal-low": (lambda *x: low(*x, is_causal=True, softcap=3.0), QKV),
    "window": (lambda *x: attend(*x, local_window_size=(9, 3)), SELF),
    "window-low": (lambda *x: low(*x, local_window_size=(9, 3)), QKV),
    "lone": (lambda *x: low(*x, local_window_size=0), QKV),
    "lengths": (lambda q, k, v, m, n: attend(q, k, v, query_seq_lengths=m, key_value_seq_lengths=n), LENGTHS),
    "lengths-causal": (
        lambda q, k, v, m, n: attend(q, k, v, query_seq_lengths=m, key_value_seq_lengths=n, is_causal=True), LENGTHS,
    ),
    "lengths-low": (lambda q, k, v, n: low(q, k, v, key_value_seq_lengths=n, is_causal=True), LENGTHS[:4]),
    "mask": (lambda q, k, v, mask: attend(q, k, v, mask=mask), (*QKV, ("b, 1, t, s", BOOL))),
    "bias": (lambda q, k, v, bias: attend(q, k, v, bias=bias, is_causal=True), (*SELF, ("1, 4, t, t", F32))),
    "bias-of-keys": (lambda q, k, v, bias: attend(q, k, v, bias=bias), (*QKV, ("b, 1, 1, s", F32))),
    "slopes-sinks": (lambda q, k, v: low(q, k, v, score=(Alibi(SLOPES),), sinks=SLOPES, is_causal=True), QKV),
    "documents": (lambda q, k, v, ids: attend(q, k, v, attend_to=Document(ids) & Band(right=0)), (*SELF, ("b, t", I32))),
    "padding": (lambda q, k, v, keep: attend(q, k, v, attend_to=KeyPadding(keep)), (*QKV, ("b, s", BOOL))),
    "prefix": (lambda q, k, v, n: attend(q, k, v, attend_to=Prefix(n) | Band(right=0)), LENGTHS[:4]),
    "dropout": (lambda *x: attend(*x, dropout=Dropout(0.3, 5)), QKV),
    "three-axes": (attend, tuple((shape[3:], dtype) for shape, dtype in QKV)),
    "vmap": (jax.vmap(lambda *x: attend(*x, is_causal=True)), SELF),
    "vmap-one-by-one": (jax.vmap(lambda *x: attend(*x, dropout=Dropout(0.3, 5))), SELF),
    "learned-scale": (lambda q, k, v, scale: attend(q, k, v, scale=scale), (*QKV, ("", F32))),
}  # fmt: skip
OPS: dict[str, tuple[Callable[..., Any], tuple[Spec, ...]]] = {
    "layer_norm": (
        lambda x, w, r: layer_norm(x, w, residual=r, prenorm=True),
        (("b, t, 8", F32), ("8", F32), ("b, t, 8", F32)),
    ),
    "rms_norm": (rms_norm, (("b, t, 8", F32), ("8", F32))),
    "rotary": (
        lambda q, k, *tables: rotary(q, k, *map(jax.lax.stop_gradient, tables)),
        (("b, t, 4, 8", F32), ("b, t, 2, 8", F32), ("t, 4", F32), ("t, 4", F32)),
    ),
    "cross_entropy": (lambda x, labels: cross_entropy(x, labels, label_smoothing=0.1), (("b, t, 9", F32), ("b, t", I32))),
    "cross_entropy-none": (lambda x, labels: cross_entropy(x, labels, reduction="none"), (("b, t, 9", F32), ("b, t", I32))),
    "softmax": (lambda x: softmax(x, causal=True), (("b, 2, t, t", F32),)),
}
CALLS = {**ATTENTIONS, **OPS}


def shaped(specs: tuple[Spec, ...], scope: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope) if text else (), dtype) for text, dtype in specs]


def drawn(specs: tuple[Spec, ...], sizes: dict[str, int]) -> list[Any]:
    rng = np.random.default_rng(0)
    made = []
    for text, dtype in specs:
        shape = tuple(sizes[n] if n in sizes else int(n) for n in text.split(", ") if n)
        if dtype == F32 or dtype == jnp.bfloat16:
            made.append(jnp.asarray(rng.standard_normal(shape), dtype))
        else:
            made.append(jnp.asarray(rng.integers(0, 2 if dtype == BOOL else 9, shape), dtype))
    return made


def gradients(function: Callable[..., Any], specs: tuple[Spec, ...]) -> Callable[..., Any]:
    """What the function makes, and the gradients of its inputs."""
    which = tuple(i for i, (_, dtype) in enumerate(specs) if dtype in (F32, jnp.bfloat16))

    def loss(*given: Any) -> Any:
        made = function(*given)
        return sum((m.astype(F32) ** 2).sum() for m in jax.tree.leaves(made)), made

    return jax.jit(lambda *given: jax.grad(loss, which, has_aux=True)(*given))


@pytest.mark.parametrize("name", CALLS)
def test_any_size(name: str) -> None:
    function, specs = CALLS[name]
    program = gradients(function, specs)
    exported = export.export(program, platforms=["cpu"])(*shaped(specs, export.SymbolicScope()))
    exported = export.deserialize(exported.serialize())
    tolerance = 2e-2 if specs[0][1] == jnp.bfloat16 else 2e-5
    for sizes in SIZES:
        given = drawn(specs, sizes)
        for mine, known in zip(jax.tree.leaves(exported.call(*given)), jax.tree.leaves(program(*given)), strict=True):
            assert mine.shape == known.shape
            np.testing.assert_allclose(
                np.asarray(mine, np.float64),
                np.asarray(known, np.float64),
                atol=tolerance * max(1.0, float(jnp.abs(known).max())),
            )


def test_varlen_of_any_total() -> None:
    def call(q: Any, k: Any, v: Any, items: Any) -> Any:
        return dot_product_attention_varlen(q, k, v, items, is_causal=True, max_seqlen_q=64)

    specs: tuple[Spec, ...] = (("n, 4, 8", F32), ("n, 2, 8", F32), ("n, 2, 8", F32), ("i", I32))
    exported = export.export(jax.jit(call), platforms=["cpu"])(*shaped(specs, export.SymbolicScope(["i >= 2"])))
    for total, items in ((40, [0, 7, 40]), (300, [0, 60, 60, 99, 120]), (1, [0, 1])):
        q, k, v, _ = drawn(specs, {"n": total, "i": 1})
        given = q, k, v, jnp.array(items, jnp.int32)
        np.testing.assert_allclose(exported.call(*given), call(*given), atol=2e-5)


@pytest.mark.parametrize("name", ["causal", "layer_norm"])
def test_kernels_are_refused_by_the_sizes_names(name: str) -> None:
    function, specs = CALLS[name]
    check = export.DisabledSafetyCheck.custom_call(HANDLER)
    for platforms in (["cuda"], ["cpu", "cuda"]):
        with target("sm90"), pytest.raises(NotSupported, match=r"b.*t: symbolic sizes; kernels .*'xla', which takes any"):
            export.export(jax.jit(function), platforms=platforms, disabled_checks=[check])(
                *shaped(specs, export.SymbolicScope())
            )


def test_plain_jax_by_name_goes_to_cuda() -> None:
    function = jax.jit(lambda *x: dot_product_attention(*x, is_causal=True, implementation="xla"))
    exported = export.export(function, platforms=["cpu", "cuda"])(*shaped(SELF, export.SymbolicScope()))
    given = drawn(SELF, SIZES[1])
    np.testing.assert_allclose(exported.call(*given), function(*given), atol=2e-5)


def test_what_must_be_known() -> None:
    scope = export.SymbolicScope()
    for specs, message in (
        ((("2, 8, h, 8", F32),) * 3, "heads_q is h; it must be known: batch and lengths alone may be symbolic"),
        ((("2, 8, 4, d", F32),) * 3, "head_dim is d; it must be known"),
    ):
        with pytest.raises(InvalidProblem, match=message):
            export.export(jax.jit(dot_product_attention), platforms=["cpu"])(*shaped(specs, scope))
    with pytest.raises(NotSupported, match="one symbol for both, or alignment='bottom-right'"):
        export.export(jax.jit(lambda *x: attend(*x, local_window_size=3)), platforms=["cpu"])(*shaped(QKV, scope))
    with pytest.raises(InvalidProblem, match="key has batch c and query has b"):
        export.export(jax.jit(attend), platforms=["cpu"])(*shaped((QKV[0], ("c, s, 2, 8", F32), QKV[2]), scope))
