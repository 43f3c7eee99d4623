"""What callers pass: masks, numbers and names as other libraries have them are taken, or refused with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Band, Blocks, Document, InvalidProblem, KeyPadding, Prefix, Stored

IDS = torch.zeros(8, dtype=torch.int32)


@pytest.mark.parametrize("used", [None, torch.tensor([5, 8], dtype=torch.int32)], ids=["all", "used"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: KeyPadding(torch.ones(2, 12, dtype=torch.bool)), "key padding is (2, 12); its last axis must be seqlen_k, 8"),
        (lambda: KeyPadding(torch.ones(1, 12, dtype=torch.bool)), "key padding is (2, 12); its last axis must be seqlen_k, 8"),
        (lambda: Document(torch.zeros(12).int()), "document queries is (2, 12); its last axis must be seqlen_q, 8"),
        (lambda: Document(IDS, torch.zeros(2, 9).int()), "document keys is (2, 9); its last axis must be seqlen_k, 8"),
    ],
)  # fmt: skip
def test_masks_that_reach_beyond_the_keys_are_not_cut_in_silence(make: Callable[[], Any], name: str, used: Any) -> None:
    """A cache's mask has a column for each of its places: which of them are the keys is the caller's to say."""
    q = torch.randn(2, 8, 4, 16)
    for given in (make(), make() & Band(right=0)):
        for run in (flashtile.attention, torch.compile(flashtile.attention, backend="eager", dynamic=False)):
            with pytest.raises(Exception, match=re.escape(name)):
                run(q, q, q, mask=given, seqused_k=used)
    with pytest.raises(InvalidProblem, match=re.escape(name)):
        Blocks.build(make(), 8, 8, batch=2)


@pytest.mark.parametrize("kind", ["keep", "ids", "prefix", "stored"])
def test_ints_of_64_bits_are_read_as_they_are(backend: str, place: torch.device, kind: str) -> None:
    """Tokenizers and cumsum give them. Documents apart by 2 to the 32 are documents apart."""
    q = torch.randn(2, 8, 2, 16, device=place)
    keep, ids = torch.arange(16, device=place).view(2, 8) % 3 > 0, (IDS // 3).to(place)
    masks: dict[str, tuple[Any, Any]] = {
        "keep": (KeyPadding(keep), KeyPadding(keep.long())),
        "ids": (Document(ids), Document(ids.long() << 32)),
        "prefix": (Prefix(torch.tensor([3, 5], device=place).int()), Prefix(torch.tensor([3, 5], device=place))),
        "stored": (Stored(keep[:, None, None]), Stored(keep[:, None, None].long())),
    }
    options = flashtile.Options(backend=backend)
    for band in (Band(), Band(right=0)):
        want, got = (flashtile.attention(q, q, q, mask=mask & band, options=options) for mask in masks[kind])
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    if kind in ("keep", "ids"):
        mask = masks[kind][1]
        assert torch.equal(Blocks.build(mask, 8, 8, batch=2, device=place).state, Blocks.build(masks[kind][0], 8, 8, batch=2).state)


def test_a_stored_mask_of_two_axes_serves_all_items_and_heads(backend: str, place: torch.device) -> None:
    q, seen = torch.randn(2, 8, 2, 16, device=place), torch.rand(8, 8, device=place) < 0.7
    options = flashtile.Options(backend=backend)
    got, want = (flashtile.attention(q, q, q, mask=Stored(m), options=options) for m in (seen, seen[None, None]))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
