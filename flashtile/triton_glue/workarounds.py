"""What compilers get wrong, of which releases, and what is done instead. Each entry goes where no release has it any more.

Speed is none of this list: tiles that spill are other tiles' rules (`kernels/portable/rules.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workaround:
    """Something that a release of a compiler gets wrong."""

    fault: str  # what is wrong, and of which code
    releases: str  # that do it, as far as they were tried
    targets: str
    instead: str  # what is done
    at: str  # the file that does it, by this entry's name

    @property
    def because(self) -> str:
        return f"{self.fault}; {self.instead}"

    @property
    def measured(self) -> str:
        return f"{self.releases}, {self.targets}"


NARROW_FP32 = Workaround(
    fault="eight warps on fp32 tiles of 16 columns fault",
    releases="Triton 3.6.0",
    targets="on an H100",
    instead="fp32 tiles have 32 columns or more",
    at="kernels/portable/tile.py",
)
NARROW_VALUES = Workaround(
    fault="fp32 forwards of 64 columns beside 32 of v, with 64 keys or more, are wrong or fault; their PTX is right under "
    "-O0, and under a newer ptxas",
    releases="ptxas 12.8",
    targets="on an H100",
    instead="v is padded to 64 columns beside 64 (32 beside 64 or 128 are right)",
    at="kernels/portable/tile.py",
)
# Triton holds 8 neighbours of an operand row in a thread (kWidth: 32 bits over the narrowest load's 8, twice that for a
# `tl.join`), the row in four threads. Of a product of 16 terms mma.sync leaves half out and counts the others twice: on an H100
# results are off by 1.2 to 2.3 of the largest; 32 and 64 terms are right. 3.8.0 holds 4 at most. `audit/fragments.py` finds
# such products in compiled kernels.
SHORT_PRODUCTS = Workaround(
    fault="mma.sync leaves half of a product of 16 terms out where operands depend on loads of 8 bits and on a join",
    releases="Triton 3.6.0 to 3.7.1",
    targets="on NVIDIA GPUs",
    instead="such products have 32 terms or more",
    at="kernels/portable/rules.py",
)
EMPTY_FP32 = Workaround(
    fault="fp32 tiles beyond 32 x 32 are compiled to a kernel that does nothing",
    releases="Triton 3.6.0",
    targets="on sm100 to sm119",
    instead="tiles are 32 x 32 at most",
    at="kernels/portable/rules.py",
)
PIPELINED_CAST = Workaround(
    fault="the fused pass over lists of 32 x 32 blocks, in two stages, has a cast that cannot be translated",
    releases="Triton 3.6.0",
    targets="on AMD",
    instead="it has one stage",
    at="kernels/portable/rules.py",
)
WRONG_DQ = Workaround(
    fault="dq of 64 queries x 16 keys is wrong where lists of 32 keys are walked, and right in the interpreter",
    releases="Triton 3.6.0",
    targets="on an H100",
    instead="the pass that walks keys twice has no such tile",
    at="kernels/portable/rules.py",
)
STREAMED_16 = Workaround(
    fault="fp32 tiles that stream 16 rows or keys under eight warps fault",
    releases="Triton 3.6.0",
    targets="on an H100",
    instead="`flashtile tune` does not try them",
    at="kernels/portable/candidates.py",
)
SHARED_ADDRESS = Workaround(
    fault="an address that two loops share may stay uncomputed where the first loop is skipped (`audit/descriptors.py`)",
    releases="ptxas 12.8, which Triton 3.6 takes below sm100",
    targets="on sm80 to sm90",
    instead="the ptxas 12.9 that the same release brings compiles kernels, unless TRITON_PTXAS_PATH names one",
    at="triton_glue/language.py",
)
CARRIED_BOUND = Workaround(
    fault="of what a loop carries for the bounds of another one alone the first value is kept",
    releases="Triton 3.6.0 to 3.7.1",
    targets="in Triton and Gluon kernels",
    instead="the producer of the backward counts from 0",
    at="kernels/sm90/backward/producer.py",
)
KEY_BY_ORDER = Workaround(
    fault="a kernel's key on disk takes in a callee's constants only if the callee's own key was made before, so that it "
    "depends on what else the process compiled",
    releases="Triton 3.6.0 (triton-lang/triton#10494 mends it later)",
    targets="for every GPU",
    instead="callees' keys are made first",
    at="triton_glue/language.py",
)
WORKAROUNDS = {name: value for name, value in globals().items() if isinstance(value, Workaround)}
