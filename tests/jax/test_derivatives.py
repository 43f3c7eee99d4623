"""Forward mode, second derivatives and what an ordinary gradient costs, in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad
from jax.sharding import Mesh, PartitionSpec

from flashtile import Alibi, NotSupported
from flashtile.jax import dot_product_attention, dot_product_attention_varlen


def normal(*shape: int, seed: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def inputs(batch: int = 2) -> tuple[Any, ...]:
    """q, k, v, bias, slopes, sinks."""
    shapes = ((batch, 7, 4, 8), (batch, 7, 2, 8), (batch, 7, 2, 8), (1, 4, 7, 7), (4,), (4,))
    return tuple(normal(*shape, seed=i) for i, shape in enumerate(shapes))


def plain(q: Any, k: Any, v: Any, bias: Any, slopes: Any, sinks: Any) -> tuple[Any, Any]:
    """The definition."""
    k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]) + bias
    scores = 4.0 * jnp.tanh(scores / 4.0)
    ahead = jnp.arange(7)[None] - jnp.arange(7)[:, None]
    scores = jnp.where(ahead <= 0, scores - slopes[:, None, None] * jnp.abs(ahead), -jnp.inf)
    lse = jnp.logaddexp(jax.nn.logsumexp(scores, -1), sinks[:, None])
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse[..., None]), v), jnp.swapaxes(lse, 1, 2)


def ours(q: Any, k: Any, v: Any, bias: Any, slopes: Any, sinks: Any, **options: Any) -> tuple[Any, Any]:
    how = dict(is_causal=True, softcap=4.0, score=(Alibi(slopes),), sinks=sinks, return_residual=True)
    return dot_product_attention(q, k, v, bias, **how, **options)


def loss(function: Any, count: int = 6) -> Any:
    rest = inputs()[count:]

    def total(*x: Any) -> Any:
        out, lse = function(*x, *rest)
        return jnp.sin(out).sum() + jnp.square(lse).sum()

    return total


def close(got: Any, want: Any, most: float = 2e-5) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=most * max(1.0, float(jnp.abs(theirs).max())), rtol=most)


MOVED = tuple(normal(*x.shape, seed=10 + i) for i, x in enumerate(inputs()))


def test_forward_mode_of_everything() -> None:
    found, expected = (jax.jit(lambda f=f: jax.jvp(f, inputs(), MOVED))() for f in (ours, plain))
    close(found, expected)
    close(jax.linearize(ours, *inputs())[1](*MOVED), expected[1])


def test_no_tangent_goes_through_a_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX makes it of the scores that equal the largest one, and NaN of a row where XLA computed them twice, not alike."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a maximum is differentiated")

    monkeypatch.setitem(ad.primitive_jvps, jax.lax.reduce_max_p, refuse)
    with pytest.raises(AssertionError, match="maximum"):
        jax.jvp(lambda q: q.max(-1), inputs()[:1], MOVED[:1])
    made = jax.make_jaxpr(lambda: (jax.jvp(ours, inputs(), MOVED), jax.jvp(jax.grad(loss(ours, 3)), inputs()[:3], MOVED[:3])))()
    assert made.eqns


def test_second_derivatives_of_what_has_them() -> None:
    """Of all but captured tensors, by either way and through both modes."""
    x, moved, rest = inputs()[:3], MOVED[:3], inputs()[3:]
    first = lambda f: jax.grad(loss(f, 3), (0, 1, 2))  # noqa: E731
    found, expected = (jax.jit(lambda f=f: jax.jvp(first(f), x, moved)[1])() for f in (ours, plain))
    close(found, expected, 1e-4)
    twice = lambda f: jax.grad(lambda *x: sum(jnp.square(g).sum() for g in jax.grad(loss(f, 3), (0, 1, 2))(*x)), (0, 1, 2))  # noqa: E731
    close(jax.jit(twice(ours))(*x), jax.jit(twice(plain))(*x), 1e-4)

    def of_tangent(function: Any) -> Any:
        along = lambda *x: jax.jvp(lambda *y: function(*y, *rest), x, moved)[1]  # noqa: E731
        return jax.grad(lambda *x: sum(jnp.square(t).sum() for t in along(*x)), (0, 1, 2))

    close(jax.jit(of_tangent(ours))(*x), jax.jit(of_tangent(plain))(*x), 1e-4)


def test_second_derivatives_through_a_scan() -> None:
    """JAX takes a scan's body apart, and forgets what `custom_jvp` said of it: layers of a model are such a body."""
    q, k, v = inputs(1)[:3]
    moved = MOVED[0][:1]

    def layers(function: Any) -> Any:
        def layer(x: Any, scale: Any) -> tuple[Any, Any]:
            out = function(x, k, v, *inputs(1)[3:])[0]
            return x + scale * jnp.sin(out), jnp.square(out).sum()

        return lambda q: jax.lax.scan(layer, q, jnp.array([0.5, 1.0]))[1].sum()

    def every(function: Any) -> Any:
        first = jax.grad(layers(function))
        twice = jax.grad(lambda q: jnp.square(first(q)).sum())
        mapped = jax.vmap(lambda t: jax.jvp(first, (q,), (t,))[1])(jnp.stack((moved, 2.0 * moved)))
        tangents = jax.grad(lambda q: jax.jvp(layers(function), (q,), (moved,))[1])
        return jax.jvp(first, (q,), (moved,)), twice(q), mapped, tangents(q)

    found, expected = (jax.jit(lambda f=f: every(f))() for f in (ours, plain))
    close(found, expected, 1e-4)


