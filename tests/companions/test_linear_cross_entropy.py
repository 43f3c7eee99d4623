"""linear_cross_entropy against the same through its logits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashtile import InvalidProblem, NotSupported, ops
from flashtile.kernels.ops.catalogue import BACKENDS
from flashtile.ops.head_passes import Asked, Given, Head, lay_out
from flashtile.reference.cross_entropy import cross_entropy_reference
from tests.cases import lay_out as lay_out_tensor

OPTIONS: dict[str, Any] = dict(label_smoothing=0.1, z_loss=0.01, logit_scale=0.7)


def draw(place: torch.device, rows: int, hidden: int, classes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    labels = torch.randint(classes, (rows,), device=place)
    labels[1::5] = -100
    x, weight = (torch.randn(*shape, device=place).to(dtype).requires_grad_() for shape in ((rows, hidden), (classes, hidden)))
    return [x, weight, labels]


def exact(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, reduction: str) -> list[torch.Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    options = dict(smoothing=0.1, z_loss=0.01, logit_scale=0.7)
    loss = cross_entropy_reference(leaves[0] @ leaves[1].t(), labels, reduction=reduction, **options)[0]  # type: ignore[arg-type]
    return [loss, *torch.autograd.grad(1.5 * loss, leaves)]


@pytest.fixture(params=[1, 10**6], ids=["many chunks", "one chunk"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtile.ops.head_passes.CHUNK_BYTES", request.param)
    monkeypatch.setattr("flashtile.ops.head_passes.STEP", 64)


@pytest.mark.parametrize("more", [0.0, 0.1, 0.4, 0.6, 1.0], ids="{} more".format)
@pytest.mark.parametrize("lends", [False, True], ids=["own memory", "weight's gradient too"])
@pytest.mark.parametrize(
    ("rows", "hidden", "classes", "chunk"),
    [
        (8192, 4096, 128256, 4096), (4096, 4096, 128256, 8192), (512, 4096, 50257, 4096), (16384, 1024, 50257, 512),
        (24, 8, 900, 16), (3, 64, 1000, 16), (0, 8, 300, 256), (9, 4, 100, 100),
    ],
)  # fmt: skip
def test_parts_of_classes_leave_one_another_alone(
    rows: int, hidden: int, classes: int, chunk: int, lends: bool, more: float
) -> None:
    """Each class once, in order; what is finished of the gradient never reaches logits that are still to be read."""
    own = min(classes, chunk + int(more * classes))
    parts = lay_out(rows, hidden, classes, own, chunk, lends)
    fold = chunk * rows if any(not p.stored for p in parts) else 0  # elements of own memory, written by the first pass
    for i, part in enumerate(parts):
        assert part.first == (parts[i - 1].first + parts[i - 1].width if i else 0)
        assert part.width > 0
        end = part.first + part.width
        for p in parts[i:] if part.stored else [part]:  # those whose logits must be whole when this one's gradient is there
            if p.lends and (p.stored or p is part):
                assert end * hidden <= p.place <= p.place + p.width * rows <= classes * hidden
            elif not p.lends:
                assert (fold if p.stored else 0) <= p.place <= p.place + p.width * rows <= own * rows
    for lent in (False, True):
        for before, after in pairwise(p for p in parts if p.stored and p.lends == lent):
            assert before.place + before.width * rows == after.place
    assert sum(p.width for p in parts) == classes
    assert lends or not any(p.lends for p in parts)
    if rows > 1000:  # as much as can be is computed once
        stored = sum(p.width for p in parts if p.stored)
        lent = min(1.0, hidden / rows) * (classes - 2 * chunk) if lends else 0
        assert stored >= min(0.85 * lent + 0.95 * (own - 2 * chunk), classes)


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(12, 4, 450), (6, 16, 300), (5, 4, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients(backend: str, sizes: Any, dtype: torch.dtype, place: torch.device) -> None:
    """Logits wait in the memory of weight's gradient: some where there are more rows than hidden, else nearly all."""
    x, weight, labels = draw(place, *sizes, dtype=dtype)
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-2)
    for reduction in ("mean", "sum"):
        loss = ops.linear_cross_entropy(x, weight, labels, reduction=reduction, backend=backend, **OPTIONS)
        grads = torch.autograd.grad(1.5 * loss, (x, weight))
        truth = exact(x, weight, labels, reduction)
        for got, true in zip((loss, *grads), truth, strict=True):
            torch.testing.assert_close(got.double(), true, **tolerance)
        with torch.no_grad():
            alone = ops.linear_cross_entropy(x, weight, labels, reduction=reduction, backend=backend, **OPTIONS)
        assert torch.equal(alone, loss)


