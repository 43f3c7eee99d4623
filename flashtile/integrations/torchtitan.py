"""torchtitan: after `use_cp_kernel(config, kernel())` the attention of packed tokens is flashtile's, over the ranks of "cp"."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch

from flashtile.distributed import Context, attention_varlen
from flashtile.errors import NotSupported


def kernel(method: str = "auto") -> type[Any]:
    """A class for torchtitan's `use_cp_kernel`: its `VarlenAttention`, of shards, by a method of `flashtile.distributed`.

    Made anew in each call; needs a torchtitan whose `models.common.cp_attention` has `ContextParallelKernel` (September 2026),
    and a model whose inner attention is varlen. Tokens stay in their order (no load balancer), and metadata are the whole's.
    """
    theirs, common = (import_module(f"torchtitan.models.common.{name}") for name in ("cp_attention", "attention"))

    class FlashtileCPVarlenAttention(theirs.ContextParallelKernel, common.VarlenAttention):
        """Packed documents of which every rank has a shard."""

        @dataclass(kw_only=True, slots=True)
        class Config(common.VarlenAttention.Config):
            shard_attention_mask: ClassVar[bool] = False

        def forward(
            self, q_TNH: torch.Tensor, k_TNH: torch.Tensor, v_TNH: torch.Tensor, *, attention_masks: Any,
            scale: float | None = None, enable_gqa: bool = True, **named: Any,
        ) -> torch.Tensor:  # fmt: skip
            """out (tokens / ranks, heads, head_dim_v), of q, k and v likewise. Raises NotSupported for further arguments."""
            unknown = [f"the argument {name}" for name, value in named.items() if value is not None]
            if unknown:
                raise NotSupported("torchtitan's attention", {"flashtile": unknown})
            left, right = (None if n < 0 else n for n in self.window_size)
            context: Any = Context(self.cp_group, method, check="first")  # pyright: ignore[reportArgumentType]
            types: Any = sys.modules.get("spmd_types")  # its checker knows no collectives but its own
            with nullcontext() if types is None else types.no_typecheck():
                out = attention_varlen(
                    q_TNH, k_TNH, v_TNH, attention_masks.cu_seq_q, context=context, window=(left, right), scale=scale,
                    max_seqlen_q=attention_masks.max_q, max_seqlen_k=attention_masks.max_k,
                )  # fmt: skip
            if types is not None and types.is_type_checking():
                spec = import_module("spmd_types.runtime").get_partition_spec(q_TNH)
                types.assert_type(out, types.get_local_type(q_TNH), spec)
            return out

    return FlashtileCPVarlenAttention
