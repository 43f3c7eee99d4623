"""Draws cases: few variants, which decide what is compiled, and many sizes and data for each."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import TypeVar

from flashtile.errors import InvalidProblem
from flashtile.fuzz import tiles
from flashtile.fuzz.case import BIASES, Case
from flashtile.kernels.portable.tile import Launch, Pass, products
from flashtile.plan.device import H100, Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.mask import Band

T = TypeVar("T")
Weighted = dict[T, float]

DIMS: Weighted[tuple[int, int]] = {
    (64, 64): 6, (128, 128): 6, (96, 96): 2, (256, 256): 2, (192, 128): 2, (16, 16): 1, (32, 32): 1, (80, 80): 1, (40, 24): 1,
    (24, 40): 1, (64, 128): 1, (128, 64): 1, (5, 40): 0.5, (100, 8): 0.5, (72, 72): 0.5, (48, 48): 0.5, (160, 160): 0.5,
    (33, 17): 0.5, (1, 256): 0.2, (512, 512): 0.2, (320, 64): 0.2, (40, 512): 0.1, (8, 128): 0.3,
}  # fmt: skip
HEADS: Weighted[tuple[int, int]] = {
    (1, 1): 3, (2, 2): 3, (4, 2): 3, (4, 1): 2, (3, 1): 1, (5, 1): 1, (10, 2): 1, (16, 2): 1, (6, 3): 1, (8, 8): 1, (7, 7): 0.5,
}  # fmt: skip
BANDS: Weighted[str] = {
    ":": 5, ":0": 6, "12:5": 1, "9:0": 1, "33:17": 1, "100:0": 1, "64:": 0.7, ":5": 0.5, "0:0": 0.6, ":-1": 0.4, "-3:": 0.4,
    "40:-7": 0.4, "1:0": 0.4, "300:200": 0.4, "-20:40": 0.3, "2147483647:2147483647": 0.1, ":-20": 0.3,
}  # fmt: skip
WHERES: Weighted[str] = {
    "": 7, "document": 1.2, "holes": 1.5, "prefix": 0.8, "dilated": 0.5, "chunks": 0.5, "top-left": 0.5, "bands": 0.4,
    "stored": 0.5, "stored-heads": 0.4, "stored-keys": 0.3, "holes-documents": 0.5, "table": 0.4, "padded-document": 0.3,
    "tree": 0.3,
}  # fmt: skip
SCORES: Weighted[str] = {
    "": 7, "softcap2": 0.6, "softcap30": 0.8, "alibi": 0.8, "alibi-items": 0.4, "relative": 0.4, "bias": 1.5, "bias-heads": 0.8,
    "bias-batch": 0.4, "bias-plane": 0.8, "bias-keys": 0.8, "bias-rows": 0.4, "bias-each-head": 0.3, "bias-each-item": 0.2,
    "bias-number": 0.2, "softcap30+alibi": 0.4, "alibi+softcap50": 0.3, "softcap2+bias": 0.4, "bias+softcap30": 0.4,
    "alibi+bias-keys": 0.3, "alibi+bias-plane+softcap30": 0.2, "bias-keys+bias-rows": 0.2, "relative-items+softcap2": 0.2,
}  # fmt: skip
UPSTREAMS: Weighted[str] = {"both": 4, "out": 2, "alone": 3, "lse": 0.6, "none": 0.6}
LAYOUTS: Weighted[str] = {"bshd": 6, "bhsd": 2, "gaps": 1, "packed": 1, "kvpacked": 0.5, "shared": 0.3, "odd": 0.7}
# Tokens of a side, by class.
SPANS = {"tiny": (1, 40), "short": (1, 200), "middle": (100, 700), "long": (600, 2100)}


@dataclass(frozen=True)
class Means:
    """What a place can do in a second. scores: of a case at most. spans: classes of lengths. cases: of a variant."""

    scores: int
    spans: Weighted[str]
    cases: int
    tiles: float = 0.0  # chance of other tiles than the chosen ones
    widest: int = 512  # head dim
    tf32: bool = False  # whether plain PyTorch has products like that, so that sums of whole heads can be judged beside it


MEANS = {
    "cpu": Means(1 << 16, {"tiny": 3, "short": 4, "middle": 0.5}, 20),
    "interpreted": Means(1 << 14, {"tiny": 3, "short": 2}, 6, 0.25, 256),
    "gpu": Means(1 << 23, {"tiny": 2, "short": 4, "middle": 3, "long": 1}, 300, 0.15, tf32=True),
    "emulated": Means(1 << 15, {"short": 1}, 2, 0.0, 256),
}


@dataclass(frozen=True)
class Variant:
    """A case without its sizes and data. grain: lengths are multiples of it, or, if it is 1, odd."""

    template: Case
    means: Means
    span: str
    grain: int
    alone: bool
    number: str  # what its cases are drawn from


def pick(dice: random.Random, weighted: Weighted[T]) -> T:
    return dice.choices(list(weighted), list(weighted.values()))[0]


def variant(seed: int, number: int, backend: str, means: Means) -> Variant:
    """The variant of this number: the same in every run with this seed."""
    dice = random.Random(f"{seed}-{number}-{backend}")
    while True:
        try:
            return _variant(dice, f"{seed}-{number}", backend, means)
        except InvalidProblem:  # choices that no case has at once
            continue


def _variant(dice: random.Random, number: str, backend: str, means: Means) -> Variant:
    hopper = backend == "hopper"
    dtype = dice.choice(("bf16", "fp16") if hopper else ("fp32", "fp32", "fp16", "bf16"))
    dims = pick(dice, {d: w for d, w in DIMS.items() if max(d) <= min(means.widest, 256 if hopper else 512)
                       and not (hopper and (d[0] % 8 or d[1] % 8))})  # fmt: skip
    heads_q, heads_kv = pick(dice, HEADS)
    busy = dice.choice((0.4, 1.0, 1.6))  # how much else there is
    score = pick(dice, {**SCORES, "": SCORES[""] / busy})
    where = pick(dice, {**WHERES, "": WHERES[""] / busy})
    items = (
        ""
        if where in ("table", "stored", "stored-heads", "stored-keys")
        else pick(dice, {"": 4 / busy, "varlen": 1, "self": 0.3})
    )
    used = pick(dice, {"": 5 / busy, "k": 0.6, "q": 0.2, "qk": 0.4})
    if items and any(name in BIASES and set(BIASES[name]) & set("qk") for name in score.split("+")):
        items = ""
    blocks = ""
    if where == "table":
        blocks = dice.choice(("128x128", "16x256"))
    elif where and not (items or used) and dice.random() < 0.4:
        blocks = dice.choice(("128x128",) if hopper else ("128x128", "32x32", "64x32", "32x64", "64x64", "256x128"))
    if where.startswith("stored"):
        used = ""
    layout = pick(dice, LAYOUTS)
    upstream = pick(dice, UPSTREAMS)
    backward = pick(dice, {"auto": 3, "split": 2, "fused": 0.01 if backend == "cpu" else 2})
    fixed = pick(dice, {"": 3, "score": 1.5, "sink": 0.3, "score+sink": 0.4})
    band = pick(dice, BANDS)
    if score == "" and dice.random() < 0.1:
        band = pick(dice, {"0:0": 1.0, ":0": 1.0, "1:1": 1.0})
    template = Case(
        heads_q=heads_q, heads_kv=heads_kv, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, band=band, where=where,
        blocks=blocks, items=items, used=used, holes=bool(used) and not items and dice.random() < 0.25, score=score,
        score_dtype=dice.choice((dtype, "fp32", dtype, "bf16")), fixed=fixed,
        sink=pick(dice, {"": 4 / busy, "fp32": 1, "bf16": 0.3, "fp16": 0.2}),
        dropout=pick(dice, {0.0: 4 / busy, 0.1: 0.7, 0.5: 0.5, 0.2: 0.3, 0.9: 0.1}),
        scale=pick(dice, {Case.scale: 6.0, -0.3: 0.5, 1.0: 0.4, 0.02: 0.3, 0.0: 0.1}), layout=layout, upstream=upstream,
        wants=pick(dice, {"qkv": 12, "q": 0.4, "kv": 0.4, "k": 0.2, "v": 0.2, "qv": 0.2}), backward=backward,
        deterministic=backward != "fused" and dice.random() < 0.2,
        precision=pick(dice, {"tf32x3": 5, "tf32": 1, "ieee": 1 if max(dims) <= 128 else 0.2}) if dtype == "fp32" else "tf32x3",
        delta=pick(random.Random(f"{number}-{backend}-delta"), {"rounded": 5, "exact": 1}), backend=backend,
    )  # fmt: skip
    if template.precision == "tf32" and not means.tf32:
        template = replace(template, fixed="score+sink")
    if hopper:
        template = _for_hopper(template, dice)
    elif dtype != "fp32":
        template = _stored(template, random.Random(f"{number}-{backend}-eight"))
    if layout in ("packed", "kvpacked") and template.wants != "qkv":
        template = replace(template, wants="qkv")
    grain = dice.choice((16, 1))
    made = Variant(template, means, pick(dice, means.spans), grain, dice.random() < 0.3, number)
    sized(made, random.Random(0)).check()
    return made


def _for_hopper(case: Case, dice: random.Random) -> Case:
    """The template without most of what Hopper's kernels refuse: gradients of captured tensors above all."""
    names = case.modifiers
    stored = names and all(name in ("bias", "bias-heads", "bias-plane", "bias-batch") for name in names) and len(names) == 1
    stored = (
        stored and max(case.head_dim, case.head_dim_v) <= 128 and not (case.items or case.used) and case.backward != "split"
    )
    sink = "" if case.where else case.sink
    fixed = [name for name, keeps in (("score", stored), ("sink", dice.random() < 0.2)) if not keeps]
    delta = case.delta if dice.random() < 0.1 else "rounded"
    return replace(case, sink=sink, fixed="+".join(fixed), score_dtype=case.dtype if stored else case.score_dtype, delta=delta)


