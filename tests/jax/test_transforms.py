"""jit, grad, vmap, checkpoint, scan, shard_map, automatic sharding, export."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flashtile import Alibi, Document, Dropout, NotSupported
from flashtile.jax import cross_entropy, dot_product_attention, dot_product_attention_varlen, layer_norm, rotary, softmax

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute")


def normal(*shape: int, seed: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def leaves(*lead: int, heads: int = 4, heads_kv: int = 2) -> tuple[Any, ...]:
    """q, k, v, bias, slopes, sinks; the first three with leading axes."""
    shapes = ((*lead, 4, 20, heads, 16), (*lead, 4, 20, heads_kv, 16), (*lead, 4, 20, heads_kv, 16), (1, heads, 20, 20))
    return (*(normal(*shape, seed=i) for i, shape in enumerate(shapes)), normal(heads, seed=7), normal(heads, seed=8))


def loss(q: Any, k: Any, v: Any, bias: Any, slopes: Any, sinks: Any, **options: Any) -> Any:
    out, lse = dot_product_attention(
        q, k, v, bias, is_causal=True, score=(Alibi(slopes),), sinks=sinks, return_residual=True, **options
    )
    wave = lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)  # noqa: E731
    return (out * wave(out)).sum() + (lse * wave(lse)).sum()


def close(got: Any, want: Any) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * max(1.0, float(jnp.abs(theirs).max())), rtol=1e-5)


def moves(compiled: Any) -> dict[str, int]:
    """How many collectives a program has that move whole arrays."""
    text = compiled.as_text()
    return {n: len(re.findall(rf" {n}[\w.-]*\(", text)) for n in COLLECTIVES}


gradient = jax.grad(loss, tuple(range(6)))
at_once = jax.jit(gradient)  # what others are held against: one program instead of one for each operator
AXES = (0, 0, 0, None, None, None)


def one_by_one(given: tuple[Any, ...], function: Any = at_once) -> Any:
    return jax.tree.map(
        lambda *x: jnp.stack(x), *(function(*(x[i] for x in given[:3]), *given[3:]) for i in range(len(given[0])))
    )


def test_vmap_of_grad_equals_the_loop() -> None:
    given = leaves(3)
    close(jax.jit(jax.vmap(gradient, AXES))(*given), one_by_one(given))


def test_grad_of_vmap_sums_what_is_shared() -> None:
    given = leaves(3)
    got = jax.grad(lambda *x: jax.vmap(loss, AXES)(*x).sum(), tuple(range(6)))(*given)
    want = one_by_one(given)
    close(got, (*want[:3], *(x.sum(0) for x in want[3:])))


def test_vmap_of_vmap() -> None:
    given = leaves(2, 2)
    twice = jax.vmap(jax.vmap(gradient, AXES), AXES)(*given)
    close(twice, one_by_one(given, lambda *x: one_by_one(x)))


def test_vmap_over_nothing() -> None:
    given = leaves(0)
    got = jax.vmap(gradient, AXES)(*given)
    assert [x.shape for x in got] == [(0, *x.shape[axis == 0 :]) for x, axis in zip(given, AXES, strict=True)]
    sums = jax.grad(lambda *x: jax.vmap(loss, AXES)(*x).sum(), (3, 4, 5))(*given)
    assert not any(x.any() for x in sums)


def test_vmap_over_what_is_shared_otherwise() -> None:
    given = leaves()
    many = (*given[:3], *(jnp.stack([x, x / 2]) for x in given[3:]))
    got = jax.vmap(gradient, (None, None, None, 0, 0, 0))(*many)
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *(at_once(*given[:3], *(x[i] for x in many[3:])) for i in range(2))))


@pytest.mark.parametrize("options", [{"dropout": Dropout(0.3, 7)}, {"attend_to": Document(jnp.arange(20) // 7)}], ids=str)
def test_vmap_one_by_one_where_the_place_in_the_batch_matters(options: dict[str, Any]) -> None:
    given = leaves(2)
    each = jax.grad(lambda *x: loss(*x, **options), tuple(range(6)))
    close(jax.vmap(each, AXES)(*given), one_by_one(given, jax.jit(each)))


def test_vmap_of_a_single_axis_of_heads() -> None:
    q, k, v = leaves(heads_kv=4)[:3]
    got = jax.vmap(lambda *x: dot_product_attention(*(a[:, :, None] for a in x))[:, :, 0], 2, 2)(q, k, v)
    close(got, dot_product_attention(q, k, v))


def test_vmap_of_varlen() -> None:
    q, k, v = (x.reshape(3, 80, *x.shape[3:]) for x in leaves(3)[:3])
    cu = jnp.array([[0, 30, 80], [0, 5, 60], [0, 0, 80]], jnp.int32)
    each = jax.grad(lambda q, k, v, cu: (dot_product_attention_varlen(q, k, v, cu, is_causal=True) ** 2).sum(), (0, 1, 2))
    got = jax.vmap(each)(q, k, v, cu)
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *(each(q[i], k[i], v[i], cu[i]) for i in range(3))))


def test_a_checkpoint_after_gradients_of_other_inputs() -> None:
    """JAX remembers a forward's program for each set of inputs that are differentiated."""
    given = leaves()
    want = at_once(*given)
    jax.grad(loss, (3, 5))(*given)
    close(jax.grad(jax.checkpoint(loss), tuple(range(6)))(*given), want)


