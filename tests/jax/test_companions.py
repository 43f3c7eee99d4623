"""Norms, rotary, cross-entropy and softmax in plain JAX, against numpy's float64; their programs for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flashtile import InvalidProblem, NotSupported
from flashtile.jax import cross_entropy, layer_norm, rms_norm, rotary, softmax, target
from flashtile.jax.launch import HANDLER

HALF = 3


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def plain_norm(kind: str) -> Callable[..., Any]:
    def function(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        h = x + residual
        centred = h - h.mean(-1, keepdims=True) if kind == "layer" else h
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias, h

    return function


def plain_cross_entropy(logits: Any, softcap: float | None = None, weight: Any = None) -> Any:
    x, weight = 0.7 * logits, jnp.ones(9) if weight is None else weight
    x = x if softcap is None else softcap * jnp.tanh(x / softcap)
    lse, counts = jax.nn.logsumexp(x, axis=-1, keepdims=True), LABELS != -100
    index = jnp.where(counts, LABELS, 0)
    own = weight[index]
    loss = 0.9 * own * jnp.take_along_axis(lse - x, index[..., None], axis=-1)[..., 0] + 0.1 * (weight * (lse - x)).mean(-1)
    square = jnp.where(counts, 0.01 * lse[..., 0] ** 2, 0.0).sum() / counts.sum()
    return jnp.where(counts, loss, 0.0).sum() / jnp.where(counts, own, 0.0).sum() + square


def plain_rotary(q: Any, k: Any) -> Any:
    angle = jnp.asarray(ANGLES, q.dtype)[2:7][None, :, None]

    def turned(x: Any) -> Any:
        pairs = x[..., :HALF] + 1j * x[..., HALF : 2 * HALF]
        made = pairs * jnp.exp(1j * angle)
        return jnp.concatenate([made.real, made.imag, x[..., 2 * HALF :]], -1)

    return turned(q), turned(k)


def plain_softmax(x: Any) -> Any:
    hidden = MASK | (jnp.arange(7) > jnp.arange(5)[:, None] + 2)
    weight = jnp.where(hidden, 0.0, jnp.exp(0.5 * x - (0.5 * x).max(-1, keepdims=True)))
    total = weight.sum(-1, keepdims=True)
    return jnp.where(total > 0, weight / jnp.where(total > 0, total, 1.0), 0.0)


LABELS = jnp.array([[1, -100, 8], [0, 3, 3]], jnp.int32)
ANGLES = np.outer(np.arange(9), [1.0, 0.3, 0.05])
COS, SIN = jnp.asarray(np.cos(ANGLES), jnp.float32), jnp.asarray(np.sin(ANGLES), jnp.float32)
MASK = jnp.asarray(np.random.default_rng(0).random((2, 1, 5, 7)) < 0.5).at[0, 0, 1].set(True)
PLACES = jnp.broadcast_to(jnp.arange(2, 7, dtype=jnp.int32), (2, 5))

ROWS = ((2, 3, 40), (40,), (40,), (2, 3, 40))
HEADS = ((2, 5, 4, 8), (2, 5, 2, 8))
SMOOTH = dict(label_smoothing=0.1, z_loss=0.01, logit_scale=0.7)
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "layer_norm": (lambda x, w, b, r: layer_norm(x, w, b, residual=r, prenorm=True), plain_norm("layer"), ROWS),
    "rms_norm": (lambda x, w, b, r: rms_norm(x, w, b, 1e-5, residual=r, prenorm=True), plain_norm("rms"), ROWS),
    "cross_entropy": (lambda x: cross_entropy(x, LABELS, **SMOOTH), plain_cross_entropy, ((2, 3, 9),)),
    "cross_entropy-weighted": (
        lambda x: cross_entropy(x, LABELS, softcap=3.0, weight=jnp.linspace(0.5, 2.0, 9), **SMOOTH),
        lambda x: plain_cross_entropy(x, 3.0, jnp.linspace(0.5, 2.0, 9)),
        ((2, 3, 9),),
    ),
    "rotary": (lambda q, k: rotary(q, k, COS, SIN, offset=2), plain_rotary, HEADS),
    "rotary-positions": (lambda q, k: rotary(q, k, COS, SIN, positions=PLACES), plain_rotary, HEADS),
    "softmax": (lambda x: softmax(x, MASK, scale=0.5, causal=True), plain_softmax, ((2, 3, 5, 7),)),
}


def evaluate(function: Callable[..., Any], leaves: Any) -> Any:
    made, pull = jax.vjp(lambda *x: jax.tree.leaves(function(*x)), *leaves)
    flows = [jnp.cos(jnp.arange(m.size, dtype=jnp.float32)).astype(m.dtype).reshape(m.shape) for m in made]
    return made, pull(flows)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPS)
def test_op(name: str, dtype: Any) -> None:
    function, plain, shapes = OPS[name]
    leaves = tuple(normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    got = jax.jit(lambda *x: evaluate(function, x))(*leaves)
    with jax.enable_x64(True):
        wide = tuple(jnp.asarray(np.asarray(x, np.float64)) for x in leaves)
        want = evaluate(plain, wide)
    tolerance = 3e-5 if dtype == jnp.float32 else 3e-2
    for mine, truth in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.shape == truth.shape
        scale = max(1.0, float(np.abs(truth).max()))
        np.testing.assert_allclose(np.asarray(mine, np.float64), np.asarray(truth), atol=tolerance * scale)


@pytest.mark.parametrize("name", OPS)
def test_explicit_axes_of_a_mesh(name: str) -> None:
    function, _, shapes = OPS[name]
    value = jax.value_and_grad(lambda *x: sum((m**2).sum() for m in jax.tree.leaves(function(*x))), range(len(shapes)))
    leaves = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    specs = [PartitionSpec("data") if x.ndim > 1 else PartitionSpec() for x in leaves]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, specs, strict=True)]
    got = jax.jit(value)(*placed)
    assert [jax.typeof(x) for x in got[1]] == [jax.typeof(x) for x in placed]
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(value(*leaves)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * max(1.0, float(jnp.abs(theirs).max())), rtol=1e-5)


def test_vmap_of_grad_equals_the_loop() -> None:
    x, weight = normal(3, 4, 20), normal(20, seed=1)
    each = jax.grad(lambda x, w: (layer_norm(x, w) ** 3).sum(), (0, 1))
    for mine, theirs in zip(
        jax.vmap(each, (0, None))(x, weight), zip(*(each(row, weight) for row in x), strict=True), strict=True
    ):
        np.testing.assert_allclose(mine, jnp.stack(theirs), atol=1e-5)


def test_ignored_rows_and_strange_labels() -> None:
    logits = normal(3, 5).at[0].set(jnp.nan)
    loss, grad = jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([-100, 1, 2], jnp.int32)))(logits)
    assert jnp.isfinite(loss)
    assert not grad[0].any()
    assert jnp.isfinite(grad).all()
    assert jnp.isnan(cross_entropy(normal(1, 5), jnp.array([7], jnp.int32)))


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("label", [5, -1, 2**31 - 1, -(2**31)])
def test_the_gradient_beside_a_label_that_is_no_class(label: int, reduction: str) -> None:
    """NaN in that row, as the kernels give; right in the others; nothing of rows that are ignored."""
    logits, flow = normal(5, 5), jnp.arange(1.0, 6.0) if reduction == "none" else 1.0
    labels = jnp.array([0, 1, 2, label, -100], jnp.int32)
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": 0.7}):
        loss = lambda x, labels: (flow * cross_entropy(x, labels, reduction=reduction, **options)).sum()  # noqa: B023, E731
        value, grad = jax.value_and_grad(loss)(logits, labels)
        assert jnp.isnan(value)
        assert jnp.isnan(grad[3]).all()
        known = jax.grad(loss)(logits, labels.at[3].set(3))
        np.testing.assert_allclose(grad[:3], known[:3], atol=1e-6)
        assert not grad[4].any()


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("options", [{}, SMOOTH, {"softcap": 1.5}, {"softcap": 1.5, **SMOOTH}], ids=str)
def test_weights_of_classes_and_a_softcap(options: dict[str, float], reduction: str) -> None:
    logits, weight = normal(6, 9), jnp.asarray([0.5, 2.0, 0.0, 1.0, 3.0, 0.1, 1.0, 1.0, 0.7])
    labels, flow = jnp.array([1, 4, -100, 0, 2, 8], jnp.int32), jnp.arange(1.0, 7.0) if reduction == "none" else 1.0

    def plain(logits: Any, weight: Any) -> Any:
        smooth, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
        x = options.get("logit_scale", 1.0) * logits
        if "softcap" in options:
            x = options["softcap"] * jnp.tanh(x / options["softcap"])
        share, counts = -jax.nn.log_softmax(x, axis=-1), labels != -100
        index = jnp.where(counts, labels, 0)
        own = jnp.where(counts, weight[index], 0.0)
        loss = (1 - smooth) * own * share[jnp.arange(6), index] + jnp.where(counts, smooth * (weight * share).mean(1), 0.0)
        square = jnp.where(counts, z_loss * jax.nn.logsumexp(x, axis=-1) ** 2, 0.0)
        if reduction == "mean":
            return loss.sum() / own.sum() + square.sum() / counts.sum()
        return (flow * (loss + square)).sum()

    def ours(logits: Any, weight: Any) -> Any:
        return (flow * cross_entropy(logits, labels, weight=weight, reduction=reduction, **options)).sum()

    for mine, truth in zip(jax.value_and_grad(ours)(logits, weight), jax.value_and_grad(plain)(logits, weight), strict=True):
        np.testing.assert_allclose(mine, truth, atol=2e-6 * max(1.0, float(jnp.abs(truth).max())))
    np.testing.assert_allclose(
        ours(logits, jnp.ones(9)), (flow * cross_entropy(logits, labels, reduction=reduction, **options)).sum(), rtol=1e-6
    )


def test_what_ignored_rows_hold_reaches_no_gradient() -> None:
    labels = jnp.array([0, -100, 2], jnp.int32)
    for options in ({}, {"softcap": 2.0}, {"weight": jnp.arange(5.0)}, SMOOTH):
        gradient = jax.grad(lambda x: cross_entropy(x, labels, **options))  # noqa: B023
        for rubbish in (jnp.nan, jnp.inf, -jnp.inf):
            np.testing.assert_array_equal(gradient(normal(3, 5).at[1].set(rubbish)), gradient(normal(3, 5)))


@pytest.mark.parametrize("weight", [None, np.ones(5, np.float32)], ids=["", "weighted"])
def test_the_mean_of_no_row_is_nan_and_has_no_gradient(weight: Any) -> None:
    loss, grad = jax.value_and_grad(lambda x: cross_entropy(x, jnp.full(3, -100, jnp.int32), weight=weight))(normal(3, 5))
    assert jnp.isnan(loss)
    assert not grad.any()


def test_none_and_lse() -> None:
    logits, labels = normal(2, 3, 9), jnp.ones((2, 3), jnp.int32)
    loss, lse = cross_entropy(logits, labels, reduction="none", return_lse=True)
    np.testing.assert_allclose(lse, jax.nn.logsumexp(logits, axis=-1), atol=1e-6)
    np.testing.assert_allclose(loss, lse - logits[..., 1], atol=1e-6)


def test_a_checkpoint_after_gradients_of_other_inputs() -> None:
    loss = lambda x, weight: (rms_norm(x, weight) ** 2).sum()  # noqa: E731
    given = normal(3, 8), normal(8)
    want = jax.grad(loss, (0, 1))(*given)
    jax.grad(loss)(*given)
    for mine, exact in zip(jax.grad(jax.checkpoint(loss), (0, 1))(*given), want, strict=True):
        np.testing.assert_allclose(mine, exact, rtol=1e-6)


def test_second_derivatives_are_refused() -> None:
    with pytest.raises(NotSupported, match="second derivatives of norm"):
        jax.hessian(lambda x: layer_norm(x).sum())(normal(8))


def test_errors() -> None:
    x = normal(2, 8)
    for call, message in (
        (lambda: layer_norm(x, normal(7)), r"weight has shape \(7,\)"),
        (lambda: layer_norm(x, residual=normal(3, 8)), "residual has shape"),
        (lambda: rms_norm(x, implementation="hopper"), "implementation is 'hopper'"),
        (lambda: cross_entropy(x, jnp.zeros(3, jnp.int32)), r"labels have shape \(3,\)"),
        (lambda: cross_entropy(x, jnp.zeros(2)), "labels is fp32"),
        (lambda: cross_entropy(x, jnp.zeros(2, jnp.int32), label_smoothing=2.0), r"^label_smoothing is 2\.0"),
        (lambda: layer_norm(x.astype(jnp.int16)), "x is int16; it must be fp16 or bf16 or fp32"),
        (lambda: layer_norm(x[:, :0]), "x must be there, with a last axis of at least 1"),
        (lambda: cross_entropy(x[:, :0], jnp.zeros(2, jnp.int32)), "logits must be there, with a last axis of at least 1"),
        (lambda: cross_entropy(x, jnp.zeros(2, jnp.int32), weight=normal(7)), r"weight has shape \(7,\)"),
        (lambda: cross_entropy(x, jnp.zeros(2, jnp.int32), softcap=0.0), r"softcap is 0\.0"),
        (lambda: softmax(x[0]), "of two to four axes"),
        (lambda: softmax(x, normal(3, 8) > 0), "mask has shape"),
        (lambda: rotary(normal(1, 20, 2, 8), None, COS, SIN), "positions reach 19"),
    ):
        with pytest.raises(InvalidProblem, match=message):
            call()


def test_a_gradient_that_there_is_none_of_is_refused() -> None:
    """Zero would be silent: a learned weight of classes, a learned table."""
    logits, labels, weight, q = normal(2, 5), jnp.array([1, 2], jnp.int32), jnp.ones(5), normal(1, 5, 2, 8)
    with pytest.raises(InvalidProblem, match=r"weight is differentiated.*stop_gradient\(weight\)"):
        jax.grad(lambda w: cross_entropy(logits, labels, weight=w))(weight)
    for i, name in enumerate(("cos", "sin")):
        with pytest.raises(InvalidProblem, match=rf"{name} is differentiated.*stop_gradient\({name}\)"):
            jax.jit(jax.grad(lambda *tables: rotary(q, None, *tables).sum(), i))(COS, SIN)
    both = jax.grad(lambda q, cos: rotary(q, None, jax.lax.stop_gradient(cos), SIN).sum(), (0, 1))(q, COS)
    assert both[0].any()
    assert not both[1].any()


def test_all_lies_beyond_tables_of_no_row() -> None:
    turned = rotary(normal(1, 5, 2, 8), None, COS[:0], SIN[:0], positions=jnp.zeros((1, 5), jnp.int32))
    assert jnp.isnan(turned[..., : 2 * COS.shape[1]]).all()


@pytest.mark.compiles
@pytest.mark.parametrize("name", OPS)
def test_a_program_for_an_h100(name: str) -> None:
    function, _, shapes = OPS[name]
    leaves = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    check = jax.export.DisabledSafetyCheck.custom_call(HANDLER)
    with target("sm90"):
        program = jax.jit(lambda *x: evaluate(function, x))
        exported = jax.export.export(program, platforms=["cuda"], disabled_checks=[check])(*leaves)
    assert exported.mlir_module().count(HANDLER) >= 2
