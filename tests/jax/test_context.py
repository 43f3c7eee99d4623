"""Sequences shared by the devices of a mesh axis, beside one device: forward, residual and gradients."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flashtile import Alibi, Bias, Dilated, Document, Dropout, InvalidProblem, KeyPadding, NotSupported
from flashtile.jax import dot_product_attention, dot_product_attention_sharded, shard_order, shard_positions
from flashtile.problem.dropout import Origin
from tests.jax.test_transforms import close

SPEC = PartitionSpec("data", "cp")


def mesh(data: int, cp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * cp]).reshape(data, cp), ("data", "cp"))


def there(cp: int) -> int:
    """So many devices, or all that there are: two GPUs, say, which run what is not about their number."""
    return min(cp, len(jax.devices()))


OF_EIGHT = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def leaves(dtype: Any = jnp.float32, seqlen_k: int = 32, seqlen: int = 32) -> list[Any]:
    keys = jax.random.split(jax.random.key(3), 4)
    shapes = (2, seqlen, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 8)
    return [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=False)] + [jnp.arange(4.0) - 1]


def gradients(call: Any, given: list[Any], back: Any = None) -> Any:
    """out, residual and the gradients of something that reads both in their own order."""

    def value(*given: Any) -> Any:
        out, residual = call(*given)
        if back is not None:
            out, residual = out[:, back], residual[:, back]
        weight = jnp.linspace(-1, 1, out.size).reshape(out.shape)
        return (out * weight).sum() + (jnp.sin(residual)).sum(), (out, residual)

    grads, made = jax.jit(jax.grad(value, range(len(given)), has_aux=True))(*given)
    return *made, *grads


LAWS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "rich": {
        "is_causal": True, "local_window_size": (9, 0), "softcap": 3.0, "scale": 0.5,
        "score": (Alibi(jnp.array([0.1, 0.2, 0.3, 0.4])),),
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("law", "data", "cp"), [("full", 1, 8), ("causal", 1, 8), ("rich", 2, 4)])
def test_devices_compute_what_one_does(law: str, data: int, cp: int, layout: str) -> None:
    data, cp = (data, cp) if len(jax.devices()) >= data * cp else (1, there(cp))
    given, how = leaves(), {**LAWS[law], "return_residual": True}
    order = shard_order(32, cp, layout)
    back = jnp.argsort(order)
    sharded = jax.shard_map(
        lambda q, k, v, z: dot_product_attention_sharded(q, k, v, axis_name="cp", layout=layout, sinks=z, **how),
        mesh=mesh(data, cp), in_specs=(SPEC, SPEC, SPEC, PartitionSpec()), out_specs=(SPEC, SPEC),
    )  # fmt: skip
    got = gradients(lambda q, k, v, z: sharded(*(x[:, order] for x in (q, k, v)), z), given, back)
    whole = lambda q, k, v, z: dot_product_attention(q, k, v, sinks=z, alignment="bottom-right", **how)  # noqa: E731
    close(got, gradients(whole, given))


PLAIN, IDS = PartitionSpec(), jnp.searchsorted(jnp.array([3, 20, 32]), jnp.arange(32), side="right")[None]
KEEP = jnp.arange(64).reshape(2, 32) % 5 != 2
SHARES: list[tuple[str, str, int, dict[str, Any], tuple[Any, ...]]] = [
    ("allgather", "contiguous", 8, {"is_causal": True, "local_window_size": (5, 0)}, ()),  # over two neighbours
    ("allgather", "contiguous", 4, {"local_window_size": (6, 2)}, (IDS, KEEP)),
    ("allgather", "contiguous", 2, {"local_window_size": (4, 2)}, (IDS, KEEP)),
    ("allgather", "contiguous", 2, {"local_window_size": (6, 2)}, ()),
    ("allgather", "zigzag", 4, {"is_causal": True}, (IDS, KEEP)),
    ("ulysses", "zigzag", 4, {"is_causal": True, "score": (Alibi(jnp.array([0.1, 0.2, 0.3, 0.4])),)}, (IDS,)),
    ("ulysses", "striped", 2, {"local_window_size": (6, 2), "softcap": 3.0}, (KEEP,)),
]


@pytest.mark.parametrize(("method", "layout", "cp", "how", "known"), SHARES)
def test_methods_layouts_and_masks(method: str, layout: str, cp: int, how: dict[str, Any], known: tuple[Any, ...]) -> None:
    refused = (method, how.get("local_window_size"), there(cp)) == ("allgather", (6, 2), 2)  # a halo of 8 is half of the keys
    cp = there(cp)
    given, order, how = leaves(), shard_order(32, cp, layout), {**how, "return_residual": True}
    back = jnp.argsort(order)

    def told(ids: tuple[Any, ...]) -> dict[str, Any]:
        found: Any = None
        for x in ids:
            leaf = KeyPadding(x) if x.dtype == bool else Document(x)
            found = leaf if found is None else found & leaf
        return how if found is None else {**how, "attend_to": found}

    def part(q: Any, k: Any, v: Any, z: Any, *ids: Any) -> Any:
        return dot_product_attention_sharded(q, k, v, axis_name="cp", method=method, layout=layout, sinks=z, **told(ids))

    rows = PartitionSpec(None, "cp")
    sharded = jax.shard_map(part, mesh=Mesh(np.array(jax.devices()[:cp]), ("cp",)), out_specs=(rows, rows),
                            in_specs=(rows, rows, rows, PLAIN, *[rows] * len(known)))  # fmt: skip
    by_devices = lambda q, k, v, z: sharded(*(x[:, order] for x in (q, k, v)), z, *(x[:, order] for x in known))  # noqa: E731
    if refused:
        with pytest.raises(NotSupported, match="a window in which queries look ahead"):
            by_devices(*given)
        return
    got = gradients(by_devices, given, back)
    whole = lambda q, k, v, z: dot_product_attention(q, k, v, sinks=z, alignment="bottom-right", **told(known))  # noqa: E731
    close(got, gradients(whole, given))


@pytest.mark.parametrize(
    ("method", "layout", "cp"),
    [("allgather", "contiguous", 8), ("allgather", "zigzag", 4), ("ulysses", "striped", 2), ("ulysses", "zigzag", 4)],
)
def test_dropout_and_bias_are_those_of_one_device(method: str, layout: str, cp: int) -> None:
    cp = there(cp)
    seqlen = 32 if jax.default_backend() == "cpu" else 2 * cp * 64  # a GPU's chunks begin at multiples of 64
    rows = seqlen if method == "allgather" else 1
    given, order = leaves(seqlen_k=seqlen, seqlen=seqlen), shard_order(seqlen, cp, layout)
    bias = jax.random.normal(jax.random.key(9), (1, 4, rows, seqlen))
    how: dict[str, Any] = {"is_causal": True, "return_residual": True, "dropout": Dropout(0.4, 2**40 + 7)}

    def part(q: Any, k: Any, v: Any, z: Any, bias: Any) -> Any:
        return dot_product_attention_sharded(
            q, k, v, axis_name="cp", method=method, layout=layout, sinks=z, bias=bias, score=(Bias(bias[..., :1] / 2),), **how
        )

    tokens, of_bias = PartitionSpec(None, "cp"), PartitionSpec(None, None, "cp") if rows > 1 else PLAIN
    sharded = jax.shard_map(part, mesh=Mesh(np.array(jax.devices()[:cp]), ("cp",)), out_specs=(tokens, tokens),
                            in_specs=(tokens, tokens, tokens, PLAIN, of_bias))  # fmt: skip

    def by_devices(q: Any, k: Any, v: Any, z: Any, bias: Any) -> Any:
        return sharded(*(x[:, order] for x in (q, k, v)), z, bias[:, :, order] if rows > 1 else bias)

    def whole(q: Any, k: Any, v: Any, z: Any, bias: Any) -> Any:
        return dot_product_attention(q, k, v, bias, sinks=z, score=(Bias(bias[..., :1] / 2),), **how)

    close(gradients(by_devices, [*given, bias], jnp.argsort(order)), gradients(whole, [*given, bias]))


AUTOMATIC: dict[str, tuple[bool, dict[str, Any]]] = {
    "full": (True, {}),
    "causal": (True, {"is_causal": True, "alignment": "bottom-right"}),
    "window": (True, {"is_causal": True, "local_window_size": (5, 0), "score": (Alibi(jnp.array([0.1, 0.2, 0.3, 0.4])),)}),
    "documents": (True, {"is_causal": True, "attend_to": Document(IDS) & KeyPadding(KEEP), "softcap": 3.0}),
    "look ahead": (False, {"local_window_size": (5, 3)}),
    "dropout": (False, {"is_causal": True, "dropout": Dropout(0.3, 5)}),
    "repeatable": (False, {"is_causal": True, "deterministic": True}),
}


@OF_EIGHT
@pytest.mark.parametrize("law", AUTOMATIC)
def test_under_jit_queries_stay_where_they_are(law: str) -> None:
    """Shardings of arrays alone: keys and values are gathered, and nothing of q's size, where positions can be told apart."""
    cut, how = AUTOMATIC[law]
    seqlen_k = 48 if law == "causal" else 32
    given = [*leaves(seqlen_k=seqlen_k), jax.random.normal(jax.random.key(9), (1, 4, 32, seqlen_k))]
    call = lambda q, k, v, z, b: dot_product_attention(q, k, v, b, sinks=z, return_residual=True, **how)  # noqa: E731

    def value(*given: Any) -> Any:
        out, residual = call(*given)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum() + jnp.sin(residual).sum()

    gradient = jax.jit(jax.value_and_grad(value, range(5)))
    specs = (SPEC, SPEC, SPEC, PLAIN, PartitionSpec(None, None, "cp"))
    placed = [jax.device_put(x, NamedSharding(mesh(2, 4), spec)) for x, spec in zip(given, specs, strict=True)]
    compiled = gradient.lower(*placed).compile()
    close(compiled(*placed), gradient(*given))
    gathers = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", compiled.as_text())
    assert gathers
    assert any("32,4,16" in shape for shape in gathers) != cut, gathers


