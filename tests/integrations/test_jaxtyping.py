"""jaxtyping's annotations on functions that call flashtile: left alone by torch.compile, checked at run time in eager calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("jaxtyping", reason="jaxtyping is not installed")

import jaxtyping
from jaxtyping import Float

import flashtile
from flashtile import Options

Queries = Float[torch.Tensor, "batch seqlen_q heads_q head_dim"]
Keys = Float[torch.Tensor, "batch seqlen_k heads_kv head_dim"]
Values = Float[torch.Tensor, "batch seqlen_k heads_kv head_dim_v"]
Out = Float[torch.Tensor, "batch seqlen_q heads_q head_dim_v"]
Rows = Float[torch.Tensor, "batch heads_q seqlen_q"]


def attend(q: Queries, k: Keys, v: Values) -> tuple[Out, Rows]:
    return flashtile.attention(q, k, v, causal=True, return_lse=True, options=Options(backend="cpu"))


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 9, 4, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 8)


def test_annotated_functions_are_one_graph() -> None:
    torch._dynamo.reset()
    q, k, v = given()
    for a, b in zip(torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v), attend(q, k, v), strict=True):
        torch.testing.assert_close(a, b)


def test_shapes_are_what_the_annotations_say() -> None:
    typeguard = pytest.importorskip("typeguard", reason="typeguard, which checks annotations, is not installed")
    checked: Callable[..., tuple[torch.Tensor, torch.Tensor]] = jaxtyping.jaxtyped(typechecker=typeguard.typechecked)(attend)
    q, k, v = given()
    assert torch.equal(checked(q, k, v)[0], attend(q, k, v)[0])
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(q, k[..., :8], v)
    swapped = jaxtyping.jaxtyped(typechecker=typeguard.typechecked)(returns_rows_first)
    with pytest.raises(jaxtyping.TypeCheckError):
        swapped(q, k, v)


def returns_rows_first(q: Queries, k: Keys, v: Values) -> tuple[Out, Rows]:
    out, lse = attend(q, k, v)
    return lse, out
