"""The one list of companion cases, as spellings; every backend runs every case (test_companions.py)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flashtile.kernels.ops.catalogue import OPS
from flashtile.kernels.ops.host import keep_elements
from flashtile.problem.op import Companion
from flashtile.reference.cross_entropy import cross_entropy_reference
from flashtile.reference.dense import dense_reference
from flashtile.reference.norm import norm_reference
from flashtile.reference.rotary import rotary_reference
from flashtile.reference.softmax import softmax_reference
from flashtile.torch.execute.bound import TORCH_DTYPES
from tests.cases import lay_out

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One call, by the spelling of its problem.

    layout: how tensors of two and more axes lie in memory, the arriving gradients too: "expanded" ones have stride 0.
    fixed: inputs that want no gradient. silent: outputs that no gradient arrives at.
    """

    spelling: str
    layout: Literal["dense", "gaps", "transposed", "expanded"] = "dense"
    fixed: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        more = [self.layout, *(f"fixed-{n}" for n in self.fixed), *(f"silent-{n}" for n in self.silent)]
        return " ".join([self.spelling, *more])

    @property
    def problem(self) -> Companion:
        return Companion.parse(self.spelling)

    @property
    def wanted(self) -> tuple[str, ...]:
        problem = self.problem
        return tuple(n for n, _ in problem.given if n in problem.differentiable and n not in self.fixed)

    def tensors(self, device: torch.device) -> Tensors:
        """The inputs, and the gradients that arrive as "d<output>"; the same in every run."""
        problem, generator = self.problem, torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        made: Tensors = {}
        for name, described in problem.given:
            special = SPECIAL.get((problem.op, name))
            if special is not None:
                made[name] = special(problem, generator).to(TORCH_DTYPES[described.dtype]).to(device)
            else:
                made[name] = self._normal(described.shape, described.dtype, generator, device)
        for name in problem.public():
            described = problem.outputs()[name]
            if name not in self.silent and name not in problem.constant():
                made[f"d{name}"] = self._normal(described.shape, described.dtype, generator, device, self.layout == "expanded")
        return made

    def _normal(self, shape: Any, dtype: str, generator: Any, device: torch.device, expanded: bool = False) -> torch.Tensor:
        if expanded:
            return torch.randn((), generator=generator).to(device, TORCH_DTYPES[dtype]).expand(shape)
        tensor = torch.randn(shape, generator=generator).to(device, TORCH_DTYPES[dtype])
        if tensor.dim() < 2 or self.layout in ("dense", "expanded"):
            return tensor
        return lay_out(tensor, "gaps") if self.layout == "gaps" else tensor.mT.contiguous().mT

    def reference(self, tensors: Tensors) -> Tensors:
        """The public outputs by the reference, in the dtype of the tensors."""
        return REFERENCES[self.problem.op](self.problem, tensors)


# -- norms ----------------------------------------------------------------------------------------------------------------


def _norm(problem: Any, tensors: Tensors) -> Tensors:
    keeps = ()
    if problem.drops:
        keeps = tuple(keep_elements(tensors["seed"], problem.rows, problem.hidden, problem.dropout_p, b) for b in (0, 1))
    exact = tensors["x"].dtype == torch.float64
    options = {k: v for k, v in problem.options().items() if k not in ("residual_dtype", "out_dtype")}
    stored = None if exact or not problem.mixes else TORCH_DTYPES[problem.stored]
    made = norm_reference(tensors, keeps=keeps, residual_dtype=stored, **options)
    dtypes = {n: torch.float64 if exact else TORCH_DTYPES[d.dtype] for n, d in problem.outputs().items()}
    return {name: made[name].to(dtypes[name]) for name in problem.public()}


def _subset(problem: Any, generator: torch.Generator, most: int) -> torch.Tensor:
    """Some rows of `most`, each at most once, and none for the others."""
    index = torch.zeros(problem.rows, dtype=torch.int64)
    count = min(problem.rows, most) - 1
    places = torch.randperm(problem.rows, generator=generator)[:count]
    index[places] = torch.randperm(most, generator=generator)[:count] + 1
    return index


