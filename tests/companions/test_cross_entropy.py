"""The public cross-entropy: what the case list does not say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashtile import InvalidProblem, NotSupported, ops
from flashtile.kernels.ops.catalogue import BACKENDS

INF = float("inf")


def draw(place: torch.device, rows: int = 6, classes: int = 41) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(classes, (rows,), device=place)
    labels[1] = -100
    return torch.randn(rows, classes, device=place), labels


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_it_is_torch_s(backend: str, reduction: str, place: torch.device) -> None:
    logits, labels = draw(place)
    x = logits.view(2, 3, 41).requires_grad_()
    loss = ops.cross_entropy(x, labels.view(2, 3), reduction=reduction, label_smoothing=0.1, backend=backend)
    expected = F.cross_entropy(x.flatten(0, 1), labels, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(loss.flatten(), expected.flatten())
    grads = [torch.autograd.grad(v.square().sum(), x)[0] for v in (loss, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_weights_of_classes_are_torch_s(
    backend: str, reduction: str, smoothing: float, eager: bool, softcap: float | None, place: torch.device
) -> None:
    """Beside ignored rows and smoothing; a mean is over the weights of the labels."""
    logits, labels = draw(place)
    x, weight = logits.requires_grad_(), torch.rand(41, device=place)
    weight[labels[2]] = 0.0
    options: dict[str, Any] = dict(reduction=reduction, label_smoothing=smoothing)
    eagerly = eager and reduction != "none"
    loss = ops.cross_entropy(x, labels, weight=weight, softcap=softcap, eager_gradient=eagerly, backend=backend, **options)
    truth = x.detach().double().requires_grad_()
    capped = truth if softcap is None else softcap * (truth / softcap).tanh()
    expected = F.cross_entropy(capped, labels, weight.double(), **options)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(v.square().sum(), t)[0].double() for v, t in ((loss, x), (expected, truth))]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eager", [False, True])
def test_weights_of_classes_leave_the_z_loss_as_it_is(backend: str, eager: bool, place: torch.device) -> None:
    """It is of rows, whatever their label: a mean of it is over the rows that count, and equal weights change nothing."""
    logits, labels = draw(place)
    x, weight = logits.requires_grad_(), torch.rand(41, device=place)

    def made(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = ops.cross_entropy(x, labels, eager_gradient=eager, backend=backend, **options)
        return loss, torch.autograd.grad(loss, x)[0]

    for options in ({"label_smoothing": 0.1}, {"softcap": 3.0}):
        plain = made(z_loss=0.1, **options)
        for got, expected in zip(made(weight=torch.full_like(weight, 3.0), z_loss=0.1, **options), plain, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        added = [a - b for a, b in zip(plain, made(**options), strict=True)]
        both = zip(made(weight=weight, z_loss=0.1, **options), made(weight=weight, **options), added, strict=True)
        for got, without, square in both:
            torch.testing.assert_close(got - without, square, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_softcap_see_bad_labels_and_ignored_rows(backend: str, place: torch.device) -> None:
    logits, labels = draw(place)
    logits[1], labels[2], labels[3] = torch.nan, 41, -1
    for options in ({"weight": torch.rand(41, device=place)}, {"softcap": 2.0}):
        x = logits.clone().requires_grad_()
        loss = ops.cross_entropy(x, labels, reduction="none", label_smoothing=0.1, backend=backend, **options)
        assert loss.isnan().tolist() == [False, False, True, True, False, False]
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert grad.isnan().all(1).tolist() == [False, False, True, True, False, False]
        assert not grad[1].any()


def test_a_weight_that_wants_a_gradient_is_refused() -> None:
    """As in torch, where it has none; not with a silent zero."""
    logits, labels = draw(torch.device("cpu"))
    weight = torch.rand(41, requires_grad=True)
    calls: list[Any] = [lambda: ops.cross_entropy(logits, labels, weight=weight)]
    calls.append(lambda: torch.func.grad(lambda w: ops.cross_entropy(logits, labels, weight=w))(weight.detach()))
    for call in calls:
        with pytest.raises(InvalidProblem, match=r"^weight requires a gradient, which it does not have; detach it"):
            call()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eager", [False, True])
def test_blocks_of_minus_infinity(backend: str, eager: bool, place: torch.device) -> None:
    """A row that starts with whole steps of -inf, as masked vocabularies and shards have them."""
    logits, labels = torch.randn(3, 20001, device=place), torch.tensor([20000, 19000, 19500], device=place)
    logits[:, :18000] = -INF
    logits[1, 19001:] = -INF
    x = logits.requires_grad_()
    loss = ops.cross_entropy(x, labels, eager_gradient=eager, backend=backend)
    expected = F.cross_entropy(x, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, x)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eager", [False, True])
def test_rows_that_are_sure_of_their_label(backend: str, eager: bool, dtype: torch.dtype, place: torch.device) -> None:
    """Their losses are as exact as others', whatever the logits' size."""
    logits = torch.full((8, 300), 100.0, dtype=dtype, device=place)
    labels = torch.arange(8, device=place) * 37
    logits[torch.arange(8, device=place), labels] += torch.arange(8, 16, device=place)
    for row, label in zip(logits.split(1), labels.split(1), strict=True):
        loss = ops.cross_entropy(row.clone().requires_grad_(), label, eager_gradient=eager, backend=backend)
        torch.testing.assert_close(loss.double(), F.cross_entropy(row.double(), label), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eager", [False, True])
def test_ignored_rows_are_zero_whatever_they_hold(backend: str, eager: bool, place: torch.device) -> None:
    logits, labels = draw(place)
    clean = logits.clone()
    logits[1] = torch.nan
    made = []
    for x in (clean.requires_grad_(), logits.requires_grad_()):
        loss = ops.cross_entropy(x, labels, z_loss=0.1, eager_gradient=eager, backend=backend)
        made.append((loss, torch.autograd.grad(loss, x)[0]))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert not made[1][1][1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_bad_labels_are_seen(backend: str, place: torch.device) -> None:
    logits, labels = draw(place)
    logits[0, 3] = torch.nan
    labels[2], labels[3] = 41, -1
    x = logits.requires_grad_()
    loss = ops.cross_entropy(x, labels, reduction="none", backend=backend)
    assert loss.isnan().tolist() == [True, False, True, True, False, False]
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert grad.isnan().all(1).tolist() == [True, False, True, True, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_serves_one_backward(backend: str, place: torch.device) -> None:
    logits, labels = draw(place)
    x = logits.requires_grad_()
    loss = ops.cross_entropy(x, labels, backend=backend)
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(NotSupported, match="a second backward of cross_entropy"):
        torch.autograd.grad(loss, x)
    torch.testing.assert_close(once, torch.autograd.grad(F.cross_entropy(x, labels), x)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eager", [False, True])
def test_in_place_is_noticed(backend: str, eager: bool, place: torch.device) -> None:
    """Somebody else's backward needs the logits that the gradient was written over."""
    logits, labels = draw(place)
    leaf = logits.requires_grad_()
    x = leaf * 1.0
    other = x.square().sum()
    loss = ops.cross_entropy(x, labels, inplace=True, eager_gradient=eager, backend=backend)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert grad.data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str, place: torch.device) -> None:
    weight = torch.rand(41, device=place)

    def function(x: torch.Tensor, labels: torch.Tensor, **more: Any) -> Any:
        return ops.cross_entropy(x * 1.5, labels, z_loss=0.01, inplace=True, backend=backend, **more)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, more in ((4, {}), (7, {}), (4, {"weight": weight, "softcap": 2.0}), (7, {"weight": weight, "softcap": 2.0})):
        logits, labels = draw(place, rows)
        x = logits.requires_grad_()
        eager, traced = function(x, labels, **more), compiled(x, labels, **more)
        torch.testing.assert_close(eager, traced)
        torch.testing.assert_close(*(torch.autograd.grad(v, x)[0] for v in (eager, traced)))