def test_hessian_and_vmap() -> None:
    q, k, v, *rest = inputs(1)
    small = lambda f: lambda q: loss(f, 6)(q, k, v, *rest)  # noqa: E731
    found, expected = (jax.jit(jax.hessian(small(f)))(q) for f in (ours, plain))
    close(found, expected, 1e-4)
    several = jnp.stack((q, 2.0 * q))
    mapped = lambda f: jax.grad(lambda q: jnp.square(jax.vmap(jax.grad(small(f)))(q)).sum())  # noqa: E731
    close(jax.jit(mapped(ours))(several), jax.jit(mapped(plain))(several), 1e-4)


@pytest.mark.parametrize("place", [0, 3, 4], ids=["q", "bias", "slopes"])
def test_mapped_directions_of_what_is_not_mapped(place: int) -> None:
    """Tangents have a batch that their inputs have not, and the other way round."""
    given, moved = list(inputs()), normal(2, *inputs()[place].shape, seed=20)

    def along(f: Any, x: Any, direction: Any) -> Any:
        return jax.jvp(lambda x: f(*given[:place], x, *given[place + 1 :]), (x,), (direction,))

    for axes, x, direction in (((None, 0), given[place], moved), ((0, None), given[place] + abs(moved), moved[0])):
        one, other = (jax.jit(jax.vmap(lambda x, d, f=f: along(f, x, d), axes))(x, direction) for f in (ours, plain))
        close(one, other)


def test_shard_map() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    x, t = inputs()[:3], MOVED[:3]
    over = PartitionSpec("batch")

    def both(q: Any, k: Any, v: Any, *t: Any) -> Any:
        function = lambda *x: dot_product_attention(*x, is_causal=True)  # noqa: E731
        grads = jax.grad(lambda *x: jnp.sin(function(*x)).sum(), (0, 1, 2))
        return jax.jvp(function, (q, k, v), t)[1], *jax.jvp(grads, (q, k, v), t)[1]

    split = jax.shard_map(both, mesh=mesh, in_specs=(over,) * 6, out_specs=over)
    close(jax.jit(split)(*x, *t), jax.jit(both)(*x, *t))


def test_varlen() -> None:
    q, k, v = (x[0] for x in inputs()[:3])
    cu = jnp.array([0, 3, 7], jnp.int32)
    packed = lambda q: dot_product_attention_varlen(q, k, v, cu, is_causal=True)  # noqa: E731

    def each(q: Any) -> Any:
        parts = ((0, 3), (3, 7))
        return jnp.concatenate([dot_product_attention(q[a:b], k[a:b], v[a:b], is_causal=True) for a, b in parts])

    moved = MOVED[0][0]
    along = lambda f: jax.jit(lambda q: jax.jvp(f, (q,), (moved,)))(q)  # noqa: E731
    close(along(packed), along(each))
    hess = lambda f: jax.jvp(jax.grad(lambda q: jnp.sin(f(q)).sum()), (q,), (moved,))[1]  # noqa: E731
    close(hess(packed), jax.jit(lambda: hess(each))())


def test_an_ordinary_gradient_costs_what_it_did() -> None:
    """A forward's kernels and a backward's, and nothing of a tangent, whether a call stands in jit or not."""
    q, k, v = inputs()[:3]
    function = lambda *x: dot_product_attention(*x, is_causal=True, implementation="triton").sum()  # noqa: E731
    for gradient in (jax.grad(function, (0, 1, 2)), jax.jit(jax.grad(function, (0, 1, 2)))):
        text = str(jax.make_jaxpr(gradient)(q, k, v))
        assert "flashtile_linear" not in text
        assert (text.count("step=attention("), text.count("step=the backward of"), text.count("step=")) == (1, 1, 2)


def test_what_has_no_rule_refuses_by_name() -> None:
    q, k, v = inputs()[:3]
    function = lambda q: dot_product_attention(q, k, v)  # noqa: E731
    with pytest.raises(NotSupported, match="forward mode over forward mode"):
        jax.jvp(lambda q: jax.jvp(function, (q,), (q,))[1], (q,), (q,))
    with pytest.raises(NotSupported, match="third derivatives"):
        jax.grad(lambda q: jnp.square(jax.grad(lambda q: jnp.square(jax.grad(lambda q: function(q).sum())(q)).sum())(q)).sum())(
            q
        )