def norm(rows: int, hidden: int, dtype: str, more: str = "", options: str = "kind='rms'") -> str:
    """A spelling; more: names of further tensors, in the order of the op, those of a row or column marked by their kind."""
    found = [f"x={rows}x{hidden}:{dtype}"]
    for name in more.split():
        name, _, own = name.partition(":")
        shape = {"residual": f"{rows}x{hidden}", "x1": f"{rows}x{hidden}", "rowscale": f"{rows}", "seed": "1"}.get(
            name, f"{hidden}"
        )
        shape = f"{rows}" if name.endswith("subset") else shape
        kind = {"seed": "int64", "x_subset": "int32", "out_subset": "int32"}.get(name, own or dtype)
        found.append(f"{name}={shape}:{kind}")
    return f"norm({','.join(found)};{options})"


def _norms() -> Iterator[Case]:
    for dtype in ("fp32", "fp16", "bf16"):
        yield Case(norm(9, 40, dtype, "weight bias", "eps=1e-06"))
        yield Case(norm(9, 40, dtype, "weight"))
        yield Case(norm(5, 33, dtype, "residual weight bias", "prenorm=True"))
        yield Case(norm(5, 33, dtype, "residual:fp32 weight:fp32", "kind='rms';prenorm=True"))
    for hidden in (1, 3, 16, 100, 300, 1030):
        yield Case(norm(3, hidden, "fp32", "weight bias", "eps=0.001"))
        yield Case(norm(3, hidden, "bf16", "weight", "kind='rms';eps=0.001"))
    for hidden in (16400, 40000):  # rows in several steps, backward and then forward too
        yield Case(norm(2, hidden, "fp32", "weight bias", "eps=1e-06"))
        yield Case(norm(2, hidden, "bf16", "residual weight seed", "kind='rms';dropout_p=0.25;prenorm=True"))
    for rows in (0, 1, 65):
        yield Case(norm(rows, 24, "fp32", "weight bias", "eps=1e-06"))
    for kind in ("layer", "rms"):
        yield Case(norm(4, 20, "fp32", "", f"kind='{kind}';eps=0.01"))
        yield Case(norm(4, 20, "fp32", "weight", f"kind='{kind}';prenorm=True"))
        yield Case(
            norm(4, 20, "fp32", "residual x1 weight bias weight1 bias1 seed", f"kind='{kind}';dropout_p=0.3;prenorm=True")
        )
        yield Case(norm(4, 20, "bf16", "x1 weight weight1", f"kind='{kind}'"))
        yield Case(norm(6, 20, "fp32", "residual weight bias rowscale colscale seed", f"kind='{kind}';dropout_p=0.5"))
        yield Case(norm(6, 20, "fp16", "weight colscale", f"kind='{kind}';zero_centered=True;scale=0.5;prenorm=True"))
    yield Case(norm(6, 20, "fp32", "weight bias", "zero_centered=True;out_dtype='fp16'"))
    yield Case(norm(6, 20, "bf16", "weight:fp32", "kind='rms';out_dtype='fp32';residual_dtype='fp32'"))
    yield Case("norm(x=5x12:fp32,residual=8x12:fp32,weight=12:fp32,bias=12:fp32,colscale=12:fp32,x_subset=8:int32,seed=1:int64;"
               "dropout_p=0.2;scale=1.25;prenorm=True)")  # fmt: skip
    yield Case("norm(x=8x12:fp32,residual=8x12:fp32,weight=12:fp32,out_subset=8:int64;kind='rms';out_rows=7;prenorm=True)")
    yield Case("norm(x=9x12:bf16,weight=12:bf16,bias=12:bf16,x_subset=6:int64,out_subset=6:int32;out_rows=11)")
    for layout in ("gaps", "transposed", "expanded"):
        yield Case(norm(6, 20, "fp32", "residual weight bias", "prenorm=True"), layout)  # type: ignore[arg-type]
        yield Case(norm(6, 24, "bf16", "weight"), layout)  # type: ignore[arg-type]
    parts = norm(6, 20, "fp32", "residual weight bias", "prenorm=True")
    for fixed in (("x",), ("residual",), ("weight", "bias"), ("x", "residual"), ("x", "residual", "bias")):
        yield Case(parts, fixed=fixed)
    for silent in (("out",), ("h",)):
        yield Case(parts, silent=silent)
    for kind in ("layer", "rms"):
        two = norm(6, 20, "fp32", "residual x1 weight bias weight1 bias1", f"kind='{kind}';prenorm=True")
        for silent in (("out",), ("out1",), ("out1", "h")):
            yield Case(two, silent=silent)
        yield Case(f"norm(x=8x12:fp32,residual=8x12:fp32,weight=12:fp32,weight1=12:fp32,bias1=12:fp32,out_subset=8:int64;"
                   f"kind='{kind}';out_rows=7;prenorm=True)")  # fmt: skip
    short = norm(53, 8, "fp32", "weight bias colscale seed", "kind='rms';eps=1e-05;dropout_p=0.2;prenorm=True")
    yield Case(short, "transposed")  # seldom is one rounding more so much worse than another one