@OF_EIGHT
def test_under_jit_sixteen_bits_are_summed_in_float32() -> None:
    given = [x.astype(jnp.bfloat16) for x in leaves()[:3]]
    call = lambda *x: dot_product_attention(*x, is_causal=True, return_residual=True)  # noqa: E731
    placed = [jax.device_put(x, NamedSharding(mesh(1, 8), SPEC)) for x in given]
    for ours, one in zip(gradients(call, placed), gradients(call, given), strict=True):
        difference = jnp.linalg.norm((ours - one).astype(jnp.float32).ravel())
        assert difference <= 1e-3 * jnp.linalg.norm(one.astype(jnp.float32).ravel())


@pytest.mark.parametrize(
    ("method", "window", "sent"), [("allgather", (5, 0), "collective_permute"), ("ulysses", None, "all_to_all")]
)
def test_what_is_sent(method: str, window: Any, sent: str) -> None:
    """A window's halo and heads travel alone: nothing is gathered."""
    part = jax.shard_map(
        lambda *x: dot_product_attention_sharded(*x, axis_name="cp", method=method, is_causal=True, local_window_size=window),
        mesh=Mesh(np.array(jax.devices()[: there(4)]), ("cp",)), in_specs=(PartitionSpec(None, "cp"),) * 3,
        out_specs=PartitionSpec(None, "cp"),
    )  # fmt: skip
    value = lambda *x: part(*x).sum()  # noqa: E731
    text = jax.jit(jax.grad(value, (0, 1, 2))).lower(*leaves()[:3]).as_text()
    assert sent in text
    assert "all_gather" not in text
    assert "reduce_scatter" not in text