def test_lse_is_returned() -> None:
    logits, labels = draw(torch.device("cpu"))
    loss, lse = ops.cross_entropy(logits.requires_grad_(), labels, return_lse=True)
    torch.testing.assert_close(lse, logits.logsumexp(1))
    assert loss.requires_grad
    assert not lse.requires_grad


SHARDS = """
import sys, torch, torch.distributed as dist, torch.nn.functional as F
from flashtile import ops
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
logits, labels = torch.randn(6, 40), torch.randint(40, (6,))
labels[1] = -100
logits[2, :20] = -torch.inf
labels[2] = 30
mine = logits[:, 20 * rank : 20 * rank + 20].clone().requires_grad_()
whole = logits.clone().requires_grad_()
for reduction in ("none", "mean", "sum"):
    for more in ({}, dict(weight=torch.linspace(0, 2, 40), softcap=3.0)):
        options = dict(reduction=reduction, label_smoothing=0.0 if reduction == "sum" else 0.1, z_loss=0.01, **more)
        if options["label_smoothing"]:
            mine.data.clamp_(min=-5), whole.data.clamp_(min=-5)
        loss = ops.cross_entropy(mine, labels, process_group=dist.group.WORLD, **options)
        alone = ops.cross_entropy(whole, labels, eager_gradient=False, **options)
        torch.testing.assert_close(loss, alone)
        (a,), (b,) = (torch.autograd.grad(v.square().sum(), x) for v, x in ((loss, mine), (alone, whole)))
        torch.testing.assert_close(a, b[:, 20 * rank : 20 * rank + 20])
    mine.data.copy_(logits[:, 20 * rank : 20 * rank + 20]), whole.data.copy_(logits)
print("right")
"""