# -- cross-entropy --------------------------------------------------------------------------------------------------------


def _cross_entropy(problem: Any, tensors: Tensors) -> Tensors:
    options = problem.options()
    for name in ("eager_gradient", "inplace"):
        options.pop(name, None)
    if not options.pop("shard", False):
        loss, lse = cross_entropy_reference(tensors["logits"], tensors["labels"], tensors.get("weight"), **options)
        made = {"loss": loss, "lse": lse}
    else:
        x = tensors["logits"] * problem.logit_scale
        if problem.softcap is not None:
            x = problem.softcap * (x / problem.softcap).tanh()
        weight = tensors.get("weight", x.new_ones(problem.classes)).to(x.dtype)
        column = tensors["labels"].long() - problem.first_class
        here = (column >= 0) & (column < problem.columns)
        at_label = x.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0.0)
        own, some = weight[tensors["labels"].clamp(min=0)], weight[problem.first_class :][: problem.columns]
        share = -(1.0 - problem.smoothing) * own * at_label - problem.smoothing / problem.classes * (some * x).sum(1)
        made = {"share": share.where(tensors["labels"] != problem.ignore_index, 0.0), "lse": x.logsumexp(1)}
    return made if x_is_exact(tensors) else {name: tensor.float() for name, tensor in made.items()}


def x_is_exact(tensors: Tensors) -> bool:
    return any(tensor.dtype == torch.float64 for tensor in tensors.values())


def _labels(problem: Any, generator: torch.Generator) -> torch.Tensor:
    """Class numbers, every fourth row ignored."""
    labels = torch.randint(problem.classes or problem.columns, (problem.rows,), generator=generator)
    labels[3::4] = problem.ignore_index
    return labels


def ce(rows: int, columns: int, dtype: str, options: str = "", labels: str = "int64") -> str:
    return f"cross_entropy(logits={rows}x{columns}:{dtype},labels={rows}:{labels}{';' if options else ''}{options})"


def weighted(rows: int, columns: int, dtype: str, options: str = "", own: str = "fp32") -> str:
    """With weights of classes, of a dtype of their own."""
    more = dict(part.split("=") for part in options.split(";") if part)
    return ce(rows, columns, dtype, options).replace(
        f",labels={rows}:int64", f",labels={rows}:int64,weight={more.get('classes', columns)}:{own}"
    )


