"""flash-attention 1's block-sparse attention: `flash_attn.flash_blocksparse_attn_interface` and `..._attention`.

Blocks are 16 queries x 256 keys. Batches of one length visit only blocks that hold something; where items differ in length,
all of them, and the mask is asked of every score.
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import Asked, longest, refuse
from flashtile.compat.bert_padding import pad_input
from flashtile.compat.flash_attn import answer
from flashtile.compat.flash_attn_1 import by_item, head_dim_of, refuse_weights, unpad_input
from flashtile.errors import InvalidProblem
from flashtile.features.masks.block_table import BlockTable
from flashtile.torch.api.blocks import Blocks
from flashtile.torch.api.layouts import attention_qkvpacked

ROWS, COLUMNS = 16, 256


def convert_blockmask(blockmask: torch.Tensor, causal: bool) -> torch.Tensor:
    """int32 (columns, rows): of each column of blocks the rows that it is visible in, first to last, then -1.

    blockmask: (rows, columns). An entry is 4 row + 2 (it is the row's last block) + 1 (it is the row's first).
    """
    refuse("convert_blockmask", {"causal is True; the lists say nothing of it": causal})
    mask = blockmask != 0
    first = mask & (mask.cumsum(1) == 1)
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    entry = 4 * torch.arange(mask.shape[0], device=mask.device)[:, None] + 2 * last + first
    entry = entry.masked_fill(~mask, -1)
    return entry.gather(0, (~mask).to(torch.int8).argsort(dim=0, stable=True)).T.contiguous().to(torch.int32)


def _table(converted: torch.Tensor) -> torch.Tensor:
    """The blockmask, bool (rows, columns), of what `convert_blockmask` gave."""
    columns, rows = converted.shape
    table = torch.zeros((rows + 1, columns), dtype=torch.bool, device=converted.device)
    row = torch.where(converted < 0, rows, converted // 4).long()
    return table.index_put_(
        (row.T, torch.arange(columns, device=row.device)), torch.ones((), dtype=torch.bool, device=row.device)
    )[:rows]


def _checked(blockmask: torch.Tensor, seqlen: int) -> torch.Tensor:
    wanted = (-(-seqlen // ROWS), -(-seqlen // COLUMNS))
    if blockmask.dim() != 2 or blockmask.shape[0] < wanted[0] or blockmask.shape[1] < wanted[1]:
        raise InvalidProblem(
            f"blockmask has shape {tuple(blockmask.shape)}; it must be at least {wanted}, for {seqlen} tokens in blocks of "
            f"{ROWS} x {COLUMNS}."
        )
    return (blockmask != 0)[: wanted[0], : wanted[1]]


def flash_blocksparse_attn_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, blockmask: torch.Tensor, dropout_p: float, max_s: Any,
    softmax_scale: float | None = None, causal: bool = False, return_attn_probs: bool = False, convert_mask: bool = True,
) -> Any:  # fmt: skip
    """out, or (out, S_dmask, lse), in this order. qkv: (total, 3, heads, head_dim).

    blockmask: (rows, columns), of every item; with convert_mask False, what `convert_blockmask` gave.
    """
    most = longest(max_s)
    table = _checked(blockmask if convert_mask else _table(blockmask), most)
    asked = Asked(softmax_scale, causal, dropout_p=dropout_p, mask=BlockTable(table[None, None], ROWS, COLUMNS))
    made = answer(
        asked, return_attn_probs, lambda **how: attention_qkvpacked(qkv, cu_seqlens=cu_seqlens, max_seqlen=most, **how), (qkv,),
        (cu_seqlens, cu_seqlens), (most, most),
    )  # fmt: skip
    if not return_attn_probs:
        return made
    out, lse, signs = by_item(made, cu_seqlens, most)
    return out, signs, lse


class FlashBlocksparseAttention(torch.nn.Module):
    """`flash_attn.flash_blocksparse_attention.FlashBlocksparseAttention`.

    sparsity_config: an object whose `make_layout(seqlen)` gives the blockmask (rows, columns); instantiate a hydra
    configuration first. The buffers `layout` and `blockmask_converted` are in its state_dict, as there.
    """

    layout: torch.Tensor
    blockmask_converted: torch.Tensor

    def __init__(
        self, sparsity_config: Any, softmax_temp: float | None = None, attention_dropout: float = 0.0,
        max_seq_length: int = 2048, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__()
        if not hasattr(sparsity_config, "make_layout"):
            raise InvalidProblem(
                f"sparsity_config is a {type(sparsity_config).__name__}; it must have make_layout(seqlen), as what hydra "
                "instantiates has."
            )
        self.sparsity_config, self.softmax_temp, self.dropout_p = sparsity_config, softmax_temp, attention_dropout
        layout = sparsity_config.make_layout(-(-max_seq_length // COLUMNS) * COLUMNS).to(device)
        self.register_buffer("layout", layout)
        self.register_buffer("blockmask_converted", convert_blockmask(layout, causal=False))

    def forward(
        self, qkv: torch.Tensor, attn_mask: Any = None, key_padding_mask: Any = None, causal: bool = False,
        cu_seqlens: torch.Tensor | None = None, max_s: Any = None, need_weights: bool = False, convert_mask: bool = True,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """(out, None). qkv: (batch, seqlen, 3, heads, head_dim), or with cu_seqlens (total, 3, heads, head_dim).

        key_padding_mask: (batch, seqlen), True for a token, or an object that has it as `bool_matrix`.
        """
        refuse_weights(need_weights)
        refuse(
            "FlashBlocksparseAttention", {"attn_mask is given; the layout alone says what is visible": attn_mask is not None}
        )
        p = self.dropout_p if self.training else 0.0
        how = (p, max_s, self.softmax_temp, causal)
        if cu_seqlens is not None:
            mask = self.layout if convert_mask else self.blockmask_converted
            return flash_blocksparse_attn_func(qkv, cu_seqlens, mask, *how, convert_mask=convert_mask), None
        batch, seqlen = qkv.shape[:2]
        if key_padding_mask is None:
            blocks = Blocks.from_block_mask(_checked(self.layout, seqlen), seqlen, seqlen, block_size=(ROWS, COLUMNS))
            asked = Asked(self.softmax_temp, causal, dropout_p=p, mask=blocks)
            return attention_qkvpacked(qkv, **asked.arguments()), None
        keep = getattr(key_padding_mask, "bool_matrix", key_padding_mask)
        tokens, indices, cu_seqlens, max_s = unpad_input(qkv, keep)
        out = flash_blocksparse_attn_func(tokens, cu_seqlens, self.layout, p, max_s, self.softmax_temp, causal)
        return pad_input(out, indices, batch, seqlen), None


class FlashBlocksparseMHA(torch.nn.Module):
    """`flash_attn.flash_blocksparse_attention.FlashBlocksparseMHA`."""

    def __init__(
        self, embed_dim: int, num_heads: int, sparsity_config: Any, bias: bool = True, batch_first: bool = True,
        attention_dropout: float = 0.0, causal: bool = False, max_seq_length: int = 2048, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__()
        refuse("FlashBlocksparseMHA", {"batch_first is False; batches come first": not batch_first})
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.head_dim = head_dim_of(embed_dim, num_heads)
        self.Wqkv = torch.nn.Linear(embed_dim, 3 * embed_dim, bias, device, dtype)
        self.inner_attn = FlashBlocksparseAttention(
            sparsity_config, attention_dropout=attention_dropout, max_seq_length=max_seq_length, device=device, dtype=dtype
        )
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias, device, dtype)

    def forward(
        self, x: torch.Tensor, x_ignored_: Any = None, x_ignored_1_: Any = None, attn_mask: Any = None,
        key_padding_mask: Any = None, need_weights: bool = False,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """(out, None); x: (batch, seqlen, embed_dim), of which q, k and v are made: the next two are keys and values of
        interfaces that pass them, and must be x or None.
        """
        for name, other in (("x_ignored_", x_ignored_), ("x_ignored_1_", x_ignored_1_)):
            differs = other is not None and other is not x
            refuse("FlashBlocksparseMHA", {f"{name} is another tensor than x; this is self-attention": differs})
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        out, weights = self.inner_attn(qkv, attn_mask, key_padding_mask, self.causal, need_weights=need_weights)
        return self.out_proj(out.flatten(-2)), weights