# What Gemma's and Liger's users ask for besides: names of inputs, and options.
MORE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "bias": (("bias",), {}),
    "softcap": ((), {"softcap": 1.5}),
    "class_weight": (("class_weight",), {}),
    "all": (("bias", "class_weight"), {"softcap": 1.5, **OPTIONS}),
}
Function = Any


def draw_more(
    place: torch.device, sizes: Any, dtype: torch.dtype, names: tuple[str, ...]
) -> tuple[Function, Function, list[Any]]:
    """The function of x, weight, and bias where there is one; the truth; and these."""
    x, weight, labels = draw(place, *sizes, dtype=dtype)
    leaves = [x, weight, *([torch.randn(sizes[2], device=place).to(dtype).requires_grad_()] if "bias" in names else [])]
    own = torch.rand(sizes[2], device=place) * 2 if "class_weight" in names else None

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        return ops.linear_cross_entropy(x, weight, labels, bias=bias, class_weight=own, **options)

    def truth(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *, label_smoothing: float = 0.0, **options: Any) -> Any:
        logits = x @ weight.t() + (0.0 if bias is None else bias)
        return cross_entropy_reference(logits, labels, own, smoothing=label_smoothing, **options)[0]

    return function, truth, leaves


def gradients(loss: torch.Tensor, leaves: list[torch.Tensor], **how: Any) -> tuple[torch.Tensor, ...]:
    """From gradients of the loss, of rows one after another."""
    return torch.autograd.grad((loss * torch.linspace(-1.0, 2.0, loss.numel(), device=loss.device)).sum(), leaves, **how)


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_option_against_float64(more: str, reduction: str, backend: str, dtype: torch.dtype, place: torch.device) -> None:
    names, options = MORE[more]
    function, truth, leaves = draw_more(place, (12, 4, 250), dtype, names)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    tolerance = dict(rtol=1e-4, atol=2e-5) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-2)
    loss, expected = (
        function(*leaves, reduction=reduction, backend=backend, **options),
        truth(*exact, reduction=reduction, **options),
    )
    torch.testing.assert_close(loss.double(), expected, **tolerance)
    for got, true in zip(gradients(loss, leaves), gradients(expected, exact), strict=True):
        torch.testing.assert_close(got.double(), true, **tolerance)
    with torch.no_grad():
        assert torch.equal(function(*leaves, reduction=reduction, backend=backend, **options), loss)


@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_of_rows_have_the_shape_of_labels_and_any_number_of_backwards(backend: str, place: torch.device) -> None:
    x, weight, labels = draw(place, 12, 8, 300)
    loss = ops.linear_cross_entropy(x.view(3, 4, 8), weight, labels.view(3, 4), reduction="none", backend=backend)
    assert loss.shape == (3, 4)
    assert not loss.view(-1)[labels == -100].any()
    once = gradients(loss.view(-1), [x, weight], retain_graph=True)
    for got, again in zip(once, gradients(loss.view(-1), [x, weight]), strict=True):
        assert torch.equal(got, again)
    mean = ops.linear_cross_entropy(x, weight, labels, backend=backend)
    torch.testing.assert_close(loss.sum() / (labels != -100).sum(), mean)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_one_gradient_of_three(which: int, reduction: str) -> None:
    function, _, leaves = draw_more(torch.device("cpu"), (12, 8, 300), torch.float32, ("bias",))
    expected = gradients(function(*leaves, reduction=reduction), leaves)[which]
    some = [t if i == which else t.detach() for i, t in enumerate(leaves)]
    torch.testing.assert_close(gradients(function(*some, reduction=reduction), [leaves[which]])[0], expected)