def test_shards_of_classes(tmp_path: Path) -> None:
    """Two processes with half of the classes each; the smoothing term and lse are of all, also where a half is all -inf."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SHARDS]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        said = process.communicate(timeout=240)[0]
        assert "right" in said, said[-3000:]


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "logits-list": ({"logits": [1.0]}, "logits is a list; it must be a torch.Tensor"),
    "logits-int": ({"logits": t(3, 5, dtype=torch.int32)}, "logits is int32; it must be fp16 or bf16 or fp32"),
    "logits-double": ({"logits": t(3, 5, dtype=torch.float64)}, "logits is torch.float64; it must be fp16 or bf16 or fp32"),
    "labels-double": ({"labels": t(3, dtype=torch.float64)}, "labels is torch.float64; it must be int32 or int64"),
    "logits-scalar": ({"logits": t()}, r"labels have shape \(3,\); it must be that of logits \(\) but the last"),
    "logits-empty": ({"logits": t(3, 0)}, "logits must be there, with a last axis of at least 1"),
    "labels-shape": ({"labels": t(4, dtype=torch.int64)}, r"labels have shape \(4,\); it must be that of logits \(3, 5\)"),
    "labels-float": ({"labels": t(3)}, "labels is fp32; it must be int32 or int64"),
    "reduction": ({"reduction": "average"}, "reduction is 'average'; it must be one of none, mean, sum"),
    "smoothing": ({"label_smoothing": 1.5}, "^label_smoothing is 1.5; it must be finite, from 0.0 to 1.0"),
    "z_loss": ({"z_loss": -1.0}, "z_loss is -1.0; it must be finite, from 0.0"),
    "logit_scale": ({"logit_scale": INF}, "logit_scale is inf; it must be finite"),
    "softcap": ({"softcap": 0.0}, "softcap is 0.0; it must be a positive number or None"),
    "softcap-text": ({"softcap": "30"}, "softcap is '30'; it must be a number"),
    "weight-list": ({"weight": [1.0] * 5}, "weight is a list; it must be a torch.Tensor"),
    "weight-shape": ({"weight": t(4)}, r"weight has shape \(4,\); it must be \(classes,\) = \(5,\)"),
    "weight-double": ({"weight": t(5, dtype=torch.float64)}, "weight is torch.float64; it must be fp16 or bf16 or fp32"),
    "ignore_index": ({"ignore_index": 0.5}, "ignore_index is 0.5; it must be an int"),
    "return_lse": ({"return_lse": 1}, "return_lse is 1; it must be True or False"),
    "inplace": ({"inplace": "yes"}, "inplace is 'yes'; it must be True or False"),
    "eager-text": ({"eager_gradient": "no"}, "eager_gradient is 'no'; it must be True, False or None"),
    "sharded-z_loss": ({"z_loss": -1.0, "process_group": object()}, "z_loss is -1.0; it must be finite, from 0.0"),
    "sharded-reduction": ({"reduction": "average", "process_group": object()}, "reduction is 'average'; it must be one of"),
    "eager": ({"reduction": "none", "eager_gradient": True, "logits": t(3, 5).requires_grad_()}, "rows' gradients wait"),
    "backend": ({"backend": "cuda"}, "backend is 'cuda'; it must be one of triton, cpu, or None"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(InvalidProblem, match=message):
        ops.cross_entropy(**{"logits": t(3, 5), "labels": t(3, dtype=torch.int64), **arguments})
