"""The public function in plain JAX: every option against float64, and against jax.nn where that knows it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashtile import Alibi, Band, Bias, Document, Dropout, InvalidProblem, KeyPadding, NotSupported, Prefix
from flashtile.jax import dot_product_attention, dot_product_attention_varlen, mha
from flashtile.jax.dropout import keep, seed_words
from flashtile.problem.dropout import keep as spec_keep
from tests.jax.judge import CASES, Case, evaluate, judge
from tests.jax.quadratic import attention


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    judge(case, evaluate(case.ours, case.leaves(), case.cotangents()))


THEIRS = [c for c in CASES if not ({"alignment", "softcap"} & c.options.keys() or c.sinks or c.slopes or c.dropout)]
THEIRS = [c for c in THEIRS if c.head_dim == c.head_dim_v and c.dtype == "float32" and not c.lengths_q]


@pytest.mark.parametrize("case", THEIRS, ids=lambda case: case.name)
def test_the_numbers_are_those_of_jax_nn(case: Case) -> None:
    """Where every query sees a key: jax.nn gives the others the mean of all values."""

    @partial(jax.jit, static_argnums=0)
    def call(function: Any, leaves: Any, dout: Any) -> Any:
        def run(leaves: Any) -> Any:
            return function(leaves["q"], leaves["k"], leaves["v"], leaves.get("bias"), **case.fixed(), **case.options)

        out, pull = jax.vjp(run, leaves)
        return out, pull(dout)

    given = case.leaves(), case.cotangents()[0]  # arrays that are constants are folded by XLA's evaluator, slowly
    got, want = call(dot_product_attention, *given), call(jax.nn.dot_product_attention, *given)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5, rtol=1e-4)


def test_residual_is_that_of_jax_nn() -> None:
    case = CASES[0]
    leaves = case.leaves()
    _, theirs = jax.nn.dot_product_attention(leaves["q"], leaves["k"], leaves["v"], return_residual=True)
    np.testing.assert_allclose(case.ours(leaves)[1], theirs, atol=1e-5)


def test_three_axes() -> None:
    leaves = {name: x[0] for name, x in CASES[0].leaves().items()}
    out, lse = dot_product_attention(leaves["q"], leaves["k"], leaves["v"], return_residual=True)
    assert out.shape == leaves["q"].shape
    assert lse.shape == leaves["q"].shape[:2]
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(leaves["q"], leaves["k"], leaves["v"]), atol=1e-5)


@pytest.mark.parametrize("backward", ["auto", "split", "fused", "xla"])
def test_every_backward_gives_the_gradient(backward: str) -> None:
    case = CASES[1]
    judge(case, evaluate(lambda leaves: case.ours(leaves, backward=backward), case.leaves(), case.cotangents()))


def test_plain_jax_by_name() -> None:
    judge(CASES[1], evaluate(lambda leaves: CASES[1].ours(leaves, "xla"), CASES[1].leaves(), CASES[1].cotangents()))


@pytest.mark.parametrize("which", ["out", "lse"])
def test_one_output_alone(which: str) -> None:
    case = CASES[1]
    dout, dlse = case.cotangents()
    flows = (dout, dlse * 0) if which == "out" else (dout * 0, dlse)

    def gradient(leaves: Any) -> Any:
        def loss(leaves: Any) -> Any:
            out, lse = case.ours(leaves)
            return (out * dout).sum() if which == "out" else (lse * dlse).sum()

        return {f"d{name}": grad for name, grad in jax.grad(loss)(leaves).items()}

    got = {**evaluate(case.ours, case.leaves(), flows), **jax.jit(gradient)(case.leaves())}
    want = evaluate(case.plain, case.leaves(), flows)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", ["", "bnts"])
@pytest.mark.parametrize("name", ["lengths-bottom-right", "lengths-top-left"])
def test_what_lies_in_padding_is_never_looked_at(name: str, bias: str) -> None:
    case = next(replace(c, bias=bias) for c in CASES if c.name == name)
    leaves, clean = case.leaves(), evaluate(case.ours, case.leaves(), case.cotangents())
    for b, (rows, keys) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True)):
        leaves["q"] = leaves["q"].at[b, rows:].set(jnp.nan)
        leaves["k"], leaves["v"] = (leaves[n].at[b, keys:].set(jnp.nan) for n in "kv")
        if bias:
            leaves["bias"] = leaves["bias"].at[b, :, rows:].set(jnp.nan).at[b, :, :, keys:].set(jnp.nan)
    spoiled = evaluate(case.ours, leaves, case.cotangents())
    for name, array in clean.items():
        np.testing.assert_array_equal(spoiled[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("keys", "sinks", "dtype"),
    [(9, False, jnp.float32), (150, True, jnp.float32), (150, False, jnp.bfloat16)],
    ids=["fp32", "sinks", "bf16"],
)
@pytest.mark.parametrize("name", ["window", "mask", "head"])
def test_keys_that_no_query_sees_and_queries_that_see_none_are_never_looked_at(
    name: str, keys: int, sinks: bool, dtype: Any
) -> None:
    """Their NaN reaches nothing, bit for bit, whether a band hides them, a predicate, or a mask of each head."""
    rows, first_key, first_row = keys, 2, 3
    q, k, v, dout = (
        jax.random.normal(jax.random.key(i), (1, rows, 4 if i in (0, 3) else 2, 8)).astype(dtype) for i in range(4)
    )
    i, j = jnp.arange(rows)[:, None], jnp.arange(keys)
    seen = (j >= first_key) & (i >= first_row) & (j <= i)
    options: dict[str, Any] = {"mask": jnp.broadcast_to(seen, (1, 1, rows, keys))}
    if name == "head":  # key head 1 alone
        options["mask"] = jnp.stack([j <= i, j <= i, seen, seen])[None]
    if name == "window":  # query i sees keys up to i - 4
        options = dict(local_window_size=(None, -4))
        q_hidden, k_hidden, heads, key_heads = slice(0, 4), slice(keys - 4, keys), slice(0, 4), slice(0, 2)
    else:
        q_hidden, k_hidden = slice(0, first_row), slice(0, first_key)
        heads, key_heads = (slice(2, 4), slice(1, 2)) if name == "head" else (slice(0, 4), slice(0, 2))
    if sinks:
        options["sinks"] = jnp.linspace(-1.0, 1.0, 4)

    def made(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda *x: dot_product_attention(*x, implementation="xla", **options), q, k, v)
        return out, *pull(dout)

    clean = made(q, k, v, dout)
    spoiled = made(
        q.at[:, q_hidden, heads].set(jnp.nan), *(x.at[:, k_hidden, key_heads].set(jnp.nan) for x in (k, v)),
        dout.at[:, q_hidden, heads].set(jnp.nan),
    )  # fmt: skip
    for mine, theirs in zip(spoiled, clean, strict=True):
        assert jnp.isfinite(theirs).all()
        np.testing.assert_array_equal(mine, theirs)


def test_hidden_scores_of_nan_stay_hidden_under_a_softcap() -> None:
    """Its derivative there is NaN, by which the gradient 0 would be multiplied."""
    i, j = jnp.arange(40)[:, None], jnp.arange(40)[None, :]
    leaves = Case("", bias="1nts").leaves()
    spoiled = {**leaves, "bias": jnp.where(j > i, jnp.nan, leaves["bias"])}

    def gradient(leaves: Any) -> Any:
        names = "q", "k", "v", "bias"
        loss = lambda x: (dot_product_attention(*map(x.get, names), is_causal=True, softcap=3.0) ** 2).sum()  # noqa: E731
        return jax.grad(loss)(leaves)

    for name, array in gradient(leaves).items():
        np.testing.assert_array_equal(gradient(spoiled)[name], array, err_msg=name)


def test_lengths_end_where_the_arrays_do() -> None:
    q, k, v = (Case("").leaves()[n] for n in "qkv")
    lengths = {"query_seq_lengths": [-1, 99], "key_value_seq_lengths": [99, 99]}
    got = dot_product_attention(
        q, k, v, is_causal=True, alignment="bottom-right", **{name: jnp.array(n, jnp.int32) for name, n in lengths.items()}
    )
    assert not got[0].any()
    np.testing.assert_allclose(got[1], dot_product_attention(q, k, v, is_causal=True, alignment="bottom-right")[1], atol=1e-6)


def test_predicates_join_with_bands() -> None:
    q, k, v = (CASES[0].leaves()[n][:, :40] for n in "qkv")
    ids = jnp.arange(40, dtype=jnp.int32)[None] // 9
    holes = jnp.arange(40) % 5 != 2
    lengths = jnp.array([3, 20], jnp.int32)
    i, j = jnp.arange(40)[:, None], jnp.arange(40)[None, :]
    documents = (ids[0][:, None] == ids[0][None, :])[None, None]
    for attend_to, seen in (
        (Document(ids[0]) & Band(right=0), documents & (j <= i)),
        (Prefix(lengths) | Band(right=0), (j < lengths[:, None, None, None]) | (j <= i)),
        (KeyPadding(jnp.broadcast_to(holes, (2, 40))), holes[None, None, None]),
    ):
        got = dot_product_attention(q, k, v, attend_to=attend_to)
        np.testing.assert_allclose(got, attention(q, k, v, mask=seen)[0], atol=1e-5)


def test_max_seqlen_q_speaks_of_keys_that_share_the_list() -> None:
    q, items = jnp.zeros((64, 2, 16)), jnp.array([0, 40, 64])
    with pytest.raises(NotSupported, match=r"(?s)q=2x40x2x16,kv=40x2x16.*put the items into one row, under Document"):
        dot_product_attention_varlen(q, q, q, items, max_seqlen_q=40, score=(Bias(jnp.zeros((1, 2, 40, 40))),))


@pytest.mark.parametrize(
    "options", [{}, {"sinks": True, "slopes": True}, {"dropout": True}], ids=["plain", "scores", "dropout"]
)
def test_varlen_is_item_by_item(options: dict[str, bool]) -> None:
    rng = np.random.default_rng(0)
    cu_q, cu_k = np.array([0, 20, 20, 27, 60]), np.array([0, 31, 40, 40, 66])
    q, k, v = (jnp.asarray(rng.standard_normal((n, h, 16)), jnp.float32) for n, h in ((64, 4), (70, 2), (70, 2)))
    slopes, sinks = jnp.asarray(rng.random(4) / 4, jnp.float32), jnp.asarray(rng.standard_normal(4), jnp.float32)
    dropout = Dropout(0.3, 5) if "dropout" in options else None
    flow = jnp.asarray(rng.standard_normal((64, 4, 16)), jnp.float32)

    def ours(q: Any, k: Any, v: Any, slopes: Any, sinks: Any, cu_q: Any, cu_k: Any) -> Any:
        out, lse = dot_product_attention_varlen(
            q, k, v, cu_q, cu_k, is_causal=True, return_residual=True, dropout=dropout, max_seqlen_q=33,
            score=(Alibi(slopes),) if "slopes" in options else (), sinks=sinks if "sinks" in options else None,
        )  # fmt: skip
        return (out * flow).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum(), (out, lse)

    def theirs(q: Any, k: Any, v: Any, slopes: Any, sinks: Any) -> Any:
        total, outs, lses = 0.0, [], []
        for i in range(4):
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            own: dict[str, Any] = {
                "slopes": slopes if "slopes" in options else None,
                "sinks": sinks if "sinks" in options else None,
            }
            if dropout is not None:
                index = (jnp.arange(n, dtype=jnp.int32) for n in (4, rows.stop - rows.start, keys.stop - keys.start))
                head, row, key = (x.reshape(1, *(-1 if a == b else 1 for b in range(3))) for a, x in enumerate(index))
                own |= dict(p=0.3, keep=keep(0.3, jnp.full((1, 1, 1, 1), i, jnp.int32), head, row, key, 4, seed_words(dropout)))
            out, lse = attention(q[None, rows], k[None, keys], v[None, keys], is_causal=True, bottom_right=True, **own)
            total += (out[0] * flow[rows]).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()
            outs.append(out[0])
            lses.append(lse[0])
        return total, (jnp.concatenate(outs), jnp.concatenate(lses))

    leaves = (q, k, v, slopes, sinks)
    got, (out, lse) = jax.jit(jax.grad(ours, range(5), has_aux=True))(
        *leaves, *(jnp.asarray(c, jnp.int32) for c in (cu_q, cu_k))
    )
    want, (exact, exact_lse) = jax.jit(jax.grad(theirs, range(5), has_aux=True))(*leaves)
    np.testing.assert_allclose(out[:60], exact, atol=2e-5)
    np.testing.assert_allclose(lse[:60], exact_lse, atol=2e-5)
    assert not out[60:].any()
    assert (lse[60:] == -jnp.inf).all()
    for mine, theirs_ in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs_, atol=1e-4, rtol=1e-4)


def test_tokens_before_the_first_item_belong_to_nobody() -> None:
    q, k, v = (CASES[0].leaves()[n][0] for n in "qkv")
    got = dot_product_attention_varlen(q, k, v, jnp.array([3, 9], jnp.int32), jnp.array([2, 12], jnp.int32))
    assert not got[:3].any()
    np.testing.assert_allclose(got[3:9], dot_product_attention(q[3:9], k[2:12], v[2:12]), atol=1e-6)


@pytest.mark.parametrize("p", [0.37, 0.05, 0.5, 0.8])
def test_dropout_keeps_what_pytorch_keeps(p: float) -> None:
    """`keep` of ints is what every backend is held against."""
    dropout = Dropout(p, -987654321012345)
    index = (0, 1), (0, 2), (0, 1, 8, 9, 22, 100), (0, 1, 2, 8, 9, 15, 64, 131, 4000)
    places = [np.reshape(n, (-1, *(1,) * (3 - axis))) for axis, n in enumerate(index)]
    mine = keep(dropout.p, *(jnp.asarray(x, jnp.int32) for x in places), 3, seed_words(dropout))
    kept = [bool(spec_keep(p, *place, 3, (dropout.seed, 0))) for place in itertools.product(*index)]
    assert mine.ravel().tolist() == kept


def test_a_key_seeds_dropout() -> None:
    q, k, v = (CASES[0].leaves()[n] for n in "qkv")
    call = jax.jit(lambda key: dot_product_attention(q, k, v, dropout=Dropout(0.5, key)))
    first, again, other = call(jax.random.key(1)), call(jax.random.key(1)), call(jax.random.key(2))
    assert (first == again).all()
    assert (first == call(jax.random.PRNGKey(1))).all()
    assert (first != other).any()


@pytest.mark.parametrize("implementation", ["triton", "triton_split", "xla"])
def test_mha_has_the_scale_of_its_model(implementation: str) -> None:
    q, k, v = (CASES[1].leaves()[n] for n in "qkv")
    out = mha(q, k, v, 0.3, True, backward_pass_impl=implementation)
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(q, k, v, scale=0.3, is_causal=True), atol=1e-5)


def test_dropout_that_drops_nothing_needs_no_seed() -> None:
    q, k, v = (CASES[0].leaves()[n] for n in "qkv")
    np.testing.assert_array_equal(dot_product_attention(q, k, v, dropout=Dropout(0.0)), dot_product_attention(q, k, v))


@pytest.mark.parametrize("scores", ["", "bnts"])
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=str)
def test_nothing_to_do(sizes: tuple[int, int, int], scores: str) -> None:
    batch, seqlen_q, seqlen_k = sizes
    case = Case("", batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, bias=scores, mask=scores)
    got = evaluate(case.ours, case.leaves(), case.cotangents())
    assert not got["out"].any()
    assert (got["lse"] == -np.inf).all()
    assert not got["dq"].any()
    assert not got["dv"].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_exact_delta_lets_the_gradients_of_a_row_s_scores_cancel(dtype: str) -> None:
    """A bias of queries alone has their sum for its gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, (1, 40, 2, 16)).astype(dtype) for key in keys)

    def loss(bias: Any, delta: Any) -> Any:
        out = dot_product_attention(q, k, v + 4, bias, is_causal=True, delta=delta, implementation="xla")
        return (out * dout).astype(jnp.float32).sum()

    every, row = jnp.zeros((1, 2, 40, 40)), jnp.zeros((1, 2, 40, 1))
    sizes = jnp.abs(jax.grad(loss)(every, "exact")).sum(3, keepdims=True)
    assert (jnp.abs(jax.grad(loss)(row, "exact")) <= 2.0**-12 * sizes + 1e-6).all()
    with pytest.raises(InvalidProblem, match="delta is 'none'"):
        loss(row, "none")
