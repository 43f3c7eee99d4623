"""fp8 attention on a GPU: its error against float64, by data and by length, and its speed beside bf16.

    python benchmarks/fp8.py [--sections errors speed tiles] [--shapes 1x16384x16x128 ...] [--keys 8192 ...] [--rounds 6]
                             [--budget 600] [--output bench-output/fp8.csv] [--commit HASH]

errors: 256 queries of one head over so many keys, q, k, v in e4m3 with a scale of each head, of several data. `error` is
relative, RMS, against float64 of the same stored numbers; `unflushed` that of a plain loop of tl.dot whose accumulator goes
through all keys, as Hopper's units have it; `original` is that of our out against the numbers before they were quantised;
`stored` that of e4m3 keys and values under bf16 queries and products, `lse` the largest error of lse.
speed: full and causal, our bf16 forward, k and v in e4m3 under bf16 queries, e4m3 products, and these from 16-bit inputs, with
quantisation. `of_bf16` is bf16's time over theirs. What 8-bit numbers make is held against float64 first, in rows of all tiles
(`error`, relative, RMS): no time is written of what is wrong.
tiles: the portable forward of both kinds, and Hopper's of e4m3, in the chosen tile and in candidates.
simulated, without a GPU too: the same arithmetic in PyTorch, tile by tile, with float32 sums, and `unflushed` with one sum of
13 bits, cut off every 32 keys; `stored` and `bf16` are beside the numbers before quantisation.
gradients, without a GPU too: out, dq, dk and dv, relative, RMS, against float64 of the numbers before quantisation, all with
bf16 inputs: of `bf16` attention, of `fp8` arithmetic quantised in the call, whose gradients go straight through, and of
`stored` e4m3 keys and values, which have no gradients of their own.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from benchmarks.record import Record, at_least_one, machine, need_gpu, options, sized
from flashtile import Options, dispatch
from flashtile.bench.rotation import rotate
from flashtile.bench.timing import burst_ms, calls_for
from flashtile.kernels.portable.backend import BACKEND as TRITON
from flashtile.kernels.portable.candidates import shared_bytes
from flashtile.kernels.portable.choose import choose
from flashtile.kernels.portable.tile import Launch
from flashtile.kernels.sm90.backend import BACKEND as HOPPER
from flashtile.kernels.sm90.host.choose_forward import choose_forward
from flashtile.kernels.sm90.host.tile_forward import ForwardLaunch, forward_shared_bytes
from flashtile.torch.api.stored import describe_stored
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.execute.bound import Bound, device_of
from flashtile.triton_glue.language import jit, tl

SECTIONS = ("errors", "speed", "tiles", "simulated", "gradients")
ALSO_ON_CPU = {"simulated", "gradients"}
SHAPES = ("1x16384x16x128", "1x16384x16x64", "1x16384x16x256")
KEYS = (8192, 32768, 131072, 524288, 1048576)
QUERIES, HEAD_DIM, PARTS, TILE = 256, 128, 65536, 128
KINDS = ("gaussian", "sinks", "outliers", "offset in k", "mean in v")
ROUNDS = 6
FP8 = Options(precision="fp8")
JUDGED = {"e4m3 stored": 5e-3, "fp8": 2.8e-2}  # the error that is allowed: bf16's rounding; three bits of the probabilities
JUDGED_ROWS = 256  # of the first head and of the last one, evenly spread
CANDIDATES = {
    "fp8": (
        Launch(128, 128, 8, 3, 8), Launch(128, 128, 8, 2, 8), Launch(128, 64, 8, 3, 8), Launch(128, 64, 4, 3, 8),
        Launch(64, 128, 4, 3, 8), Launch(64, 64, 4, 3, 8), Launch(64, 128, 8, 3, 8), Launch(64, 64, 8, 3, 8),
    ),
    "stored": (
        Launch(128, 128, 8, 2, 8), Launch(128, 64, 8, 3, 8), Launch(128, 64, 8, 2, 8), Launch(64, 64, 4, 3, 8),
        Launch(64, 128, 4, 2, 8), Launch(128, 32, 8, 3, 8),
    ),
}  # fmt: skip
ALONE = ForwardLaunch(swizzle=1, resident=True, turns=False, loader_warps=1, apart=True)
HOPPER_CANDIDATES = tuple(
    replace(ALONE, groups=groups, stages=stages, turns=turns, swizzle=swizzle, resident=resident)
    for groups, stages, turns, swizzle, resident in (
        (3, 2, False, 1, True), (3, 3, False, 1, True), (3, 4, False, 1, True), (3, 4, True, 1, True), (2, 4, False, 1, True),
        (2, 4, True, 1, True), (2, 2, False, 1, True), (3, 4, False, 4, True), (3, 4, False, 4, False), (2, 2, True, 4, False),
    )
)  # fmt: skip


@jit
def unflushed(q_ptr, k_ptr, v_ptr, out_ptr, keys, scale, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """out = softmax(scale q k^T) v of one head, of e4m3 bytes (rows, DIM); sums over all keys stay in one accumulator."""
    row, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    at = row[:, None].to(tl.int64) * DIM + column[None, :]
    q = tl.load(q_ptr + at).to(tl.float8e4nv, bitcast=True)
    acc = tl.zeros([BLOCK, DIM], tl.float32)
    top, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, keys, BLOCK):
        key = (start + tl.arange(0, BLOCK))[:, None].to(tl.int64) * DIM + column[None, :]
        k = tl.load(k_ptr + key).to(tl.float8e4nv, bitcast=True)
        v = tl.load(v_ptr + key).to(tl.float8e4nv, bitcast=True)
        score = tl.dot(q, tl.trans(k)) * scale
        new = tl.maximum(top, tl.max(score, 1))
        decay = tl.exp2(top - new)
        p = tl.exp2(score - new[:, None])
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot((p * 256.0).to(tl.float8e4nv), v, acc * decay[:, None])
        top = new
    tl.store(out_ptr + at, acc / (256.0 * total[:, None]))


def data(kind: str, keys: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k, v (1, seqlen, 1, HEAD_DIM) in bf16."""
    generator = torch.Generator(device).manual_seed(keys)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k, v = (normal(1, rows, 1, HEAD_DIM) for rows in (QUERIES, keys, keys))
    if kind == "sinks":  # four keys take most of every row
        k[:, :4] += 3.0 * q.mean(1, keepdim=True) * math.sqrt(QUERIES)
        q = q + 0.7 * q.mean(1, keepdim=True) * math.sqrt(QUERIES)
    elif kind == "outliers":  # FlashAttention-3's
        for t in (q, k, v):
            t += 10.0 * normal(*t.shape) * (torch.rand(t.shape, generator=generator, device=device) < 0.001)
    elif kind == "mean in v":
        q, v = 0.1 * q, v + 1.0
    elif kind == "offset in k":
        k = k + 8.0 * normal(1, 1, 1, HEAD_DIM)
    return tuple(t.to(torch.bfloat16) for t in (q, k, v))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of float64 numbers (rows, HEAD_DIM), parts of the keys at a time."""
    top = torch.stack([(q @ k[i : i + PARTS].T).amax(1) for i in range(0, len(k), PARTS)]).amax(0) / math.sqrt(HEAD_DIM)
    total, acc = torch.zeros_like(top), torch.zeros_like(q)
    for i in range(0, len(k), PARTS):
        p = (q @ k[i : i + PARTS].T / math.sqrt(HEAD_DIM) - top[:, None]).exp()
        total, acc = total + p.sum(1), acc + p @ v[i : i + PARTS]
    return acc / total[:, None], top + total.log()


def rms(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def cells(section: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """What a section of errors measures, as the beginnings of its rows: the mean is taken off k where k has one."""
    return [
        {"section": section, "data": kind, "keys": keys, "method": method}
        for keys in lengths for kind in KINDS for method in (("amax", "mean") if kind == "offset in k" else ("amax",))
    ]  # fmt: skip


def errors(record: Record, told: argparse.Namespace, device: torch.device) -> None:
    for row in cells("errors", told.keys):
        with record.attempt(**row):
            keys, kind, method = row["keys"], row["data"], row["method"]
            given = data(kind, keys, device)
            z = flashtile.quantize(*given, method=method)
            out, lse = flashtile.attention(*z.tensors, **z.scales, return_lse=True, options=FP8)
            scales = (z.q_scale, z.k_scale, z.v_scale)
            wide = [t[0, :, 0].double() * s.double() for t, s in zip(z.tensors, scales, strict=True)]
            truth, true_lse = exact(*wide)
            original = exact(*(t[0, :, 0].double() for t in given))[0]
            loose = torch.empty(QUERIES, HEAD_DIM, device=device)
            factor = float(z.q_scale * z.k_scale) / math.sqrt(HEAD_DIM) * math.log2(math.e)
            flat = [t[0, :, 0].contiguous().view(torch.uint8) for t in z.tensors]
            plain: Any = unflushed
            plain[(QUERIES // 128,)](*flat, loose, keys, factor, 128, HEAD_DIM, num_warps=8)
            half = flashtile.attention(given[0], z.k, z.v, k_scale=z.k_scale, v_scale=z.v_scale)
            half_truth = exact(given[0][0, :, 0].double(), *wide[1:])[0]
            row |= {
                "error": f"{rms(out[0, :, 0], truth):.3e}",
                "unflushed": f"{rms(loose * float(z.v_scale), truth):.3e}",
                "stored": f"{rms(half[0, :, 0], half_truth):.3e}", "original": f"{rms(out[0, :, 0], original):.3e}",
                "lse": f"{float((lse[0, 0] - true_lse).abs().max()):.1e}",
            }  # fmt: skip
            print(*row.values(), flush=True)
            record.add(row)


def cut(x: torch.Tensor, bits: int = 13) -> torch.Tensor:
    """float32 with so many bits behind the first, the others cut off."""
    return (x.view(torch.int32) & (-1 << (23 - bits))).view(torch.float32)


def simulate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out of float32 numbers (rows, HEAD_DIM) with probabilities in e4m3: each tile's sum from zero, and one sum of 13 bits."""
    acc, loose = torch.zeros_like(q), torch.zeros_like(q)
    top, total = q.new_full((len(q), 1), -math.inf), q.new_zeros(len(q), 1)
    for start in range(0, len(k), TILE):
        score = q @ k[start : start + TILE].T / math.sqrt(HEAD_DIM)
        new = torch.maximum(top, score.amax(1, keepdim=True))
        decay, p, top = (top - new).exp(), (score - new).exp(), new
        total = total * decay + p.sum(1, keepdim=True)
        p, values = (p * 256.0).to(torch.float8_e4m3fn).float(), v[start : start + TILE]
        acc, loose = acc * decay + p @ values, loose * decay
        for i in range(0, len(values), 32):
            loose = cut(loose + cut(p[:, i : i + 32] @ values[i : i + 32]))
    return acc / (256.0 * total), loose / (256.0 * total)


