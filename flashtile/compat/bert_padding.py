"""`flash_attn.bert_padding`: tokens taken out of a padded batch, and put back; all differentiable."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """input[indices]; input (tokens, ...), indices (n,)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """(first_axis_dim, ...), values at the indices, 0 elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(input: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(input[indices], input): what a layer takes, and what goes around it."""
    return input.index_select(0, indices), input


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """(tokens (total, ...), indices, cu_seqlens int32 (batch + 1,), max_seqlen, seqused int32 (batch,)).

    hidden_states: (batch, seqlen, ...).
    attention_mask: (batch, seqlen), true or 1 for a token; unused_mask: the same for tokens that are taken along, at the
    end of theirs, and count not in seqused. Waits for the device.
    """
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    return (*_taken(hidden_states, taken.flatten().nonzero().flatten(), taken.sum(-1, dtype=torch.int32)), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """As `unpad_input`, without seqused, where each row of the batch holds several items, their lengths written one after
    another in the row of attention_mask_in_length, (batch, seqlen), with zeros behind.
    """
    lengths = attention_mask_in_length.flatten()
    row = torch.arange(attention_mask_in_length.shape[1], device=lengths.device)
    taken = row < attention_mask_in_length.sum(-1, keepdim=True)
    return _taken(hidden_states, taken.flatten().nonzero().flatten(), lengths[lengths > 0].to(torch.int32))


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """(batch, seqlen, ...) of tokens (total, ...): the inverse of `unpad_input`, 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _taken(
    hidden_states: torch.Tensor, indices: torch.Tensor, seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(seqlens.max()) if seqlens.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
