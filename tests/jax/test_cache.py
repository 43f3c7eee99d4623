"""attention_cached and append_to_cache in JAX, against a definition in NumPy's float64; everything unused is NaN or rubbish."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashtile import InvalidProblem, NotSupported
from flashtile.jax import append_to_cache, attention_cached, target
from flashtile.jax.launch import HANDLER

USED, FIRST = [11, 0, 4, 16], [3, 0, 0, 9]


def pools(size: int, dtype: Any = np.float32, contiguous: bool = False) -> tuple[Any, Any, Any, list[Any], list[Any]]:
    """(k_cache, v_cache, table, each item's keys, values)."""
    r = np.random.default_rng(0)
    columns = 1 if contiguous else -(-16 // size) + 1
    size = 18 if contiguous else size
    pages = len(USED) if contiguous else len(USED) * columns + 2
    k, v = (np.full((pages, size, 2, 16), np.nan, np.float32) for _ in "kv")
    table = r.choice([-1, 0, 2147480000], (len(USED), columns)).astype(np.int32)
    free, keys, values = list(r.permutation(pages)), [], []
    for i, n in enumerate(USED):
        keys.append(r.standard_normal((n, 2, 16)).astype(np.float32))
        values.append(r.standard_normal((n, 2, 16)).astype(np.float32))
        for t in range(n):
            if t % size == 0:
                table[i, t // size] = i if contiguous else free.pop()
            k[table[i, t // size], t % size], v[table[i, t // size], t % size] = keys[i][t], values[i][t]
    return jnp.asarray(k, dtype), jnp.asarray(v, dtype), None if contiguous else jnp.asarray(table), keys, values


def true(q: Any, k: Any, v: Any, causal: bool, window: Any, softcap: Any, scale: float, sink: Any) -> tuple[Any, Any]:
    """(out, lse) of one item, query by query."""
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    rows, heads = q.shape[:2]
    out, lse = np.zeros((rows, heads, v.shape[-1])), np.full((heads, rows), -np.inf)
    for i in range(rows):
        for h in range(heads):
            scores = k[:, h // (heads // 2)] @ q[i, h] * scale
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            ahead = np.arange(len(k)) - (i + len(k) - rows)
            seen = (ahead <= 0) | (not causal)
            if window is not None:
                seen &= (ahead >= -window[0]) & (window[1] is None or ahead <= window[1])
            weights = np.exp(scores) * seen
            total = weights.sum() + (0 if sink is None else np.exp(float(sink[h])))
            if total:
                out[i, h], lse[h, i] = weights @ v[:, h // (heads // 2)] / total, np.log(total)
    return out, lse


MUCH: dict[str, Any] = {"causal": True, "window": (3, None), "softcap": 2.0, "sink": True, "scale": 0.4}


@pytest.mark.parametrize(
    ("size", "how"),
    [(1, {"causal": True}), (3, MUCH), (16, {"causal": True, "first": True}), (0, MUCH), (0, {"first": True})],
    ids=str,
)
def test_against_the_definition(size: int, how: dict[str, Any]) -> None:
    k_cache, v_cache, table, keys, values = pools(size, contiguous=not size)
    q = np.random.default_rng(1).standard_normal((4, 3, 4, 16)).astype(np.float32)
    sink = jnp.asarray([0.5, -1.0, 0.0, 2.0]) if how.get("sink") else None
    first = FIRST if how.get("first") else [0] * 4
    for i, begin in enumerate(first):  # rows before the first key are no keys
        for t in range(begin):
            page = i if table is None else int(table[i, t // k_cache.shape[1]])
            k_cache = k_cache.at[page, t % k_cache.shape[1]].set(jnp.nan)
            v_cache = v_cache.at[page, t % v_cache.shape[1]].set(jnp.nan)
    given = {name: how.get(name) for name in ("window", "softcap", "scale")}
    begins = jnp.asarray(first, jnp.int32) if how.get("first") else None
    call = jax.jit(
        lambda q, k, v, used: attention_cached(
            q, k, v, table, seqused_k=used, first_k=begins, causal=how.get("causal", False), sink=sink, return_lse=True, **given
        )
    )
    out, lse = call(q, k_cache, v_cache, jnp.asarray(USED, jnp.int32))
    for i, begin in enumerate(first):
        want = true(
            q[i], keys[i][begin:], values[i][begin:], how.get("causal", False), how.get("window"), how.get("softcap"),
            how.get("scale", 0.25), sink,
        )  # fmt: skip
        np.testing.assert_allclose(out[i], want[0], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse[i], want[1], rtol=2e-5, atol=2e-5)


def test_keys_that_a_window_left_behind_may_be_nan() -> None:
    k_cache, v_cache, table, *_ = pools(4)
    q, used = jnp.ones((4, 1, 4, 16)), jnp.asarray(USED, jnp.int32)
    call = jax.jit(lambda k, v: attention_cached(q, k, v, table, seqused_k=used, causal=True, window=(3, None)))
    want = call(k_cache, v_cache)
    gone = int(table[3, 0])
    k_cache, v_cache = (t.at[gone].set(jnp.nan) for t in (k_cache, v_cache))
    assert jnp.array_equal(call(k_cache, v_cache), want)


def test_append_writes_in_place_where_pools_are_donated() -> None:
    k_cache, v_cache, table, *_ = pools(5)
    new = jnp.arange(4 * 2 * 2 * 16, dtype=jnp.float32).reshape(4, 2, 2, 16)
    used = jnp.asarray(USED, jnp.int32)
    table = jnp.arange(20, dtype=jnp.int32).reshape(4, 5)
    step = jax.jit(lambda k, v, kc, vc, used: append_to_cache(k, v, kc, vc, table, seqused_k=used), donate_argnums=(2, 3))
    assert step.lower(new, new, k_cache, v_cache, used).as_text().count("tf.aliasing_output") == 2
    before = np.asarray(k_cache)
    made, _ = step(new, new + 1, k_cache, v_cache, used)
    expected = before.copy()
    for i, n in enumerate(USED):
        for t in range(2):
            expected[int(table[i, (n + t) // 5]), (n + t) % 5] = new[i, t]
    np.testing.assert_array_equal(made, expected)
    slots = jnp.asarray([[0, -1], [6, 10**9], [-1, -1], [-1, 9]])
    k_cache, v_cache, *_ = pools(5)
    made, other = append_to_cache(new, new + 1, k_cache, v_cache, slots=slots)
    expected = np.asarray(k_cache).copy()
    expected[0, 0], expected[1, 1], expected[1, 4] = new[0, 0], new[1, 0], new[3, 1]
    np.testing.assert_array_equal(made, expected)
    assert float(other[1, 4, 0, 0]) == float(new[3, 1, 0, 0]) + 1
    of_8_bits = [append_to_cache(new[:1, :1], new[:1, :1], jnp.zeros((99, 5, 2, 16)), jnp.zeros((99, 5, 2, 16)),
                                 slots=jnp.full((1, 1), 100, kind))[0] for kind in (jnp.int8, jnp.uint8)]  # fmt: skip
    for made in of_8_bits:  # which do not hold 495, the number of rows
        np.testing.assert_array_equal(made[20, 0], new[0, 0])


def test_a_row_without_a_page_is_written_nowhere() -> None:
    k_cache, v_cache, table, *_ = pools(16)
    new = jnp.ones((4, 1, 2, 16))
    made, _ = append_to_cache(new, new, k_cache, v_cache, table * 0 - 1, seqused_k=jnp.asarray([0, 31, 32, 99]))
    np.testing.assert_array_equal(made, k_cache)
    made, _ = append_to_cache(new, new, k_cache, v_cache, table[:, :0], seqused_k=jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(made, k_cache)


def test_no_items_and_no_pages() -> None:
    k_cache, v_cache, table, *_ = pools(4)
    q, used, sink = jnp.ones((4, 2, 4, 16)), jnp.zeros(4, jnp.int32), jnp.arange(4.0)
    out, lse = attention_cached(q, k_cache, v_cache, table[:, :0], seqused_k=used, sink=sink, return_lse=True)
    assert not out.any()
    np.testing.assert_allclose(lse, jnp.broadcast_to(sink[:, None], (4, 4, 2)))
    assert attention_cached(q[:0], k_cache, v_cache, table[:0], seqused_k=used[:0]).shape == (0, 2, 4, 16)


def test_a_generation_is_one_causal_call() -> None:
    """A prompt, then tokens one by one, in bfloat16."""
    k_cache, v_cache = (jnp.zeros((6, 4, 2, 16), jnp.bfloat16) for _ in "kv")
    table = jnp.asarray([[4, 1, 5], [2, 0, 3]], jnp.int32)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 9, 2, 16), jnp.bfloat16)
    used, parts = jnp.zeros(2, jnp.int32), []

    @jax.jit
    def step(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, used: Any) -> Any:
        k_cache, v_cache = append_to_cache(k, v, k_cache, v_cache, table, seqused_k=used)
        used = used + k.shape[1]
        return attention_cached(q, k_cache, v_cache, table, seqused_k=used, causal=True), k_cache, v_cache, used

    for a, b in ((0, 7), (7, 8), (8, 9)):
        out, k_cache, v_cache, used = step(q[:, a:b], k[:, a:b], v[:, a:b], k_cache, v_cache, used)
        parts.append(out)
    whole = jax.nn.dot_product_attention(*(t.astype(jnp.float32) for t in (q, k, v)), is_causal=True)
    np.testing.assert_allclose(jnp.concatenate(parts, 1).astype(jnp.float32), whole, rtol=2e-2, atol=2e-2)


@pytest.mark.compiles
@pytest.mark.parametrize(("split", "calls"), [(0, 1), (256, 2)])
def test_kernels_are_lowered_for_a_gpu(split: int, calls: int) -> None:
    """The decode kernels that PyTorch launches, without a GPU here."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 1, 8, 64), (70, 16, 2, 64), (70, 16, 2, 64))]
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 64), (2,))]

    def function(q: Any, k: Any, v: Any, table: Any, used: Any) -> Any:
        return attention_cached(q, k, v, table, seqused_k=used, causal=True, split=split, implementation="triton")

    with target("sm90"):
        exported = jax.export.export(
            jax.jit(function), platforms=["cuda"], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(HANDLER)]
        )(*shapes, *ints)
    assert exported.mlir_module().count(f"@{HANDLER}") == calls


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, np.ndarray.tolist, lambda x: jnp.asarray(x, jnp.int16)])
def test_integers_of_any_kind(kind: Any, x64: bool) -> None:
    """Under jax_enable_x64 lists and `asarray` give int64."""
    k_cache, v_cache, table, *_ = pools(4)
    q, first = jnp.ones((4, 1, 4, 16)), [0, 1, 0, 2]
    want = attention_cached(q, k_cache, v_cache, table, seqused_k=jnp.asarray(USED, jnp.int32))
    wanted = append_to_cache(q[:, :, :2], q[:, :, :2], k_cache, v_cache, table, seqused_k=jnp.asarray(USED, jnp.int32))
    row = attention_cached(
        q, k_cache[:4], v_cache[:4], seqused_k=jnp.full(4, 9, jnp.int32), first_k=jnp.asarray(first, jnp.int32)
    )
    with jax.enable_x64(x64):
        pages, used = kind(np.asarray(table, np.int64)), kind(np.asarray(USED, np.int64))
        got = attention_cached(q, k_cache, v_cache, pages, seqused_k=used)
        written = append_to_cache(q[:, :, :2], q[:, :, :2], k_cache, v_cache, pages, seqused_k=used)
        padded = attention_cached(q, k_cache[:4], v_cache[:4], seqused_k=kind(np.full(4, 9)), first_k=kind(np.asarray(first)))
    for mine, theirs in zip((got, *written, padded), (want, *wanted, row), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_refusals() -> None:
    k_cache, v_cache, table, *_ = pools(4)
    q, used = jnp.ones((4, 1, 4, 16)), jnp.asarray(USED, jnp.int32)
    good: dict[str, Any] = dict(q=q, k_cache=k_cache, v_cache=v_cache, page_table=table, seqused_k=used)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"page_table": table.astype(jnp.float32)}, "page_table is float32"),
        ({"page_table": table[:2]}, r"it must be int32 \(4, columns\)"),
        ({"page_table": None}, "k_cache has 22 items and the batch 4"),
        ({"seqused_k": used[:2]}, r"seqused_k is int32 of shape \(2,\)"),
        ({"seqused_k": used.astype(jnp.float32)}, "seqused_k is float32"),
        ({"v_cache": v_cache.astype(jnp.bfloat16)}, "v_cache is bfloat16 and q is float32"),
        ({"k_cache": k_cache[..., :8]}, "k_cache has head_dim 8"),
        ({"q": q[0]}, r"q has shape \(1, 4, 16\)"),
        ({"split": 100}, "split is 100"),
        ({"sink": jnp.ones(4, jnp.int8)}, "sink is int8; it must be float16, bfloat16 or float32"),
        ({n: good[n].astype(jnp.int8) for n in ("q", "k_cache", "v_cache")}, "one dtype of float16, bfloat16, float32.$"),
        ({"implementation": "hopper"}, "implementation is 'hopper'"),
        ({"q": None}, "q is None; it must be a JAX array"),
        ({"v_cache": "v"}, "v_cache is 'v'; it must be a JAX array"),
    ]
    for change, says in wrong:
        with pytest.raises(InvalidProblem, match=says):
            attention_cached(**{**good, **change})
    with pytest.raises(NotSupported, match="derivatives of attention_cached"):
        jax.grad(lambda q: attention_cached(**{**good, "q": q}).sum())(q)
    with pytest.raises(NotSupported, match="vmap of attention_cached"):
        jax.vmap(lambda q: attention_cached(**{**good, "q": q}))(q[None])
    with pytest.raises(InvalidProblem, match="exactly one must say"):
        append_to_cache(q[:, :, :2], q[:, :, :2], k_cache, v_cache)
    with pytest.raises(InvalidProblem, match=r"k has shape \(4, 1, 4, 16\)"):
        append_to_cache(q, q, k_cache, v_cache, slots=used)
    with pytest.raises(InvalidProblem, match="v is float16 and k is float32"):
        append_to_cache(q, q.astype(jnp.float16), k_cache, v_cache, slots=used)
    with pytest.raises(InvalidProblem, match="v is None; it must be a JAX array"):
        append_to_cache(q, None, k_cache, v_cache, slots=used)
    two = jnp.ones((2, 1, 2, 16))
    far = np.array([[2**32 + 5], [-(2**32)]])  # whose lower 32 bits are places
    for written, pool in zip(append_to_cache(two, two, k_cache, v_cache, slots=far), (k_cache, v_cache), strict=True):
        np.testing.assert_array_equal(written, pool)
    nowhere = jnp.asarray([[-1], [-1]])
    append_to_cache(two, two, k_cache, v_cache, slots=nowhere)
    with pytest.raises(InvalidProblem, match="slots gives two new keys one place: page 1, row 1"):
        append_to_cache(two, two, k_cache, v_cache, slots=jnp.full((2, 1), k_cache.shape[1] + 1))
    shared, lengths = jnp.asarray([[3], [3]], jnp.int32), jnp.asarray([2, 2], jnp.int32)
    with pytest.raises(InvalidProblem, match="page_table gives two new keys one place: page 3, row 2"):
        append_to_cache(two, two, k_cache, v_cache, shared, seqused_k=lengths)
    jax.jit(append_to_cache)(two, two, k_cache, v_cache, shared, seqused_k=lengths)  # whose numbers nobody sees