def test_keys_that_are_more_than_queries() -> None:
    given = leaves(seqlen_k=48)[:3]
    how: dict[str, Any] = {"is_causal": True, "return_residual": True}
    sharded = jax.shard_map(lambda *x: dot_product_attention_sharded(*x, axis_name="cp", **how),
                            mesh=mesh(1, there(8)), in_specs=(SPEC,) * 3, out_specs=(SPEC, SPEC))  # fmt: skip
    close(gradients(sharded, given), gradients(lambda *x: dot_product_attention(*x, alignment="bottom-right", **how), given))


SUMMED: list[tuple[str, str, int, dict[str, Any]]] = [
    ("allgather", "zigzag", 8, {"is_causal": True}),
    ("allgather", "contiguous", 8, {}),
    ("allgather", "contiguous", 8, {"is_causal": True, "local_window_size": (5, 0)}),  # halos, over two neighbours
    ("ulysses", "striped", 4, {"is_causal": True}),  # two copies of each head of keys
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("method", "layout", "cp", "how"), SUMMED)
def test_sixteen_bits_are_summed_in_float32(method: str, layout: str, cp: int, how: dict[str, Any], dtype: Any) -> None:
    """What devices make has one device's error, within a tenth: parts of dk and dv are summed before they are rounded."""
    given, cp = leaves(dtype)[:3], there(cp)
    order, how = shard_order(32, cp, layout), {**how, "return_residual": True}
    sharded = jax.shard_map(
        lambda *x: dot_product_attention_sharded(*x, axis_name="cp", method=method, layout=layout, **how),
        mesh=mesh(1, cp), in_specs=(SPEC,) * 3, out_specs=(SPEC, SPEC),
    )  # fmt: skip
    got = gradients(lambda *x: sharded(*(t[:, order] for t in x)), given, jnp.argsort(order))
    one = lambda *x: dot_product_attention(*x, **how)  # noqa: E731
    alone, true = gradients(one, given), gradients(one, [x.astype(jnp.float32) for x in given])
    far = lambda a, b: float(jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel()))  # noqa: E731
    errors = [(far(a, t), far(b, t)) for a, b, t in zip(got, alone, true, strict=True)]
    assert all(ours <= 1.1 * one for ours, one in errors), errors


