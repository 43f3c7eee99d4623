"""What DeepSpeed's Ulysses asks of an attention of transformers; tests/distributed/engines.py has what ranks share."""

from __future__ import annotations

import pytest
import torch

from flashtile.integrations.transformers import attention_forward


@pytest.mark.parametrize("window", [None, 4])
def test_packed_sequences_by_positions_where_a_wrapper_drops_the_mask(window: int | None) -> None:
    """DeepSpeed's Ulysses calls so: no mask, and position_ids of the whole; each document is attended by itself."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    five, three = (torch.cat([torch.arange(n), torch.arange(12 - n)]) for n in (5, 3))
    laws = [(five[None], [[5, 7], [5, 7]]), (torch.stack([five, three]), [[5, 7], [3, 9]])]
    laws += [(torch.arange(12)[None] * 3, [[12], [12]])]  # jumps ahead, as for longer contexts, begin nothing
    for positions, lengths in laws:
        out, _ = attention_forward(torch.nn.Module(), q, k, v, None, position_ids=positions, sliding_window=window)
        parts = [
            [attention_forward(torch.nn.Module(), *(t[i : i + 1] for t in cut), None, sliding_window=window)[0] for cut in cuts]
            for i, of_row in enumerate(lengths)
            for cuts in [list(zip(*(t.split(of_row, 2) for t in (q, k, v)), strict=True))]
        ]
        expected = torch.cat([torch.cat(row, 1) for row in parts])
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        given = [torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, expected)]
        torch.testing.assert_close(*given, rtol=1e-5, atol=1e-5)