def _cross_entropies() -> Iterator[Case]:
    for dtype in ("fp32", "fp16", "bf16"):
        yield Case(ce(9, 40, dtype, "softcap=1.5"))
        yield Case(
            ce(9, 41, dtype, "reduction='mean';smoothing=0.1;z_loss=0.01;logit_scale=3.0;softcap=0.7;eager_gradient=True")
        )
        yield Case(weighted(9, 40, dtype))
        yield Case(weighted(9, 41, dtype, "reduction='mean'", dtype))
        yield Case(weighted(9, 41, dtype, "reduction='mean';smoothing=0.1;z_loss=0.01;eager_gradient=True"))
        yield Case(weighted(9, 40, dtype, "reduction='sum';smoothing=0.1;z_loss=0.01;softcap=2.0;logit_scale=0.7", dtype))
        yield Case(weighted(6, 16, dtype, "smoothing=0.2;softcap=2.0;shard=True;first_class=16;classes=40"))
        yield Case(weighted(6, 17, dtype, "shard=True;classes=17"), silent=("lse",))
    for columns in (2, 7, 255, 1000, 8192, 20003):
        yield Case(weighted(3, columns, "bf16", "smoothing=0.1;z_loss=0.001"))
        yield Case(weighted(3, columns, "fp32", "reduction='mean';eager_gradient=True;smoothing=0.1;softcap=3.0"))
        yield Case(weighted(3, columns, "fp32", "reduction='mean';z_loss=0.1;softcap=3.0"))
    for rows in (0, 1):
        yield Case(weighted(rows, 24, "fp32", "reduction='sum';smoothing=0.1"))
    yield Case(weighted(5, 24, "fp32", "inplace=True;ignore_index=7;softcap=1.0"))
    for layout in ("gaps", "transposed", "expanded"):
        yield Case(weighted(5, 41, "bf16", "smoothing=0.1;softcap=2.0"), layout)  # type: ignore[arg-type]
        yield Case(weighted(5, 41, "fp32", "reduction='sum';smoothing=0.1;eager_gradient=True"), layout)  # type: ignore[arg-type]
    for dtype in ("fp32", "fp16", "bf16"):
        yield Case(ce(9, 40, dtype))
        yield Case(ce(9, 40, dtype, "reduction='mean';smoothing=0.1;z_loss=0.01;logit_scale=0.7", "int32"))
        yield Case(ce(9, 41, dtype, "reduction='mean';smoothing=0.1;z_loss=0.01;eager_gradient=True"))
        yield Case(ce(9, 40, dtype, "reduction='sum';eager_gradient=True;inplace=True"))
        yield Case(ce(6, 16, dtype, "smoothing=0.2;shard=True;first_class=16;classes=40"))
        yield Case(ce(6, 17, dtype, "logit_scale=2.0;shard=True;classes=17"))
    yield Case(ce(3, 1, "bf16"))
    for columns in (2, 7, 255, 1000, 5003, 8192, 20000, 20003):
        yield Case(ce(3, columns, "bf16", "smoothing=0.1"))
        yield Case(ce(3, columns, "fp32", "reduction='mean';eager_gradient=True;smoothing=0.1"))
    for rows in (0, 1, 2):
        yield Case(ce(rows, 24, "fp32", "reduction='sum'"))
    yield Case(ce(5, 24, "fp32", "inplace=True;ignore_index=7"))
    yield Case(ce(5, 24, "fp32", "z_loss=0.1;smoothing=1.0"))
    for layout in ("gaps", "transposed", "expanded"):
        yield Case(ce(5, 40, "fp32", "smoothing=0.1"), layout)  # type: ignore[arg-type]
        yield Case(ce(5, 41, "bf16"), layout)  # type: ignore[arg-type]
        yield Case(ce(5, 41, "bf16", "reduction='sum';eager_gradient=True"), layout)  # type: ignore[arg-type]
    for columns in (2, 7, 33):  # few classes: errors of the exponential and of lse are those of the gradient
        yield Case(ce(40, columns, "fp32", "z_loss=0.001"))
        yield Case(ce(40, columns, "fp32", "reduction='mean'"))
        yield Case(ce(40, columns, "fp32", "reduction='sum';smoothing=0.1;eager_gradient=True"))
    yield Case(ce(1, 2, "fp32", "reduction='sum';smoothing=0.1;z_loss=0.001;eager_gradient=True", "int32"))
    yield Case(ce(6, 16, "fp32", "shard=True;classes=16"), silent=("lse",))
    yield Case(ce(6, 16, "fp32", "shard=True;classes=16"), silent=("share",))


# -- rotary ---------------------------------------------------------------------------------------------------------------


def _rotary(problem: Any, tensors: Tensors) -> Tensors:
    positions = tensors.get("positions")
    if positions is None:
        batch, seqlen = tensors["q"].shape[:2]
        positions = torch.arange(problem.offset, problem.offset + seqlen, device=tensors["q"].device).expand(batch, -1)
    tables = (tensors["cos"], tensors["sin"], positions, problem.interleaved, problem.conjugate)
    return {name: rotary_reference(tensors[name.removeprefix("out_")], *tables) for name in problem.public()}