def _stored(case: Case, dice: random.Random) -> Case:
    """The template, now and then of keys and values of 8 bits."""
    if dice.random() > 0.1 or "packed" in case.layout:
        return case
    return replace(
        case, eight=dice.choice(("e4m3", "e5m2", "int8")), upstream="none", holes=False, delta="rounded", backward="auto"
    )


def draw(given: Variant, number: int) -> Case:
    """The case of this number of a variant."""
    dice = random.Random(f"{given.number}-{number}")
    case = sized(given, dice)
    case = replace(case, seed=dice.randrange(2**20), dirty=dice.random() < 0.3, again=dice.random() < 0.25)
    return with_data(case, dice)


def sized(given: Variant, dice: random.Random) -> Case:
    """The template with lengths and a batch."""
    case, low_high = given.template, SPANS[given.span]

    def length() -> int:
        n = dice.randint(*low_high)
        return max(16, n + -n % 16) if given.grain == 16 else n | 1

    short, other = length(), length()
    queries, keys = dice.choice(
        ((short, short), (short, other), (short, short + other), (short + other, short), (other, short))
    )
    if dice.random() < 0.05 and given.grain == 1:
        queries = 1
    if case.items == "self" or case.layout == "packed":
        queries = keys
    batch = 1 if given.alone else dice.randint(2, 4)
    if case.items:
        batch = dice.randint(1, 6)
    if dice.random() < 0.01:
        queries, keys, batch = dice.choice(((0, keys, batch), (queries, 0, batch), (queries, keys, 0), (0, 0, batch)))
        if case.items == "self" or case.layout == "packed":
            queries = keys
        if case.layout == "shared" or case.blocks:
            batch, queries, keys = max(batch, 1), max(queries, given.grain), max(keys, given.grain)
    while max(batch, 1) * case.heads_q * queries * keys > given.means.scores:
        if batch > 1:
            batch -= 1
        elif queries == keys:
            queries = keys = _half(keys, given.grain)
        elif queries > keys:
            queries = _half(queries, given.grain)
        else:
            keys = _half(keys, given.grain)
    return replace(case, batch=batch, seqlen_q=queries, seqlen_k=keys)