def test_checkpoint_and_scan() -> None:
    given = leaves()
    close(jax.jit(jax.grad(jax.checkpoint(loss), tuple(range(6))))(*given), at_once(*given))
    many = leaves(3)
    total = lambda *shared: lax.scan(lambda c, x: (c + loss(*x, *shared), None), 0.0, many[:3])[0]  # noqa: E731
    close(jax.grad(total, (0, 1, 2))(*many[3:]), tuple(x.sum(0) for x in one_by_one(many)[3:]))


def passes(jaxpr: Any) -> int:
    """How many passes of ours by kernels a program holds, each beside its branch in plain JAX."""
    inner = [x for e in jaxpr.eqns for p in e.params.values() for x in (p if isinstance(p, (tuple, list)) else (p,))]
    found = [getattr(getattr(x, "jaxpr", x), "jaxpr", getattr(x, "jaxpr", x)) for x in inner]
    return sum(e.primitive.name == "flashtile" for e in jaxpr.eqns) + sum(passes(x) for x in found if hasattr(x, "eqns"))


@pytest.mark.parametrize("shape", [(1, 8, 1, 8), (8, 1, 8)], ids=["dense", "varlen"])
def test_a_policy_of_checkpoint_keeps_attention_by_name(shape: tuple[int, ...]) -> None:
    names = {"both": ("flashtile_out", "flashtile_lse"), "one": ("flashtile_out",), "none": ()}
    policies = {which: jax.checkpoint_policies.save_only_these_names(*own) for which, own in names.items()}

    def value(x: Any) -> Any:
        x = jnp.sin(x)
        if len(shape) == 4:
            return jnp.sin(dot_product_attention(x, x, x, is_causal=True)).sum()
        return jnp.sin(dot_product_attention_varlen(x, x, x, jnp.array([0, 3, 8], jnp.int32))).sum()

    x = normal(*shape, seed=0)
    found = {which: jax.grad(jax.checkpoint(value, policy=policy)) for which, policy in policies.items()}
    counted = {which: passes(jax.make_jaxpr(function)(x).jaxpr) for which, function in found.items()}
    assert counted == {"both": 2, "one": 3, "none": 3}
    for function in found.values():
        close(jax.jit(function)(x), jax.grad(value)(x))


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("norm", lambda x: layer_norm(x[0, 0]).sum()),
        ("softmax", lambda x: (softmax(x[0], causal=True) ** 2).sum()),
        ("cross_entropy", lambda x: cross_entropy(x[0, 0], jnp.arange(8, dtype=jnp.int32))),
        ("rotary", lambda x: (rotary(x, None, jnp.ones((8, 4)), jnp.zeros((8, 4))) ** 2).sum()),
    ],
)
def test_a_policy_of_checkpoint_keeps_an_op_by_name(op: str, function: Any) -> None:
    x = normal(1, 8, 8, 8, seed=0)
    value = lambda x: jnp.sin(function(jnp.sin(x)))  # noqa: E731
    count = {}
    for name in (f"flashtile_{op}", "another"):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        gradient = jax.grad(jax.checkpoint(value, policy=policy))
        count[name] = passes(jax.make_jaxpr(gradient)(x).jaxpr)
        close(gradient(x), jax.grad(value)(x))
    assert count == {f"flashtile_{op}": 2, "another": 3}