def rope(
    batch: int, seqlen: int, heads: tuple[int, int], dim: int, half: int, dtype: str, options: str = "", more: str = ""
) -> str:
    k = f",k={batch}x{seqlen}x{heads[1]}x{dim}:{dtype}" if heads[1] else ""
    tables = "".join(f",{name}={more or '40'}x{half}:{'fp32' if dtype != 'fp16' else 'fp16'}" for name in ("cos", "sin"))
    return f"rotary(q={batch}x{seqlen}x{heads[0]}x{dim}:{dtype}{k}{tables}{options})"


def _rotaries() -> Iterator[Case]:
    places = ",positions=2x9:int64"
    for dtype in ("fp32", "fp16", "bf16"):
        for kind in ("", "interleaved=True"):
            yield Case(rope(2, 9, (3, 1), 16, 8, dtype, ";" + kind if kind else ""))
            yield Case(rope(2, 9, (2, 0), 24, 5, dtype, f"{places}{';' + kind if kind else ''}"))
    for kind in ("", ";interleaved=True"):
        yield Case(rope(1, 33, (2, 2), 64, 20, "fp32", f";offset=7{kind.replace(';', ';')}" if kind else ";offset=7"))
        yield Case(rope(2, 9, (1, 2), 10, 3, "bf16", (kind or "") + (";conjugate=True")))
        yield Case(rope(2, 9, (2, 1), 16, 4, "fp32", (kind or "") + ";inplace=True"))
        for layout in ("gaps", "transposed", "expanded"):
            yield Case(rope(2, 5, (2, 1), 16, 6, "fp32", kind), layout)  # type: ignore[arg-type]
    yield Case(rope(2, 0, (2, 1), 16, 6, "fp32"))
    yield Case(rope(0, 5, (2, 1), 16, 6, "fp32"))
    for which in ("q", "k"):
        yield Case(rope(2, 5, (2, 1), 16, 6, "fp32"), fixed=(which,))
        yield Case(rope(2, 5, (2, 1), 16, 6, "fp32"), silent=(f"out_{which}",))


# -- softmax --------------------------------------------------------------------------------------------------------------


def _softmax(problem: Any, tensors: Tensors) -> Tensors:
    return {"y": softmax_reference(tensors["x"], tensors.get("mask"), **problem.options())}


def _softmaxes() -> Iterator[Case]:
    def spell(shape: str, dtype: str, options: str = "", mask: str = "") -> str:
        return f"softmax(x={shape}:{dtype}{f',mask={shape}:{mask}' if mask else ''}{';' if options else ''}{options})"

    for dtype in ("fp32", "fp16", "bf16"):
        yield Case(spell("2x3x5x24", dtype, "scale=0.5", "bool"))
        yield Case(spell("2x3x9x9", dtype, "causal=True"))
        yield Case(spell("1x2x4x33", dtype, "masked_score=-10000.0", "uint8"))
    for shape in ("1x1x3x1", "1x2x7x5", "1x2x3x300", "2x1x20x36", "1x1x2x17000", "0x2x3x4", "2x2x0x4"):
        yield Case(spell(shape, "fp32", "causal=True;scale=2.0"))
        yield Case(spell(shape, "bf16", "", "bool"))
    yield Case(spell("2x2x6x10", "fp32", "causal=True;masked_score=-10000.0", "bool"))
    for layout in ("gaps", "transposed", "expanded"):
        yield Case(spell("2x2x6x10", "fp32", "causal=True", "bool"), layout)  # type: ignore[arg-type]
        yield Case(spell("2x2x6x10", "fp32", "causal=True;masked_score=-2.0", "uint8"), layout)  # type: ignore[arg-type]
    for shape, dtype in (("2x3x9x24", "fp32"), ("2x3x9x24", "fp16"), ("1x2x7x33", "bf16"), ("1x1x4x17000", "fp32")):
        yield Case(spell(shape, dtype, "scale=0.5;masked_score=-2.0", "bool"))  # below each row's largest
    for shape in ("3x2x147x7", "3x2x138x64", "1x1x7x2048", "1x1x3x17000"):  # equal gradients of a row: dx is 0
        yield Case(spell(shape, "fp32", "scale=0.5", "bool"), "expanded")


# -- dense ----------------------------------------------------------------------------------------------------------------