def test_bad_labels_are_seen() -> None:
    x, weight, labels = draw(torch.device("cpu"), 6, 8, 300)
    labels[2], labels[3] = 300, -1
    for more in ({}, {"class_weight": torch.rand(300)}):
        loss = ops.linear_cross_entropy(x, weight, labels, reduction="none", **more)
        assert loss.isnan().tolist() == [False, False, True, True, False, False]
        assert torch.autograd.grad(loss.sum(), x)[0].isnan().all(1).tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_bias_under_autocast(reduction: str) -> None:
    function, _, leaves = draw_more(torch.device("cpu"), (12, 8, 300), torch.float32, ("bias",))
    low = [t.detach().bfloat16().requires_grad_() for t in leaves]
    expected = function(*low, reduction=reduction)
    with torch.autocast("cpu", torch.bfloat16):
        loss = function(*leaves, reduction=reduction)
    assert torch.equal(loss, expected)
    for got, true in zip(gradients(loss, leaves), gradients(expected, low), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, true.float(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_each_option_compiled(more: str, reduction: str) -> None:
    names, options = MORE[more]
    function, _, leaves = draw_more(torch.device("cpu"), (12, 8, 300), torch.float32, names)
    torch._dynamo.reset()
    traced = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    made = [f(*leaves, reduction=reduction, **options) for f in (function, traced)]
    torch.testing.assert_close(*made)
    for got, expected in zip(*(gradients(loss, leaves) for loss in made), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("more", ["bias", "all"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_torch_func(more: str, reduction: str) -> None:
    """grad, vjp, vmap and each of the other are autograd and loops; second derivatives refuse, never zero."""
    names, options = MORE[more]
    function, _, leaves = draw_more(torch.device("cpu"), (12, 8, 300), torch.float32, names)
    plain, slots = [t.detach() for t in leaves], tuple(range(len(leaves)))

    def loss(*given: torch.Tensor) -> torch.Tensor:
        return function(*given, reduction=reduction, **options).square().sum()

    def by_autograd(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = [t.detach().requires_grad_() for t in given]
        return torch.autograd.grad(loss(*own), own)

    def close(got: Any, expected: Any) -> None:
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    close(torch.func.grad(loss, slots)(*plain), by_autograd(*plain))
    many = [torch.stack([t, t * 2, -t]) for t in plain]
    each = [[t[i] for t in many] for i in range(3)]
    close(torch.func.vmap(loss)(*many), [loss(*some) for some in each])
    loops = [torch.stack(g) for g in zip(*(by_autograd(*some) for some in each), strict=True)]
    close(torch.func.vmap(torch.func.grad(loss, slots))(*many), loops)
    shared = torch.func.grad(lambda *t: torch.func.vmap(loss, (0, *(None,) * (len(t) - 1)))(*t).sum(), slots)(
        many[0], *plain[1:]
    )
    alone = [by_autograd(many[0][i], *plain[1:]) for i in range(3)]
    close(shared[1:], [sum(some[1:], some[0]) for some in zip(*alone, strict=True)][1:])
    close(shared[0], [some[0] for some in alone])
    outputs, pull = torch.func.vjp(lambda *t: function(*t, reduction=reduction, **options), *plain)
    weights = torch.stack([torch.ones_like(outputs), outputs])
    close(torch.func.vmap(pull)(weights), [torch.stack(g) for g in zip(*map(pull, weights), strict=True)])

    def slopes(*given: torch.Tensor) -> torch.Tensor:
        return sum((g.square().sum() for g in torch.func.grad(loss, slots)(*given)), torch.zeros(()))

    for slot in slots:
        with pytest.raises(NotSupported, match="second derivative of linear_cross_entropy"):
            torch.func.grad(slopes, slot)(*plain)
    torch.compiler.reset()
    traced = torch.compile(torch.func.vmap(torch.func.grad(loss, slots)), fullgraph=True, backend="aot_eager")
    close(traced(*many), loops)
    with pytest.raises(InvalidProblem, match=r"^class_weight requires a gradient, which it does not have; detach it"):
        torch.func.grad(lambda w: ops.linear_cross_entropy(*plain[:2], torch.zeros(12, dtype=torch.int64), class_weight=w))(
            torch.rand(300)
        )


def test_vmap_of_recorded_gradients() -> None:
    """Of losses of rows, a jacobian; those of a reduced loss are there once (tests/companions/test_operator.py)."""
    function, _, leaves = draw_more(torch.device("cpu"), (6, 8, 300), torch.float32, ("bias",))
    loss = function(*leaves, reduction="none")

    def pull(weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, leaves, weights, retain_graph=True)

    for got, *expected in zip(torch.func.vmap(pull)(torch.eye(6)), *map(pull, torch.eye(6)), strict=True):
        torch.testing.assert_close(got, torch.stack(expected))


@pytest.mark.usefixtures("chunk_bytes", "within_operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
def test_weights_gradient_is_formed_as_by_autograd(gaps: bool, dtype: torch.dtype) -> None:
    """Transposed where a float32 weight is not dense, some classes at a time; in 16 bits as it lies."""
    x, weight, labels = draw(torch.device("cpu"), 24, 8, 300, dtype)
    factors: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "aten::mm" and args[0].shape[1] == len(x):
                factors.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    if gaps:
        weight = lay_out_tensor(weight.detach(), "gaps").requires_grad_()
    with Watch():
        loss = ops.linear_cross_entropy(x, weight, labels, **OPTIONS)
        grads = torch.autograd.grad(1.5 * loss, (x, weight))
    assert {rows == 8 for rows, _ in factors} == {gaps and dtype == torch.float32}
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-2)
    for got, true in zip((loss, *grads), exact(x, weight, labels, "mean"), strict=True):
        torch.testing.assert_close(got.double(), true, **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_gradient_of_two(backend: str, place: torch.device) -> None:
    x, weight, labels = draw(place, 12, 8, 300)
    truth = exact(x, weight, labels, "mean")
    for i, leaf in enumerate((x, weight)):
        others = [t.detach() if t is not leaf else t for t in (x, weight)]
        loss = 1.5 * ops.linear_cross_entropy(*others, labels, backend=backend, **OPTIONS)
        torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0].double(), truth[1 + i], rtol=1e-4, atol=1e-5)


def test_it_serves_one_backward() -> None:
    x, weight, labels = draw(torch.device("cpu"), 12, 8, 300)
    loss = ops.linear_cross_entropy(x, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(NotSupported, match="a second backward of linear_cross_entropy"):
        loss.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str, place: torch.device) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ops.linear_cross_entropy(x * 2, weight, labels, backend=backend, **OPTIONS)

    torch._dynamo.reset()
    traced = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (6, 11):
        x, weight, labels = draw(place, rows, 8, 300)
        made = [f(x, weight, labels) for f in (function, traced)]
        torch.testing.assert_close(*made)
        for got, true in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in made), strict=True):
            torch.testing.assert_close(got, true)


def test_no_rows() -> None:
    x, weight, labels = draw(torch.device("cpu"), 0, 8, 300)
    loss = ops.linear_cross_entropy(x, weight, labels, reduction="sum")
    assert loss.item() == 0.0
    assert not any(g.any() for g in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.usefixtures("within_operators")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("logits_bytes", "products"), [(0, 3.5), (7_500, 3.3), (15_000, 3.0), (10**6, 3.0)])
def test_memory_for_logits_spares_products(
    logits_bytes: int, products: float, backend: str, dtype: torch.dtype, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With twice as many rows as hidden weight's gradient holds half of the logits; what else is stored is computed once."""
    monkeypatch.setattr("flashtile.ops.head_passes.CHUNK_BYTES", 1)
    monkeypatch.setattr("flashtile.ops.head_passes.STEP", 32)
    rows, hidden, classes = 16, 8, 800
    x, weight, labels = draw(place, rows, hidden, classes, dtype)
    size, largest, multiplied = logits_bytes * x.element_size() // 2, 0, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest, multiplied
            made, name = func(*args, **(kwargs or {})), func._schema.name
            if name in ("aten::empty", "aten::new_empty") and made.dtype == dtype:
                largest = max(largest, made.nbytes)
            if name.startswith(("aten::mm", "aten::addmm")):
                a, b = [factor for factor in args if isinstance(factor, torch.Tensor)][-2:]  # out_dtype may stand behind
                multiplied += a.shape[0] * a.shape[1] * b.shape[1]
            return made

    with Watch():
        loss = ops.linear_cross_entropy(x, weight, labels, logits_bytes=size, backend=backend, **OPTIONS)
        grads = torch.autograd.grad(1.5 * loss, (x, weight))
    assert multiplied / (rows * hidden * classes) == pytest.approx(products, abs=0.1)
    assert largest <= max(weight.nbytes, size)
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-2)
    for got, true in zip((loss, *grads), exact(x, weight, labels, "mean"), strict=True):
        torch.testing.assert_close(got.double(), true, **tolerance)


@pytest.mark.usefixtures("chunk_bytes", "within_operators")
def test_the_logits_are_never_there(request: pytest.FixtureRequest) -> None:
    """Where there are fewer chunks than classes no tensor has as many elements as the logits."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            tensors = (m for m in (made if isinstance(made, tuple) else (made,)) if torch.is_tensor(m))
            largest = max([largest, *(m.numel() for m in tensors if m.is_floating_point())])
            return made

    x, weight, labels = draw(torch.device("cpu"), 16, 8, 1000)
    options: dict[str, Any] = dict(
        bias=torch.randn(1000, requires_grad=True), class_weight=torch.rand(1000), softcap=3.0, label_smoothing=0.1
    )
    for more in ({}, options):
        largest = 0
        with Watch():
            ops.linear_cross_entropy(x, weight, labels, **more).sum().backward()
        assert (largest >= 16 * 1000) == ("one chunk" in request.node.name), more
    asked = Asked("none", 0.1, 0.01, 1.0, 3.0, -100, None, "")  # what its two operators do, into which no mode sees
    head = Head(Given(x, weight, options["bias"], labels, options["class_weight"]), asked)
    largest = 0
    with torch.no_grad(), Watch():
        lse = head.run([False] * 3)[1]
        head.pull(lse, torch.ones(16), [True] * 3)
    assert (largest >= 16 * 1000) == ("one chunk" in request.node.name)


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x-list": ({"x": [1.0]}, "x is a list; it must be a torch.Tensor"),
    "weight-width": (
        {"weight": t(5, 3)},
        r"weight is torch.float32 \(5, 3\); it must be \(classes, hidden\) for x, torch.float32 \(3, 4\)",
    ),
    "x-double": ({"x": t(3, 4, dtype=torch.float64)}, "x is torch.float64; it must be fp16 or bf16 or fp32"),
    "weight-dtype": ({"weight": t(5, 4, dtype=torch.bfloat16)}, "weight is torch.bfloat16"),
    "weight-rank": ({"weight": t(4)}, r"weight is torch.float32 \(4,\); it must be \(classes, hidden\)"),
    "labels-shape": (
        {"labels": t(4, dtype=torch.int64)},
        r"labels have shape \(4,\); it must be that of x \(3, 4\) but the last",
    ),
    "labels-float": ({"labels": t(3)}, "labels is fp32; it must be int32 or int64"),
    "reduction": ({"reduction": "average"}, "reduction is 'average'; it must be one of none, mean, sum"),
    "bias-list": ({"bias": [0.0] * 5}, "bias is a list; it must be a torch.Tensor"),
    "bias-shape": ({"bias": t(4)}, r"bias is torch.float32 \(4,\); it must be \(classes,\) for weight, torch.float32 \(5, 4\)"),
    "bias-dtype": ({"bias": t(5, dtype=torch.bfloat16)}, r"bias is torch.bfloat16 \(5,\); it must be \(classes,\)"),
    "class_weight": ({"class_weight": t(4)}, r"^class_weight has shape \(4,\); it must be \(classes,\) = \(5,\)"),
    "class_weight-grad": ({"class_weight": t(5).requires_grad_()}, "class_weight requires a gradient, which it does not have"),
    "softcap": ({"softcap": 0}, "softcap is 0.0; it must be a positive number or None"),
    "softcap-text": ({"softcap": "30"}, "softcap is '30'; it must be a number"),
    "z_loss-text": ({"z_loss": [1]}, r"z_loss is \[1\]; it must be a number"),
    "logits-bytes": ({"logits_bytes": 1.5}, "logits_bytes is 1.5; it must be an int, at least 0"),
    "smoothing": ({"label_smoothing": 2}, "^label_smoothing is 2.0; it must be finite, from 0.0 to 1.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(InvalidProblem, match=message):
        ops.linear_cross_entropy(**{"x": t(3, 4), "weight": t(5, 4), "labels": t(3, dtype=torch.int64), **arguments})


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("source", [0, 1], ids=["x", "weight"])
def test_second_derivatives_refuse(source: int, compiles: bool) -> None:
    """Though the backward keeps neither x nor weight, which would cost their memory."""
    x, weight, labels = draw(torch.device("cpu"), 6, 8, 300)
    function: Any = torch.compile(ops.linear_cross_entropy, backend="eager") if compiles else ops.linear_cross_entropy
    expected = torch.autograd.grad(function(x, weight, labels), (x, weight))
    factors = [torch.ones((), requires_grad=True) for _ in range(2)]
    loss = function(x * factors[0], weight * factors[1], labels)
    grads = torch.autograd.grad(loss, (x, weight), create_graph=True)
    for got, plain in zip(grads, expected, strict=True):
        assert torch.equal(got, plain)
    with pytest.raises(NotSupported, match="gradients of gradients"):
        torch.autograd.grad(grads[0].square().sum() + (x * factors[source]).sum(), factors[source])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivatives_by_the_bias_refuse(reduction: str) -> None:
    function, _, leaves = draw_more(torch.device("cpu"), (6, 8, 300), torch.float32, ("bias",))
    factor = torch.ones((), requires_grad=True)
    grads = torch.autograd.grad(function(*leaves[:2], leaves[2] * factor, reduction=reduction).sum(), leaves, create_graph=True)
    with pytest.raises(NotSupported, match="gradients of gradients"):
        torch.autograd.grad(grads[0].square().sum(), factor)