def test_second_derivatives_of_ops_are_refused() -> None:
    x = leaves()[0][0, 0]
    with pytest.raises(NotSupported, match="second derivatives of norm"):
        jax.grad(lambda x: jax.grad(lambda x: layer_norm(x).sum())(x).sum())(x)


def test_explicit_axes_of_a_mesh() -> None:
    """Those of `jax.make_mesh`: types say how arrays lie, those of gradients too."""
    given = leaves()
    explicit = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    specs = (*(PartitionSpec("data", None, "model"),) * 3, PartitionSpec(None, "model"), *(PartitionSpec("model"),) * 2)
    placed = [jax.device_put(x, NamedSharding(explicit, spec)) for x, spec in zip(given, specs, strict=True)]
    want = at_once(*given)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*placed).compile()
    assert moves(compiled) == dict.fromkeys(COLLECTIVES, 0)
    got = jax.jit(gradient)(*placed)
    close(got, want)
    assert [jax.typeof(x) for x in got] == [jax.typeof(x) for x in placed]
    with jax.set_mesh(explicit):
        close(gradient(*placed), want)
        close(jax.jit(gradient)(*given), want)  # which lie on one device
        call, spec = (lambda *x: dot_product_attention(*x, is_causal=True)), specs[0]
        mapped = jax.shard_map(call, in_specs=(spec,) * 3, out_specs=spec)
        close(mapped(*placed[:3]), call(*given[:3]))
        close(jax.jit(jax.vmap(call, 1, 1))(*(x[:, None] for x in placed[:3])), call(*given[:3])[:, None])


def test_auto_axes_of_an_explicit_mesh() -> None:
    q, k, v, bias, *_ = leaves()
    explicit = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    spec = PartitionSpec("data", None, "model")

    def gradients(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *given: (function(*given) ** 2).sum(), tuple(range(4))))

    with jax.set_mesh(explicit):
        sharded = [jax.device_put(x, NamedSharding(explicit, spec)) for x in (q, k, v)]
        automatic = jax.sharding.auto_axes(dot_product_attention, out_sharding=spec)
        got = gradients(automatic)(*sharded, bias)
    close(got, gradients(dot_product_attention)(q, k, v, bias))


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