def simulated(record: Record, told: argparse.Namespace, device: torch.device) -> None:
    for row in cells("simulated", told.keys):
        with record.attempt(**row):
            keys, kind, method = row["keys"], row["data"], row["method"]
            given = data(kind, keys, device)
            z = flashtile.quantize(*given, method=method)
            sides = zip(z.tensors, z.scales.values(), strict=True)
            wide = [t[0, :, 0].float() * s for t, s in sides]
            flushed, loose = simulate(*wide)
            truth = exact(*(t.double() for t in wide))[0]
            source = [t[0, :, 0].double() for t in given]
            original, half = exact(*source)[0], exact(source[0], *(t.double() for t in wide[1:]))[0]
            found = {"error": (flushed, truth), "unflushed": (loose, truth), "original": (flushed, original)}
            found["bf16"] = flashtile.attention(*given)[0, :, 0], original
            if method == "amax":
                found["stored"] = half, original
            row |= {name: f"{rms(*pair):.2e}" for name, pair in found.items()}
            print(*row.values(), flush=True)
            record.add(row)


def gradients(record: Record, told: argparse.Namespace, device: torch.device) -> None:
    for keys in told.keys:
        for kind in KINDS:
            given = data(kind, keys, device)
            dout = torch.randn(given[0].shape, generator=torch.Generator(device).manual_seed(1), device=device).bfloat16()
            z = flashtile.quantize(*given)
            leaves = [t[0, :, 0].double().requires_grad_() for t in given]
            out = (leaves[0] @ leaves[1].T / math.sqrt(HEAD_DIM)).softmax(1) @ leaves[2]
            truth = dict(zip("qkv", torch.autograd.grad(out, leaves, dout[0, :, 0].double()), strict=True)) | {
                "out": out.detach()
            }
            ways: dict[str, Callable[..., torch.Tensor]] = {
                "bf16": flashtile.attention,
                "fp8": partial(flashtile.attention, options=FP8),
                "stored": lambda q, *_, z=z: flashtile.attention(q, z.k, z.v, k_scale=z.k_scale, v_scale=z.v_scale),
            }
            for what, way in ways.items():
                row = {"section": "gradients", "data": kind, "keys": keys, "what": what}
                with record.attempt(**row):
                    wanted = given[:1] if what == "stored" else given
                    leaves = [t.clone().requires_grad_() for t in wanted]
                    out = way(*leaves, *given[len(leaves) :])
                    found = dict(zip("qkv", torch.autograd.grad(out, leaves, dout), strict=False))
                    row["out"] = f"{rms(out[0, :, 0].detach(), truth['out']):.2e}"
                    row |= {f"d{n}": f"{rms(t[0, :, 0], truth[n]):.2e}" for n, t in found.items()}
                    print(*row.values(), flush=True)
                    record.add(row)