def _half(n: int, grain: int) -> int:
    return max(16, n // 2 - n // 2 % 16) if grain == 16 else (n // 2) | 1


def with_data(case: Case, dice: random.Random) -> Case:
    """The case with something else than normal numbers, now and then, where that has a right answer."""
    modifiers = case.modifiers
    biased = bool(modifiers) and modifiers[-1] in BIASES
    kinds: Weighted[str] = {"normal": 6, "peaked": 0.8, "equal": 0.2, "mean": 0.2, "channel": 0.2}
    if case.precision == "tf32":  # whose errors plain PyTorch shows on some GPUs alone
        kinds = {"normal": 6, "equal": 0.2}
    elif not modifiers and not case.sink and not case.eight:
        kinds["huge"] = 0.6
    if biased and not (case.sink or case.eight):
        values = {"-1e9": 1, "1e9": 1, "lowest": 0.6}
        if len(modifiers) == 1:
            values |= {"-1e4": 1, "-1e6": 1, "1e6": 1}
        if all(name in BIASES or name.startswith("softcap") for name in modifiers) and len(modifiers) <= 2 and not (
            len(modifiers) == 2 and modifiers[0] in BIASES
        ):  # fmt: skip
            kinds |= {f"offset:{value}": weight / 2 for value, weight in values.items()}
    if modifiers and "k" in BIASES.get(modifiers[-1], ""):
        kinds |= {"masked:-inf": 0.5}
        # a row that is masked all over is its other modifiers in float64, and nothing in float32 (`formula.level`)
        if (case.dtype != "fp32" and not case.eight) or all(name.startswith("softcap") for name in modifiers[:-1]):
            kinds |= {"masked:lowest": 0.4, "masked:-1e9": 0.4}
        if case.dtype != "fp32":  # which sees what float32 rounds in rows that are -1e4 everywhere
            kinds["masked:-1e4"] = 0.3
    kind = pick(dice, kinds)
    kind = kind.replace(
        "lowest", {"fp32": "-3.4028234663852886e38", "fp16": "-65504", "bf16": "-3.3895313892515355e38"}[case.score_dtype]
    )
    if kind.startswith("offset"):
        return replace(case, data=kind, scale=2.0 ** -min(ceil(log2(case.head_dim) / 2), 4))
    if kind == "huge":
        return replace(case, data=kind, scale=1.0)
    return replace(case, data=kind)


def with_tiles(case: Case, device: Device, key: str) -> Case:
    """The case with other tiles of the portable backend than those that are chosen for it.

    Cases of one key whose products are formed alike get the same: they share their kernels.
    """
    left, right = case.bounds
    problem = AttentionProblem(
        max(case.batch, 1), case.seqlen_q, case.seqlen_k, case.heads_q, case.heads_kv, case.head_dim, case.head_dim_v,
        DType(case.dtype), mask=Band(left, right), precision=case.precision,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    made: dict[Pass, Launch] = {}
    for which in tiles.PASSES:
        dice = random.Random(f"{key}-{which}-{products(problem, device, which)}")
        found = tiles.choosable(problem, device, which)
        if found:
            made[which] = dice.choice(found)
    return replace(case, tile=tiles.spell(made))


def cases(given: Variant, device: Device | None) -> list[Case]:
    """All cases of a variant; with `device`, now and then of other tiles."""
    made = [draw(given, number) for number in range(given.means.cases)]
    key = f"{given.number}-tiles"
    if (
        device is None
        or given.template.backend in ("cpu", "hopper")
        or given.template.eight
        or random.Random(key).random() >= given.means.tiles
    ):
        return made
    place = device if device.kind != "cpu" else H100
    return [with_tiles(case, place, key) for case in made]
