"""Context parallelism: attention of sequences that are sharded over the ranks of a `torch.distributed` group.

Every rank holds a shard of q, k and v along the sequence and gets its shard of out. Transport is torch.distributed alone.
"""

from __future__ import annotations

from flashtile.torch.context.attention import attention
from flashtile.torch.context.context import Context
from flashtile.torch.context.shards import document_ids, padded_length, position_ids, shard, unshard
from flashtile.torch.context.varlen import attention_varlen

__all__ = ["Context", "attention", "attention_varlen", "document_ids", "padded_length", "position_ids", "shard", "unshard"]
