"""linear_cross_entropy in plain JAX, against float64 through its logits; its programs for CUDA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashtile import InvalidProblem, NotSupported
from flashtile.jax import linear_cross_entropy, target
from flashtile.jax.launch import HANDLER

CLASSES, HIDDEN = 600, 8
LABELS = jnp.array([[0, 599, -100], [256, 300, 511]], jnp.int32)  # of all three chunks, at their ends
OPTIONS = dict(label_smoothing=0.1, z_loss=0.01, logit_scale=0.7, softcap=1.5)
SMALL: dict[str, Any] = dict(logits_bytes=0)  # 256 classes at a time


def draw(*names: str, dtype: Any = jnp.float32) -> dict[str, Any]:
    shapes = {"x": (2, 3, HIDDEN), "weight": (CLASSES, HIDDEN), "bias": (CLASSES,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    made = {name: jax.random.normal(key, shape).astype(dtype) for (name, shape), key in zip(shapes.items(), keys, strict=True)}
    return {name: made[name] for name in ("x", "weight", *names)}


def through_logits(
    x: Any, weight: Any, bias: Any, own: Any, reduction: str, *, label_smoothing: float = 0.0, z_loss: float = 0.0,
    logit_scale: float = 1.0, softcap: float | None = None,
) -> Any:  # fmt: skip
    logits = (x @ weight.T + (0.0 if bias is None else bias)) * logit_scale
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    own = jnp.ones(CLASSES) if own is None else own
    share, counts = -jax.nn.log_softmax(logits, axis=-1), LABELS != -100
    index = jnp.where(counts, LABELS, 0)
    of_label = jnp.where(counts, own[index], 0.0)
    loss = (1.0 - label_smoothing) * of_label * jnp.take_along_axis(share, index[..., None], axis=-1)[..., 0]
    loss = loss + jnp.where(counts, label_smoothing * (own * share).mean(-1), 0.0)
    square = jnp.where(counts, z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0)
    if reduction == "mean":
        return loss.sum() / of_label.sum() + square.sum() / counts.sum()
    return loss + square if reduction == "none" else (loss + square).sum()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    ("names", "weighted", "options"),
    [((), False, {}), (("bias",), False, {}), ((), True, {}), (("bias",), True, OPTIONS)],
    ids=["plain", "bias", "weighted", "all"],
)
def test_loss_and_gradients(names: tuple[str, ...], weighted: bool, options: dict[str, float], reduction: str) -> None:
    own = jnp.linspace(0.1, 2.0, CLASSES) if weighted else None
    flow = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3) if reduction == "none" else np.float32(1.5)
    given = draw(*names)

    def ours(t: Any) -> Any:
        made = linear_cross_entropy(
            t["x"], t["weight"], LABELS, bias=t.get("bias"), class_weight=own, reduction=reduction, **options, **SMALL
        )
        return (flow * made).sum(), made

    (_, loss), grads = jax.value_and_grad(ours, has_aux=True)(given)
    assert loss.shape == (LABELS.shape if reduction == "none" else ())
    assert loss.dtype == jnp.float32
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in given.items()}
        truth = lambda t: through_logits(t["x"], t["weight"], t.get("bias"), own, reduction, **options)  # noqa: E731
        want, pull = jax.vjp(truth, wide)
        (exact,) = pull(jnp.broadcast_to(jnp.asarray(flow, jnp.float64), want.shape))
    for mine, theirs in ((loss, want), *((grads[name], exact[name]) for name in given)):
        np.testing.assert_allclose(mine, theirs, atol=5e-6 * max(1.0, float(np.abs(theirs).max())))


def test_16_bits_and_a_single_chunk() -> None:
    given = draw("bias", dtype=jnp.bfloat16)
    for options in (SMALL, {}):
        loss, grads = jax.value_and_grad(
            lambda t: linear_cross_entropy(t["x"], t["weight"], LABELS, bias=t["bias"], **options)  # noqa: B023
        )(given)
        wide = {name: x.astype(jnp.float32) for name, x in given.items()}
        want, exact = jax.value_and_grad(lambda t: through_logits(t["x"], t["weight"], t["bias"], None, "mean"))(wide)
        np.testing.assert_allclose(loss, want, rtol=1e-2)
        for name, grad in grads.items():
            assert grad.dtype == jnp.bfloat16
            np.testing.assert_allclose(grad.astype(jnp.float32), exact[name], atol=2e-2 * float(jnp.abs(exact[name]).max()))


def test_one_chunk_at_a_time_of_all_logits() -> None:
    """No array of the program holds more than a chunk's logits; with memory for all there is one chunk."""

    def sizes(logits_bytes: int) -> set[int]:
        x, weight, labels = jnp.ones((64, 4)), jnp.ones((2048, 4)), jnp.zeros(64, jnp.int32)
        loss = lambda x, w: linear_cross_entropy(x, w, labels, logits_bytes=logits_bytes)  # noqa: E731
        text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, weight).as_text()
        return {n for n in (256, 512, 2048) if f"tensor<64x{n}xf32>" in text}

    assert sizes(0) == {256}
    assert sizes(64 * 512 * 4) == {512}
    assert sizes(2**30) == {2048}