def tensors_of(shape: str, device: torch.device) -> tuple[tuple[torch.Tensor, ...], Any]:
    """16-bit q, k, v, and the same quantised."""
    batch, seqlen, heads, head_dim = (int(n) for n in shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)
    three = tuple(
        torch.randn((batch, seqlen, heads, head_dim), generator=generator, device=device).to(torch.bfloat16) for _ in "qkv"
    )
    return three, flashtile.quantize(*three)


def timed(runs: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of each, in one rotation."""
    counts = {what: calls_for(burst_ms(call, 2, device), device) for what, call in runs.items()}
    times = rotate(tuple(runs), rounds, lambda what: burst_ms(runs[what], counts[what], device))
    return {what: median(some) for what, some in times.items()}


def calls(three: tuple[torch.Tensor, ...], z: flashtile.Quantized, causal: bool) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    attend, portable = partial(flashtile.attention, causal=causal), Options(backend="triton")
    return {
        "bf16": partial(attend, *three),
        "portable bf16": partial(attend, *three, options=portable),
        "e4m3 stored": partial(attend, three[0], z.k, z.v, k_scale=z.k_scale, v_scale=z.v_scale),
        "fp8": partial(attend, *z.tensors, **z.scales, options=FP8),
        "fp8 with quantisation": partial(attend, *three, options=FP8),
        "quantize": partial(flashtile.quantize, *three),
    }


def described(what: str, three: tuple[torch.Tensor, ...], z: flashtile.Quantized, causal: bool) -> tuple[Any, Any, Any]:
    """(the problem, q, k and v, their scales) of "fp8", or of "e4m3 stored"."""
    fp8 = what == "fp8"
    packs = z.tensors if fp8 else (three[0], z.k, z.v)
    scales = {name: s for name, s in z.scales.items() if fp8 or name != "q_scale"}
    return describe_stored(packs, None, Arguments(causal=causal, options=FP8 if fp8 else None), scales)[0], packs, scales


def judge(what: str, call: Callable[[], Any], given: tuple[Any, Any, Any], device: torch.device) -> dict[str, Any]:
    """What was asked for, whose forward ran, and its error. Raises ArithmeticError where that is more than JUDGED."""
    problem, packs, scales = given
    out, (seqlen_q, seqlen_k) = call(), (t.shape[1] for t in packs[:2])
    rows = torch.arange(0, seqlen_q, max(1, seqlen_q // JUDGED_ROWS), device=device)
    hidden = torch.arange(seqlen_k, device=device) > rows[:, None] + seqlen_k - seqlen_q
    errors = [0.0 if bool(torch.isfinite(out).all()) else math.inf]
    for head in (0, out.shape[2] - 1):
        q, k, v = (
            t[-1, :, head].double() * (scales[name][-1, head].double() if (name := f"{letter}_scale") in scales else 1.0)
            for letter, t in zip("qkv", packs, strict=True)
        )
        score = q[rows] @ k.T / math.sqrt(q.shape[1])
        score = score.masked_fill(hidden, -math.inf) if problem.mask.right is not None else score
        errors.append(rms(out[-1, rows, head], score.softmax(1) @ v))
    for error in errors:
        if not error <= JUDGED[what]:
            raise ArithmeticError(f"{what} is off by {error:.2e}; {JUDGED[what]:.1e} is allowed")
    backend = dispatch.plan_forward(problem, device_of(device)).backend
    return {"problem": problem.spell(), "backend": backend, "direction": "forward", "error": f"{max(errors):.2e}"}


def speed(record: Record, told: argparse.Namespace, device: torch.device) -> None:
    for shape in told.shapes:
        for causal in (False, True):
            row = {"section": "speed", "shape": shape, "mask": "causal" if causal else "full"}
            with record.attempt(**row):
                three, z = tensors_of(shape, device)
                runs = calls(three, z, causal)
                judged = {what: judge(what, runs[what], described(what, three, z, causal), device) for what in JUDGED}
                found = timed(runs, told.rounds, device)
                batch, seqlen, heads, head_dim = (int(n) for n in shape.split("x"))
                flops = 4 * batch * heads * seqlen * seqlen * head_dim / (2 if causal else 1)
                for what, ms in found.items():
                    rate = {} if what == "quantize" else {"tflops": f"{flops / ms / 1e9:.0f}"}
                    made = {
                        **row,
                        "what": what,
                        **judged.get(what, {}),
                        "ms": f"{ms:.4f}",
                        **rate,
                        "of_bf16": f"{found['bf16'] / ms:.3f}",
                    }
                    print(*made.values(), flush=True)
                    record.add(made)


def tiles(record: Record, told: argparse.Namespace, device: torch.device) -> None:
    place = device_of(device)
    for shape in told.shapes:
        three, z = tensors_of(shape, device)
        for causal in (False, True):
            for kind in CANDIDATES:
                row = {"section": "tiles", "shape": shape, "mask": "causal" if causal else "full", "what": kind}
                fp8, (p, packs, scales) = kind == "fp8", described("fp8" if kind == "fp8" else "e4m3 stored", three, z, causal)
                given = {
                    n: t.view(torch.uint8) if t.element_size() == 1 else t for n, t in zip("qkv", packs, strict=True)
                } | scales
                runs: dict[str, Callable[[], Any]] = {}
                for launch in (choose(p, place, "forward"), *CANDIDATES[kind]):
                    if launch.spell() in runs or shared_bytes(p, launch, "forward") > place.smem_bytes:
                        continue
                    with record.attempt(**row, tile=launch.spell()):
                        bound = Bound(TRITON.forward(p, place, {"forward": launch}), dict(given), device)
                        bound.run(dict(given))
                        runs[launch.spell()] = lambda bound=bound, given=given: bound.run(dict(given))
                able = fp8 and not HOPPER.unsupported(p, place)
                for launch in (choose_forward(p, place), *HOPPER_CANDIDATES) if able else ():
                    if f"hopper {launch.spell()}" in runs or forward_shared_bytes(p, launch) > place.smem_bytes:
                        continue
                    with record.attempt(**row, tile=launch.spell()):
                        bound = Bound(HOPPER.forward(p, place, launch), dict(given), device)
                        bound.run(dict(given))
                        runs[f"hopper {launch.spell()}"] = lambda bound=bound, given=given: bound.run(dict(given))
                for tile, ms in timed(runs, max(2, told.rounds // 2), device).items():
                    print(*row.values(), tile, f"{ms:.4f}", flush=True)
                    record.add({**row, "tile": tile, "ms": f"{ms:.4f}"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, "bench-output/fp8.csv", 600)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS[:2])
    parser.add_argument("--shapes", nargs="+", type=sized(4), default=SHAPES, help="batch x seqlen x heads x head_dim")
    parser.add_argument("--keys", nargs="+", type=at_least_one, default=KEYS, help="multiples of 128")
    parser.add_argument("--rounds", type=at_least_one, default=ROUNDS)
    told = parser.parse_args()
    if not ALSO_ON_CPU.issuperset(told.sections):
        need_gpu(parser)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    record = Record(told.output, told.budget, machine(device, told.commit))
    for section in told.sections:
        if record.left() > 0:
            measures = {"errors": errors, "speed": speed, "tiles": tiles, "simulated": simulated, "gradients": gradients}
            measures[section](record, told, device)
        else:
            record.leave(section)
    return record.end()


if __name__ == "__main__":
    sys.exit(main())