SHARDINGS = {
    "batch and heads": ((4, 2), PartitionSpec("data", None, "model"), PartitionSpec("data", None, "model")),
    "equal heads": ((4, 4), PartitionSpec("data", None, "model"), PartitionSpec("data", None, "model")),
    "one head of keys": ((4, 1), PartitionSpec("data", None, "model"), PartitionSpec("data")),
    "batch over all": ((3, 3), PartitionSpec(("data", "model")), PartitionSpec(("data", "model"))),
    "heads over all": ((4, 4), PartitionSpec(None, None, ("data", "model")), PartitionSpec(None, None, ("data", "model"))),
}


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_automatic_sharding_gathers_nothing(name: str, padded: bool) -> None:
    (heads, heads_kv), for_q, for_k = SHARDINGS[name]
    given = leaves(heads=heads, heads_kv=heads_kv)
    options = {"key_value_seq_lengths": jnp.array([20, 5, 11, 20], jnp.int32), "alignment": "bottom-right"} if padded else {}
    function = jax.jit(jax.grad(lambda *x: loss(*x, **options), tuple(range(6))))
    specs = (for_q, for_k, for_k, *(PartitionSpec(),) * 3)
    placed = tuple(jax.device_put(x, NamedSharding(mesh(), spec)) for x, spec in zip(given, specs, strict=True))
    compiled = function.lower(*placed).compile()
    assert moves(compiled) == dict.fromkeys(COLLECTIVES, 0)
    got = compiled(*placed)
    close(got, function(*given))
    for mine, theirs in zip(got[:3], placed, strict=False):
        assert mine.sharding.is_equivalent_to(theirs.sharding, 4)


@pytest.mark.parametrize("options", [{}, {"dropout": Dropout(0.3, 7)}], ids=["sequence", "dropout"])
def test_what_is_cut_otherwise_or_gathered_is_right(options: dict[str, Any]) -> None:
    given = leaves()
    spec = PartitionSpec("data", None, "model") if options else PartitionSpec(None, "data", "model")
    function = jax.jit(jax.grad(lambda *x: loss(*x, **options), tuple(range(6))))
    close(function(*(jax.device_put(x, NamedSharding(mesh(), spec)) for x in given[:3]), *given[3:]), function(*given))


def test_shard_map() -> None:
    q, k, v, bias, slopes, _ = leaves()
    spec, heads = PartitionSpec("data", None, "model"), PartitionSpec("model")

    def inner(q: Any, k: Any, v: Any, bias: Any, slopes: Any) -> Any:
        return dot_product_attention(q, k, v, bias, is_causal=True, score=(Alibi(slopes),), return_residual=True)

    specs = (spec, spec, spec, PartitionSpec(None, "model"), heads)
    mapped = jax.shard_map(inner, mesh=mesh(), in_specs=specs, out_specs=(spec, spec))

    def total(function: Any) -> Any:
        def value(*given: Any) -> Any:
            out, lse = function(*given)
            return (out * jnp.cos(out)).sum() + (lse**2).sum()

        return jax.jit(jax.grad(value, tuple(range(5))))

    close(total(mapped)(q, k, v, bias, slopes), total(inner)(q, k, v, bias, slopes))


def test_export_round_trip() -> None:
    given = leaves()
    exported = jax.export.export(jax.jit(gradient), platforms=["cpu"])(*given)
    close(jax.export.deserialize(exported.serialize()).call(*given), at_once(*given))


def test_kernels_by_name_say_why_not_on_a_cpu() -> None:
    q, k, v = leaves()[:3]
    with pytest.raises(NotSupported, match="these kernels need an NVIDIA GPU"):
        dot_product_attention(q, k, v, implementation="triton")


def test_a_caller_may_forbid_promotion_in_its_own_code() -> None:
    mask, lengths = normal(4, 1, 20, 20, seed=9) < 1, jnp.array([3, 20, 7, 0], jnp.int32)
    options: dict[str, Any] = dict(mask=mask, key_value_seq_lengths=lengths, dropout=Dropout(0.2, jax.random.key(1)))
    given = leaves()

    def value(*given: Any) -> Any:
        out = layer_norm(given[0], jnp.ones(16), jnp.zeros(16)), softmax(given[3], causal=True)
        labels = jnp.arange(4, dtype=jnp.int32).repeat(20 * 4).reshape(4, 20, 4)
        rest = sum(t.sum() for t in (*out, cross_entropy(given[0], labels, label_smoothing=0.1)))
        return loss(*given, **options) + rest

    want = jax.jit(jax.value_and_grad(value, range(6)))(*given)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        close(jax.value_and_grad(value, range(6))(*given), want)
        close(jax.jit(jax.value_and_grad(value, range(6)))(*given), want)