@pytest.mark.parametrize(("method", "layout", "cp"), [("allgather", "zigzag", 8), ("ulysses", "contiguous", 2)])
def test_what_devices_share_gets_gradients_that_are_rounded_once(method: str, layout: str, cp: int) -> None:
    """Sinks, slopes and a bias of one row: in bf16 they get the rounded gradients of the same numbers in float32."""
    tokens = leaves(jnp.bfloat16)[:3]
    shapes = (4,), (4,), (1, 4, 1, 32), (1, 4, 1, 1)
    shared = [abs(jax.random.normal(jax.random.key(i), s)).astype(jnp.bfloat16) for i, s in enumerate(shapes)]

    def part(q: Any, k: Any, v: Any, z: Any, slopes: Any, bias: Any, other: Any) -> Any:
        return dot_product_attention_sharded(
            q, k, v, axis_name="cp", method=method, layout=layout, is_causal=True, sinks=z, bias=bias,
            score=(Alibi(slopes), Bias(other)),
        )  # fmt: skip

    sharded = jax.shard_map(part, mesh=mesh(1, there(cp)), in_specs=(SPEC,) * 3 + (PLAIN,) * 4, out_specs=SPEC)
    value = lambda *x: (sharded(*tokens, *x) * jnp.cos(jnp.arange(2048.0)).reshape(2, 32, 4, 8)).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(value, (0, 1, 2, 3)))
    for ours, true in zip(gradient(*shared), gradient(*(x.astype(jnp.float32) for x in shared)), strict=True):
        assert ours.dtype == jnp.bfloat16
        assert (ours == true.astype(jnp.bfloat16)).all(), (ours, true)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"sharded\(\) got an unexpected keyword argument 'sink'; did you mean sinks"):
        dot_product_attention_sharded(*leaves()[:3], axis_name="cp", sink=None)