def test_labels_that_are_ignored_or_no_class() -> None:
    x, weight = jax.random.normal(jax.random.key(1), (5, HIDDEN)), draw()["weight"]
    loss = lambda x, labels: linear_cross_entropy(x, weight, labels, reduction="sum", **SMALL)  # noqa: E731
    labels = jnp.array([0, 300, 599, 7, -100], jnp.int32)
    clean = jax.grad(loss)(x, labels)
    np.testing.assert_array_equal(jax.grad(loss)(x.at[4].set(jnp.nan), labels), clean)
    for label in (600, -1, 2**31 - 1, -(2**31)):
        value, grad = jax.value_and_grad(loss)(x, labels.at[3].set(label))
        assert jnp.isnan(value)
        assert jnp.isnan(grad[3]).all()
        np.testing.assert_allclose(grad[:3], clean[:3], atol=1e-6)
        assert not grad[4].any()
    assert jnp.isnan(linear_cross_entropy(x, weight, jnp.full(5, -100, jnp.int32)))


def test_transformations() -> None:
    given = draw("bias")
    loss = lambda x: linear_cross_entropy(x, given["weight"], LABELS[0], bias=given["bias"], reduction="sum", **SMALL)  # noqa: E731
    want = jnp.stack([jax.grad(loss)(x) for x in given["x"]])
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(given["x"]), want, atol=1e-6)
    kept = jax.checkpoint_policies.save_only_these_names("flashtile_linear_cross_entropy")
    np.testing.assert_allclose(jax.grad(jax.checkpoint(loss, policy=kept))(given["x"][0]), want[0], atol=1e-6)
    scale = lambda s: linear_cross_entropy(  # noqa: E731
        given["x"], given["weight"], LABELS, bias=given["bias"], logit_scale=s, **SMALL
    )
    slope = (scale(0.701) - scale(0.699)) / 0.002
    np.testing.assert_allclose(jax.grad(scale)(0.7), slope, rtol=1e-2)
    with pytest.raises(NotSupported, match="second derivatives of linear_cross_entropy"):
        jax.hessian(loss)(given["x"][0])


def test_symbolic_rows() -> None:
    (rows,) = jax.export.symbolic_shape("n")
    weight = draw()["weight"]
    program = jax.jit(jax.value_and_grad(lambda x, labels: linear_cross_entropy(x, weight, labels)))
    shapes = jax.ShapeDtypeStruct((rows, HIDDEN), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    x, labels = jax.random.normal(jax.random.key(1), (5, HIDDEN)), jnp.arange(5, dtype=jnp.int32)
    got = jax.export.export(program)(*shapes).call(x, labels)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(program(x, labels)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_errors() -> None:
    x, weight, bias = draw("bias").values()
    for options, message in (
        (dict(weight=weight[:, :7]), r"weight is float32 \(600, 7\)"),
        (dict(weight=weight.astype(jnp.bfloat16)), "weight is bfloat16"),
        (dict(x=x.astype(jnp.int32)), "x is int32"),
        (dict(labels=LABELS[0]), r"labels have shape \(3,\)"),
        (dict(labels=LABELS * 1.0), "labels is fp32"),
        (dict(bias=bias[:5]), r"bias is float32 \(5,\)"),
        (dict(class_weight=bias[:5]), r"class_weight has shape \(5,\)"),
        (dict(reduction="max"), "reduction is 'max'"),
        (dict(label_smoothing=2.0), r"^label_smoothing is 2\.0"),
        (dict(softcap=0.0), r"softcap is 0\.0"),
        (dict(logits_bytes=-1), "logits_bytes is -1"),
        (dict(implementation="hopper"), "implementation is 'hopper'"),
    ):
        with pytest.raises(InvalidProblem, match=message):
            linear_cross_entropy(**{**dict(x=x, weight=weight, labels=LABELS), **options})  # type: ignore[arg-type]
    with pytest.raises(InvalidProblem, match=r"class_weight is differentiated.*stop_gradient\(class_weight\)"):
        jax.grad(lambda own: linear_cross_entropy(x, weight, LABELS, class_weight=own))(jnp.ones(CLASSES))


@pytest.mark.compiles
def test_a_program_for_an_h100() -> None:
    """Each chunk's logits go through kernels, forward and backward."""

    def loss(x: Any, weight: Any, bias: Any, own: Any) -> Any:
        return linear_cross_entropy(x, weight, LABELS, bias=bias, class_weight=own, **OPTIONS, **SMALL)

    shapes = [(2, 3, HIDDEN), (CLASSES, HIDDEN), (CLASSES,), (CLASSES,)]
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    check = jax.export.DisabledSafetyCheck.custom_call(HANDLER)
    with target("sm90"):
        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        exported = jax.export.export(program, platforms=["cuda"], disabled_checks=[check])(*given)
    assert exported.mlir_module().count(HANDLER) >= 6
