"""Megatron-LM: `DotProductAttention` in the place of a layer spec's core attention, also where ranks share the sequence."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from flashtile import distributed
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.problem.dropout import Dropout
from flashtile.torch.api.attention import attention
from flashtile.torch.api.layouts import attention_varlen

METHODS = {None: "auto", "p2p": "ring", "all_gather": "allgather", "a2a": "ulysses"}  # by cp_comm_type
MASKS = {"causal": True, "padding_causal": True, "no_mask": False, "padding": False}  # by AttnMaskType: whether causal


class DotProductAttention(torch.nn.Module):
    """Megatron's core attention by flashtile: `self_attention.submodules.core_attention = DotProductAttention` in a layer spec.

    The arguments are those with which Megatron builds its own. Of `config` it reads context_parallel_size, attention_dropout,
    window_size, window_attn_skip_freq, softmax_type and apply_query_key_layer_scaling. cp_comm_type chooses the method; shards
    lie in zigzag, as Megatron deals them. pg_collection: holds the groups `cp` and `tp`; without one Megatron is asked.

    Raises NotSupported for softmax types other than "vanilla", cp_comm_type "a2a+p2p", dropout beside tensor parallelism.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, attention_dropout: float | None = None,
        softmax_scale: float | None = None, cp_comm_type: str | None = None, pg_collection: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        p = config.attention_dropout if attention_dropout is None else attention_dropout
        softmax, groups = getattr(config, "softmax_type", "vanilla"), pg_collection
        refused = {
            f"softmax_type {softmax!r}; it must be 'vanilla'": softmax != "vanilla",
            f"cp_comm_type {cp_comm_type!r}; it must be one of {', '.join(map(str, METHODS))}": cp_comm_type not in METHODS,
            "apply_query_key_layer_scaling": bool(getattr(config, "apply_query_key_layer_scaling", False)),
            "attention_dropout beside tensor parallelism, whose ranks would drop alike": p and _tensor_ranks(groups) > 1,
            **{f"the argument {name}": value is not None for name, value in more.items()},
        }
        _refuse(reason for reason, asked in refused.items() if asked)
        self.config, self.attn_mask_type, self.scale, self.p = config, attn_mask_type, softmax_scale, float(p or 0)
        self.window = _window(config, layer_number)
        self.context = None
        if config.context_parallel_size > 1:
            group = import_module("megatron.core.parallel_state").get_context_parallel_group() if groups is None else groups.cp
            method: Any = METHODS[cp_comm_type]
            self.context = distributed.Context(group, method, "zigzag", check="first")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, attn_mask_type: Any = None,
        attention_bias: Any = None, packed_seq_params: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """out (seqlen, batch, heads head_dim) of query, key, value (seqlen, batch, heads, head_dim), this rank's shards.

        packed_seq_params: query, key and value are then (total, heads, head_dim), and out (total, heads head_dim); without
        context parallelism alone, since Megatron puts each document of it into zigzag by itself. attention_mask: not read,
        where the mask's type is causal or none; of other types it must be None. attention_bias: must be None.
        """
        kind = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        if kind not in MASKS:
            _refuse([f"a mask of type {kind}; it must be one of {', '.join(MASKS)}"])
        refused = {
            "attention_bias is given": attention_bias is not None,
            f"attention_mask of type {kind}; packed sequences need none": "padding" in kind and attention_mask is not None,
            "packed_seq_params beside context parallelism; flashtile.distributed.attention_varlen takes documents that are "
            "dealt out as one": packed_seq_params is not None and self.context is not None,
        }
        _refuse(reason for reason, asked in refused.items() if asked)
        dropout = Dropout(self.p) if self.training and self.p else None
        how: dict[str, Any] = {"causal": MASKS[kind], "window": self.window, "scale": self.scale, "dropout": dropout}
        if packed_seq_params is not None:
            if packed_seq_params.qkv_format != "thd":
                raise InvalidProblem(f"packed_seq_params.qkv_format is {packed_seq_params.qkv_format!r}; it must be 'thd'.")
            starts = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv
            most = {"max_seqlen_q": packed_seq_params.max_seqlen_q, "max_seqlen_k": packed_seq_params.max_seqlen_kv}
            return attention_varlen(query, key, value, *starts, **most, **how).flatten(1)
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        if self.context is None:
            out = attention(q, k, v, **how)
        else:
            out = distributed.attention(q, k, v, context=self.context, **how)
        return out.transpose(0, 1).flatten(2).contiguous()


def _window(config: Any, layer: int) -> tuple[int | None, int | None] | None:
    """A layer's window: layers count from 1; every window_attn_skip_freq-th has none, or those that a list says 0 of."""
    window, skip = getattr(config, "window_size", None), getattr(config, "window_attn_skip_freq", None)
    if not window or (isinstance(skip, int) and layer % skip == 0) or (isinstance(skip, list) and not skip[layer - 1]):
        return None
    left, right = (None if n < 0 else n for n in window)
    return left, right


def _tensor_ranks(groups: Any) -> int:
    """How many ranks share heads, as the groups say, or else Megatron."""
    if groups is None:
        return import_module("megatron.core.parallel_state").get_tensor_model_parallel_world_size()
    return 1 if getattr(groups, "tp", None) is None else groups.tp.size()


def _refuse(reasons: Any) -> None:
    found = list(reasons)
    if found:
        raise NotSupported("Megatron's core attention", {"flashtile": found})