@OF_EIGHT
def test_positions() -> None:
    for layout in ("contiguous", "zigzag", "striped"):
        call = jax.shard_map(lambda x, s=layout: shard_positions(x.shape[0], "cp", s), mesh=mesh(1, 8),
                             in_specs=PartitionSpec("cp"), out_specs=PartitionSpec("cp"))  # fmt: skip
        assert call(jnp.zeros(32)).tolist() == shard_order(32, 8, layout).tolist()
    assert shard_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@OF_EIGHT
def test_what_is_not_done_is_refused() -> None:
    given = leaves()[:3]

    def call(**how: Any) -> Any:
        part = jax.shard_map(lambda *x: dot_product_attention_sharded(*x, **{"axis_name": "cp", **how}), mesh=mesh(1, 8),
                             in_specs=(SPEC,) * 3, out_specs=SPEC)  # fmt: skip
        return jax.eval_shape(part, *given)

    laws: list[tuple[Any, dict[str, Any], str]] = [
        (InvalidProblem, {"axis_name": "tp"}, "axis_name is 'tp'"),
        (InvalidProblem, {"layout": "head-tail"}, "layout is 'head-tail'; it must be one of contiguous, zigzag, striped"),
        (InvalidProblem, {"layout": "striped"}, "layout is 'striped' and method 'allgather'; it must be 'ulysses'"),
        (InvalidProblem, {"method": "ring"}, "method is 'ring'; it must be one of allgather, ulysses"),
        (InvalidProblem, {"attend_to": 3}, "attend_to is a int; it must be a Band or a predicate"),
        (NotSupported, {"method": "ulysses"}, "4 heads of query and 2 of key over 8 devices"),
        (NotSupported, {"attend_to": Dilated(2)}, "predicate dilated, which cannot be told a part of the keys"),
        (NotSupported, {"attend_to": Document(IDS[:, :4]) | KeyPadding(KEEP[:, :4])}, r"predicates joined by \|"),
        (NotSupported, {"local_window_size": (30, 2)}, "look ahead"),
        (NotSupported, {"score": (Bias(jnp.zeros((1, 1, 4, 32))),), "method": "ulysses"}, "a bias with an axis of queries"),
        (NotSupported, {"dropout": Dropout(0.1, 3, Origin())}, "dropout with an origin"),
        (NotSupported, {"dropout": Dropout(0.1, 3), "local_window_size": (2, 2)}, "look ahead"),
        (InvalidProblem, {"dropout": Dropout(0.1)}, "dropout seed is None"),
        (InvalidProblem, {"dropout": 0.1}, "dropout is 0.1"),
        (NotSupported, {"score": (Alibi(jnp.ones(4)),)}, "alibi without causal order"),
    ]
    for error, how, words in laws:
        with pytest.raises(error, match=words):
            call(**how)
    with pytest.raises(InvalidProblem, match="seqlen is 30; of layout 'zigzag' over 8 devices it must be a multiple of 16"):
        shard_order(30, 8)
    odd = Mesh(np.array(jax.devices()[:4]), ("cp",), axis_types=(AxisType.Auto,))
    part = jax.shard_map(lambda *x: dot_product_attention_sharded(*x, axis_name="cp", layout="zigzag"), mesh=odd,
                         in_specs=(PartitionSpec(None, "cp"),) * 3, out_specs=PartitionSpec(None, "cp"))  # fmt: skip
    with pytest.raises(InvalidProblem, match="query has 5 tokens a device"):
        jax.eval_shape(part, *(jax.ShapeDtypeStruct((1, 20, 4, 16), jnp.float32) for _ in range(3)))
