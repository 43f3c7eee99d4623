"""What is refused, and how."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import flashtile.jax
from flashtile import Alibi, Band, Bias, Dropout, InvalidProblem, KeyPadding, NotSupported, Score
from flashtile.jax import dot_product_attention, dot_product_attention_varlen, launch, mha, target
from flashtile.jax.arguments import OTHERS

Q, K = jnp.zeros((2, 8, 4, 16)), jnp.zeros((2, 8, 2, 16))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((None, K, K), {}, "query is None; it must be an array"),
        ((Q, K, None), {}, "value is None; it must be an array"),
        ((Q, "k", K), {}, "key is 'k'; it must be a JAX array"),
        ((Q[None], K, K), {}, r"query has shape \(1, 2, 8, 4, 16\); it must be \(B, T, N, H\)"),
        ((Q[0, 0], K, K), {}, "key has batch 2 and query has 1"),
        ((Q, K[:1], K), {}, "key has batch 1 and query has 2"),
        ((Q, K[..., :8], K), {}, "key has head_dim 8 and query has 16"),
        ((Q, K, K[:, :4]), {}, "value has seqlen 4 and key has 8"),
        ((Q, K, K.astype(jnp.bfloat16)), {}, "value is bfloat16 and query is float32"),
        ((Q.astype(int), K, K), {}, "query is int32; it must be float16, bfloat16 or float32"),
        ((Q[:, :, :3], K, K), {}, "heads_q is 3 and heads_kv is 2"),
        ((Q, K, K), {"bias": jnp.zeros((3, 4, 8, 8))}, "bias's tensor has shape"),
        ((Q, K, K), {"mask": jnp.ones((2, 1, 8, 8))}, "mask is float32; it must be bool"),
        ((Q, K, K), {"mask": jnp.ones((3, 1, 8, 8), bool)}, "stored mask has shape"),
        ((Q, K, K), {"is_causal": 1}, "is_causal is 1; it must be True or False"),
        ((Q, K, K), {"local_window_size": (-1, 0)}, r"local_window_size is \(-1, 0\) .* hide every key.* must be None"),
        ((Q, K, K), {"local_window_size": (-1, 3), "is_causal": True}, r"local_window_size is \(-1, 3\) and is_causal True"),
        ((Q, K, K), {"local_window_size": (1.0, 2)}, r"window left is 1\.0|Band left is 1\.0"),
        ((Q, K, K), {"scale": "big"}, "scale is 'big'"),
        ((Q, K, K), {"query_seq_lengths": jnp.ones(3, jnp.int32)}, r"query_seq_lengths is int32 of shape \(3,\); .* \(2,\)"),
        ((Q, K, K), {"is_causal": True, "query_seq_lengths": jnp.ones(1, jnp.int32)}, r"query_seq_lengths is .* \(1,\)"),
        ((Q, K, K), {"key_value_seq_lengths": jnp.ones(2)}, "key_value_seq_lengths is float32"),
        ((Q, K, K), {"implementation": "cudnn"}, "implementation is 'cudnn'; it must be one of"),
        ((Q, K, K), {"return_residual": 1}, "return_residual is 1"),
        ((Q, K, K), {"alignment": "middle"}, "alignment is 'middle'"),
        ((Q, K, K), {"backward": "fast"}, "backward is 'fast'"),
        ((Q, K, K), {"backward": "split", "implementation": "xla"}, "one backward of its own"),
        ((Q, K, K), {"softcap": 0.0}, "softcap is 0.0"),
        ((Q, K, K), {"scale": jnp.ones(4)}, r"scale has shape \(4,\); it must be one number: scale the array itself"),
        ((Q, K, K), {"sinks": jnp.zeros(3)}, r"sink has shape \(3,\)"),
        ((Q, K, K), {"sinks": [0.0] * 3}, r"sink has shape \(3,\)"),
        ((Q, K, K), {"sinks": "many"}, "sinks is a str; it must be a JAX array"),
        ((Q, K, K), {"sinks": ["many"]}, r"sinks is \['many'\]; it must be a JAX array"),
        ((Q, K, K), {"query_seq_lengths": [True, False]}, "query_seq_lengths is bool"),
        ((Q, K, K), {"key_value_seq_lengths": [8, 2**40]}, r"key_value_seq_lengths is \[8, 1099511627776\]"),
        ((Q, K, K), {"score": Alibi(jnp.zeros(4))}, "it must be a tuple of score modifiers"),
        ((Q, K, K), {"score": (Alibi(jnp.zeros(3)),)}, r"alibi slopes have shape \(3,\)"),
        ((Q, K, K), {"attend_to": "all"}, "attend_to is a str"),
        ((Q, K, K), {"attend_to": jnp.ones((8, 8), bool)}, "Booleans for every score go in as mask"),
        ((Q, K, K), {"attend_to": lambda at: at.k}, "attend_to is a function; .* A function of positions becomes a Predicate"),
        ((Q, K, K), {"mask": Band(right=0)}, "mask is a Band; it must be booleans for every score: such a mask is attend_to"),
        ((Q, K, K), {"attend_to": KeyPadding(jnp.ones((2, 7), bool))}, r"key padding is \(2, 7\); its last axis must be"),
        ((Q, K, K), {"attend_to": KeyPadding(jnp.ones((2, 9), bool))}, r"\(2, 9\); its last axis must be seqlen_k, 8"),
        ((Q, K, K), {"attend_to": KeyPadding(jnp.ones((2, 8)))}, "key_padding's tensor is fp32; it must be bool, or ints"),
        ((Q, K, K), {"dropout": 0.1}, "dropout is 0.1"),
        ((Q, K, K), {"dropout": Dropout(0.1)}, "dropout seed is None"),
        ((Q, K, K), {"dropout": Dropout(0.1, jnp.zeros(2))}, "dropout seed is float32"),
        ((Q, K, K), {"precision": "high"}, "precision is 'high'"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        dot_product_attention(*arguments, **options)


def test_an_unknown_name_is_no_option() -> None:
    unexpected = "got an unexpected keyword argument 'dropout_rate'"
    with pytest.raises(TypeError, match=rf"^dot_product_attention\(\) {unexpected}"):
        dot_product_attention(Q, K, K, dropout_rate=0.1)
    with pytest.raises(TypeError, match=rf"^dot_product_attention_varlen\(\) {unexpected}"):
        dot_product_attention_varlen(Q[0], K[0], K[0], jnp.zeros(3, jnp.int32), dropout_rate=0.1)


@pytest.mark.parametrize("name", OTHERS)
def test_other_front_ends_names_are_told_apart(name: str) -> None:
    calls = {
        "dot_product_attention": lambda **how: dot_product_attention(Q, K, K, **how),
        "dot_product_attention_varlen": lambda **how: dot_product_attention_varlen(Q[0], K[0], K[0], jnp.zeros(3, int), **how),
    }
    for function, call in calls.items():
        if name not in inspect.signature(getattr(flashtile.jax, function)).parameters:
            with pytest.raises(TypeError, match=rf"^{function}\(\) .*'{name}'; did you mean {re.escape(OTHERS[name])}\?$"):
                call(**{name: None})


def test_explain_takes_a_spelling_from_here() -> None:
    with pytest.raises(InvalidProblem, match=r"q is a ArrayImpl; it must be a torch.Tensor, or the problem's spelling"):
        flashtile.explain(Q, K, K)


def test_varlen_says_what_it_wants() -> None:
    with pytest.raises(InvalidProblem, match=r"query has shape \(2, 8, 4, 16\); it must be \(total, heads, head_dim\)"):
        dot_product_attention_varlen(Q, K, K, jnp.zeros(3, jnp.int32))
    with pytest.raises(InvalidProblem, match="cu_seqlens_q is float32"):
        dot_product_attention_varlen(Q[0], K[0], K[0], jnp.zeros(3))
    with pytest.raises(InvalidProblem, match=r"cu_seqlens_k is int32 of shape \(2,\); it must be int32, of shape \(3,\)"):
        dot_product_attention_varlen(Q[0], K[0], K[0], jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.int32))
    for longest in (-1, 2.0, jnp.float32(3), jnp.int32([3])):
        with pytest.raises(InvalidProblem, match=r"max_seqlen_k is .* it must be an int, at least 0, or None"):
            dot_product_attention_varlen(Q[0], K[0], K[0], jnp.zeros(3, jnp.int32), max_seqlen_k=longest)
    with pytest.raises(InvalidProblem, match="aligned 'bottom-right'"):
        dot_product_attention_varlen(Q[0], K[0], K[0], jnp.zeros(3, jnp.int32), alignment="top-left")


@pytest.mark.parametrize("scores", [(8, 8), (1, 8), (8, 1)], ids=str)
def test_a_bias_of_every_score_where_items_lie_one_after_another(scores: tuple[int, int]) -> None:
    items = jnp.array([0, 5, 8], jnp.int32)
    for implementation in (None, "xla"):
        with pytest.raises(NotSupported, match="bias's tensor has an element for every query or key; supported is one number"):
            dot_product_attention_varlen(
                Q[0], K[0], K[0], items, score=(Bias(jnp.zeros((2, 4, *scores))),), implementation=implementation
            )


@pytest.mark.parametrize("options", [{"backward_pass_impl": "cuda"}, {"block_q": 64}, {"interpret": True}, {"num_warps": 4}])
def test_mha_refuses_what_it_does_not_follow(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidProblem, match=next(iter(options))):
        mha(Q, K, K, **options)


def test_an_unknown_target() -> None:
    with pytest.raises(InvalidProblem, match="target is 'sm1'; it must be one of sm80"), target("sm1"):
        pass


def test_a_modifier_without_a_formula_in_jax() -> None:
    class Doubled(Score):
        name = "doubled_in_a_test_of_jax"

    with pytest.raises(NotSupported, match="has no `apply_jax`"):
        dot_product_attention(Q, K, K, score=(Doubled(),))
    with pytest.raises(NotSupported, match="has no `apply_jax`"):
        dot_product_attention(Q, K, K, score=(Doubled(),), implementation="xla")


def test_an_old_jaxlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import jaxlib.version

    monkeypatch.setattr(jaxlib.version, "__version__", "0.11.0")
    with pytest.raises(NotSupported, match=r"jaxlib is 0\.11\.0; its launcher makes TMA descriptors from 0\.11\.1 on"):
        launch.require_jaxlib()
    assert np.isfinite(dot_product_attention(Q, K, K)).all()  # plain JAX needs no launcher
