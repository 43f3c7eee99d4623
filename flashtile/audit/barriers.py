"""Finds barriers in shared memory that a kernel makes and hands to no role, in its TTGIR.

The compiler gives the same shared memory to things whose lives do not overlap, and the life of such a barrier ends where warps
take their roles. What a role keeps there then lies on a barrier that was not invalidated, which PTX asks for (mbarrier.inval).
On an H100 the barrier came back when another process had had the GPU meanwhile (docs/lab/hopper.md, barriers).
"""

from __future__ import annotations

import re

_NAME = r"%[\w.$#-]+"
_PART = re.compile(rf"^\s*({_NAME}) = ttg\.memdesc_index ({_NAME})", re.MULTILINE)
_SET_UP = re.compile(rf"ttng\.init_barrier ({_NAME}),")
_ROLES = re.compile(r"ttg\.warp_specialize\((.*?)\)")


def idle_barriers(ttgir: str) -> list[str]:
    """Names, "%free_36", of barriers that no role is given; none where warps have no roles."""
    roles = _ROLES.search(ttgir)
    if roles is None:
        return []
    before, given = ttgir[: roles.start()], set(re.findall(_NAME, roles[1]))
    parts = dict(_PART.findall(before))
    made = dict.fromkeys(parts.get(name, name) for name in _SET_UP.findall(before))
    return [name for name in made if name not in given]