def _dense(problem: Any, tensors: Tensors) -> Tensors:
    made = {"out": dense_reference(tensors, activation=problem.activation)}
    if problem.returns_pre:
        made["pre"] = torch.nn.functional.linear(tensors["x"], tensors["weight1"], tensors.get("bias1"))
    return made


def mlp(rows: int, width: int, hidden: int, out: int, dtype: str, more: str, options: str = "") -> str:
    shapes = {"weight1": f"{hidden}x{width}", "bias1": f"{hidden}", "weight2": f"{out}x{hidden}", "bias2": f"{out}"}
    given = ",".join([f"x={rows}x{width}:{dtype}", *(f"{name}={shapes[name]}:{dtype}" for name in more.split())])
    return f"dense({given}{';' if options else ''}{options})"


def _denses() -> Iterator[Case]:
    for dtype in ("fp32", "fp16", "bf16"):
        yield Case(mlp(9, 12, 20, 0, dtype, "weight1 bias1"))
        for more in ("", "recompute=True"):
            yield Case(mlp(9, 12, 20, 7, dtype, "weight1 bias1 weight2 bias2", more))
    for activation in ("relu", "sqrelu"):
        yield Case(mlp(9, 12, 20, 0, "fp32", "weight1", f"activation='{activation}'"))
        yield Case(mlp(300, 12, 600, 7, "fp32", "weight1 weight2", f"activation='{activation}'"))
    yield Case(mlp(9, 12, 20, 0, "fp32", "weight1 bias1", "returns_pre=True"))
    for rows in (0, 1, 513):
        yield Case(mlp(rows, 5, 24, 7, "fp32", "weight1 bias1 weight2"))
    every = mlp(9, 12, 20, 7, "fp32", "weight1 bias1 weight2 bias2")
    again = mlp(9, 12, 20, 7, "fp32", "weight1 bias1 weight2 bias2", "recompute=True")
    for case in (every, again):
        for fixed in (
            ("x",),
            ("weight1", "bias1", "x"),
            ("weight2",),
            ("weight2", "bias2"),
            ("bias1",),
            ("x", "weight1", "weight2"),
        ):
            yield Case(case, fixed=fixed)
    for layout in ("gaps", "transposed", "expanded"):
        yield Case(every, layout)  # type: ignore[arg-type]
        yield Case(mlp(9, 12, 20, 0, "fp32", "weight1 bias1"), layout)  # type: ignore[arg-type]
    big = mlp(388, 200, 16, 72, "fp16", "weight1 bias1 weight2 bias2", "activation='sqrelu'")
    yield Case(big, "expanded")  # gradients that fp16 cannot hold


SPECIAL: dict[tuple[str, str], Callable[[Any, torch.Generator], torch.Tensor]] = {
    ("cross_entropy", "labels"): _labels,
    ("cross_entropy", "weight"): lambda p, g: torch.rand(p.every, generator=g) * 2.0,
    ("rotary", "positions"): lambda p, g: torch.randint(p["cos"].shape[0], p["positions"].shape, generator=g),
    ("softmax", "mask"): lambda p, g: torch.rand(p["x"].shape, generator=g) < torch.rand(p["x"].shape[2], 1, generator=g) * 1.3,
    ("norm", "seed"): lambda p, g: torch.randint(2**62, (1,), generator=g),
    ("norm", "rowscale"): lambda p, g: torch.rand(p.rows, generator=g) + 0.5,
    ("norm", "x_subset"): lambda p, g: _subset(p, g, p["x"].shape[0]),
    ("norm", "out_subset"): lambda p, g: _subset(p, g, p.out_rows),
}
REFERENCES: dict[str, Callable[[Any, Tensors], Tensors]] = {
    "norm": _norm,
    "cross_entropy": _cross_entropy,
    "rotary": _rotary,
    "softmax": _softmax,
    "dense": _dense,
}
GROUPS = (_norms, _cross_entropies, _rotaries, _softmaxes, _denses)
CASES: tuple[Case, ...] = tuple(case for group in GROUPS for case in group())
assert len({case.name for case in CASES}) == len(CASES), "two cases have one name"
assert {case.problem.op for case in CASES} == set(OPS) == set(REFERENCES)
