"""The tool that finds barriers that no role is given, on TTGIR as Triton prints it."""

from __future__ import annotations

from flashtile.audit.barriers import idle_barriers

BARRIER = "!ttg.memdesc<1xi64, #shared1, #smem, mutable>"
RING = "!ttg.memdesc<2x1xi64, #shared1, #smem, mutable>"
MADE = f"""
    %q = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, #shared, #smem, mutable> loc(#loc1)
    %full = ttg.local_alloc : () -> {RING} loc(#loc2)
    %free_3 = ttg.local_alloc : () -> {RING} loc(#loc3)
    %0 = ttg.memdesc_index %full[%c0_i32] : {RING} -> {BARRIER} loc(#loc4)
    ttng.init_barrier %0, 1 : {BARRIER} loc(#loc4)
    %1 = ttg.memdesc_index %free_3[%c0_i32] : {RING} -> {BARRIER} loc(#loc5)
    ttng.init_barrier %1, 2 : {BARRIER} loc(#loc5)
    %2 = ttg.memdesc_index %free_3[%c1_i32] : {RING} -> {BARRIER} loc(#loc5)
    ttng.init_barrier %2, 2 : {BARRIER} loc(#loc5)
"""


def roles(given: str) -> str:
    return f"    ttg.warp_specialize({given}) attributes {{requestedRegisters = array<i32: 240, 24>}}\n    default {{\n"


def test_a_barrier_that_no_role_is_given_is_found() -> None:
    assert idle_barriers(MADE + roles("%q, %full, %free")) == ["%free_3"]


def test_the_first_role_s_own_use_does_not_count() -> None:  # it may end before the role does
    use = f"      %3 = ttg.memdesc_index %free_3[%c0_i32] : {RING} -> {BARRIER} loc(#loc6)\n"
    assert idle_barriers(MADE + roles("%q, %full") + use) == ["%free_3"]


def test_others_are_not() -> None:
    assert idle_barriers(MADE + roles("%q, %full, %free_3")) == []
    assert idle_barriers(MADE) == []  # warps without roles
