"""Other libraries' names give what they say, against plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashtile import InvalidProblem, NotSupported
from flashtile.compat import cross_entropy, fused_dense, fused_softmax, layer_norm, rotary

close = torch.testing.assert_close


def draw(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("rms", [False, True])
def test_layer_norm_fn(rms: bool) -> None:
    x, residual, x1, w, b, w1, b1 = draw((2, 3, 16), (2, 3, 16), (2, 3, 16), (16,), (16,), (16,), (16,))

    def norm(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        if rms:
            return F.rms_norm(h, (16,), w, 1e-6) + (0 if b is None else b)
        return F.layer_norm(h, (16,), w, b, 1e-6)

    fn: Any = layer_norm.rms_norm_fn if rms else layer_norm.layer_norm_fn
    close(fn(x, w, b), norm(x, w, b))
    out, h = fn(x, w, None, residual, prenorm=True)
    close((out, h), (norm(x + residual, w, None), x + residual))
    out, out1, h = fn(x, w, b, residual, x1, w1, b1, prenorm=True)
    close((out, out1, h), (norm(x + x1 + residual, w, b), norm(x + x1 + residual, w1, b1), x + x1 + residual))
    out, h, mask, mask1 = fn(x, w, b, residual, x1, dropout_p=0.4, prenorm=True, return_dropout_mask=True)
    close(h, x * mask / 0.6 + x1 * mask1 / 0.6 + residual)
    close(out, norm(h, w, b))
    assert fn(x.half(), w, b, residual_in_fp32=True, prenorm=True)[1].dtype == torch.float32
    with torch.no_grad():
        given = torch.empty_like(x), torch.empty_like(x)
        assert fn(x, w, b, prenorm=True, out=given[0], residual_out=given[1])[0] is given[0]
        close(given, (norm(x, w, b), x))
    with pytest.raises(NotSupported, match="out and residual_out with gradients"):
        fn(x, w, b, out=torch.empty_like(x))


def test_dropout_add_layer_norm() -> None:
    x0, residual, x1, w, b, scale = draw((5, 16), (5, 16), (5, 16), (16,), (16,), (16,))
    rowscale = torch.rand(5)
    z, x, mask = layer_norm.dropout_add_layer_norm(
        x0, residual, w, b, 0.3, 1e-5, rowscale, scale, True, return_dropout_mask=True
    )
    close(x, x0 * rowscale[:, None] * mask / 0.7 * scale + residual)
    close(z, F.layer_norm(x, (16,), w, b))
    assert mask.dtype == torch.uint8
    close(layer_norm.dropout_add_rms_norm(x0, residual, w, None, 0.0, 1e-5), F.rms_norm(x0 + residual, (16,), w, 1e-5))
    (z0, none, h) = layer_norm.dropout_add_layer_norm_parallel_residual(x0, x1, residual, w, b, None, None, 0.0, 1e-5, True)
    assert none is None
    close((z0, h), (F.layer_norm(x0 + x1 + residual, (16,), w, b), x0 + x1 + residual))
    subset, out_subset = torch.tensor([2, 0, 5, 1], dtype=torch.int32), torch.tensor([0, 1, 2, 0], dtype=torch.int32)
    z, h = layer_norm.dropout_add_layer_norm_subset(
        x0,
        residual[:4],
        w,
        b,
        0.0,
        1e-5,
        x0_subset=subset,
        out_subset=out_subset,
        rowscale_const=2.0,
        out_numrows=2,
        prenorm=True,
    )
    close(h, torch.stack([2 * x0[1], 0 * x0[0], 2 * x0[4], 2 * x0[0]]) + residual[:4])
    close(z, F.layer_norm(h, (16,), w, b)[1:3])
    deep = torch.randn(3, 2, 16)  # as flash-attention's models have it: some items of a batch, each with all its tokens
    items = torch.tensor([0, 1, 2, 0, 0, 0, 5, 6, 3, 4], dtype=torch.int32)
    out_items = torch.tensor([1, 2, 0, 0, 0, 0, 0, 0, 3, 4], dtype=torch.int32)
    around = torch.randn(5, 2, 16)
    z, h, mask = layer_norm.dropout_add_layer_norm_subset(
        deep, around, w, b, 0.5, 1e-5, x0_subset=items, out_subset=out_items, out_numrows=4, prenorm=True,
        return_dropout_mask=True,
    )  # fmt: skip
    assert mask.shape == deep.shape
    true = around.clone().flatten(0, 1)
    for row, item in enumerate(items.tolist()):
        if item:
            true[row] += 2 * (deep * mask).flatten(0, 1)[item - 1]
    close(h, true.unflatten(0, (5, 2)))
    close(z, F.layer_norm(true, (16,), w, b)[[0, 1, 8, 9]].unflatten(0, (2, 2)))
    assert 0 < mask.float().mean() < 1
    module = layer_norm.DropoutAddLayerNorm(16, prenorm=True, p=0.5).eval()
    close(module(x0, residual), (F.layer_norm(x0 + residual, (16,)), x0 + residual))


def test_cross_entropy() -> None:
    (logits,), labels = draw((6, 33)), torch.randint(33, (6,))
    labels[2] = -100
    leaf = logits.requires_grad_()
    losses, z = cross_entropy.cross_entropy_loss(leaf, labels, label_smoothing=0.1, lse_square_scale=0.01)
    lse = logits.logsumexp(1)
    close(z, torch.where(labels == -100, 0.0, 0.01 * lse.square()))
    expected = F.cross_entropy(leaf, labels, label_smoothing=0.1, reduction="none")
    close(losses, expected + z)
    for reduction in ("mean", "sum", "none"):
        module = cross_entropy.CrossEntropyLoss(reduction=reduction, label_smoothing=0.1)
        close(module(logits, labels), F.cross_entropy(logits, labels, label_smoothing=0.1, reduction=reduction))
    with pytest.raises(InvalidProblem, match="reduction is 'batchmean'; it must be one of none, mean, sum"):
        cross_entropy.CrossEntropyLoss(reduction="batchmean")
    close(cross_entropy.SoftmaxCrossEntropyLossFn.apply(logits, labels, 0.1), expected)
    made, got = cross_entropy.forward(logits, labels, 0.1)
    close((made, got), (expected, lse))
    grad_loss = torch.randn(6)
    (true,) = torch.autograd.grad(expected, leaf, grad_loss)
    close(cross_entropy.backward(grad_loss, logits.detach(), got, labels, 0.1, False), true)
    copy = logits.detach().clone()
    over = cross_entropy.backward(grad_loss, copy, got, labels, 0.1, True)
    close(over, true)
    assert over.data_ptr() == copy.data_ptr()


def test_rotary() -> None:
    angle = torch.rand(12, 4)
    cos, sin = angle.cos(), angle.sin()
    (x,) = draw((2, 7, 3, 10))

    def turn(x: torch.Tensor, start: int = 0) -> torch.Tensor:
        c, s = (t[start : start + x.shape[1], None] for t in (cos, sin))
        a, b = x[..., :4], x[..., 4:8]
        return torch.cat([a * c - b * s, a * s + b * c, x[..., 8:]], -1)

    close(rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=3), turn(x, 3))
    close(rotary.apply_rotary(rotary.apply_rotary(x, cos, sin), cos, sin, conjugate=True), x)
    leaf = torch.randn(2, 7, 3, 3, 10, requires_grad=True)
    true = torch.stack([turn(leaf[:, :, 0]), turn(leaf[:, :, 1]), leaf[:, :, 2]], 2)
    weight = torch.randn_like(true)
    for tables in ((cos, sin), (cos, sin, cos, sin)):
        qkv = leaf * 1.0
        made = rotary.apply_rotary_emb_qkv_(qkv, *tables)
        close(made, true)
        close(
            torch.autograd.grad((made * weight).sum(), leaf)[0],
            torch.autograd.grad((true * weight).sum(), leaf, retain_graph=True)[0],
        )
    packed = torch.randn(2, 7, 6, 10)
    close(
        rotary.apply_rotary_emb_qkv_(packed.clone(), cos, sin, num_heads_q=2),
        torch.cat([turn(packed[:, :, :4]), packed[:, :, 4:]], 2),
    )
    kv = torch.randn(2, 7, 2, 3, 10)
    close(rotary.apply_rotary_emb_kv_(kv.clone(), cos, sin), torch.stack([turn(kv[:, :, 0]), kv[:, :, 1]], 2))
    for given in (leaf.detach().clone().requires_grad_(), leaf.detach().clone()):  # a leaf is written over all the same
        before = given.detach().clone()
        made = rotary.apply_rotary_emb_qkv_(given, cos, sin)
        close(made, true)
        close(given, true)
        if given.requires_grad:
            (grad,) = torch.autograd.grad((made * weight).sum(), given)
            close(grad, torch.autograd.grad((true * weight).sum(), leaf, retain_graph=True)[0])
            given = before.clone().requires_grad_()
            made = torch.compile(rotary.apply_rotary_emb_qkv_, backend="aot_eager", fullgraph=True)(given, cos, sin)
            close((made, given.detach()), (true, true))
            close(torch.autograd.grad((made * weight).sum(), given)[0], grad)
    with pytest.raises(InvalidProblem, match="num_heads_q is None and qkv has four axes"):
        rotary.apply_rotary_emb_qkv_(packed, cos, sin)
    one = x.clone().requires_grad_()
    close(rotary.apply_rotary_emb(one, cos, sin, inplace=True), turn(x))
    close(one.detach(), turn(x))
    x1, x2 = x[..., :4].clone(), x[..., 4:8].clone()
    rotary.rotary_emb_apply_rotary(x1, x2, cos[:7, None], sin[:7, None], x1, x2, False)
    close(torch.cat([x1, x2], -1), turn(x)[..., :8])


def test_fused_softmax() -> None:
    (x,), mask = draw((2, 3, 5, 8)), torch.rand(2, 1, 5, 8) < 0.4
    mask[0, 0, 1] = True
    leaf = x.requires_grad_()
    y = fused_softmax.scaled_masked_softmax(leaf, mask, 0.5)
    true = (0.5 * leaf).masked_fill(mask, -10000.0).softmax(-1).masked_fill(mask.all(-1, keepdim=True), 0.0)
    close(y, true)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(true, leaf, dy)
    kept = dy.clone()
    close(fused_softmax.scaled_masked_softmax_backward(dy, y, 0.5), dx)
    assert torch.equal(dy, kept)
    close(fused_softmax.scaled_masked_softmax_forward(x, mask.byte(), 0.5), true)
    square = torch.randn(3, 6, 6, requires_grad=True)
    above = torch.ones(6, 6, dtype=torch.bool).triu(1)
    true = (2.0 * square).masked_fill(above, -torch.inf).softmax(-1)
    close(fused_softmax.scaled_upper_triang_masked_softmax_forward(square, 2.0), true)
    dy = torch.randn(3, 6, 6)
    made = fused_softmax.scaled_upper_triang_masked_softmax_backward(dy, true.detach(), 2.0)
    close(made, torch.autograd.grad(true, square, dy, retain_graph=True)[0])
    module = fused_softmax.FusedScaleMaskSoftmax(False, True, "causal", True, None, True, 2.0)
    close(module(square, None), true)
    module = fused_softmax.FusedScaleMaskSoftmax(False, True, "padding", True, None, True, None)
    close(module(x, mask).sum(-1), (~mask.all(-1)).float().expand(2, 3, 5))


def test_fused_dense() -> None:
    x, w1, b1, w2, b2, dy = (t.requires_grad_() for t in draw((5, 8), (12, 8), (12,), (6, 12), (6,), (5, 6)))
    pre = F.linear(x, w1, b1)
    act = F.gelu(pre, approximate="tanh")
    out = F.linear(act, w2, b2)
    true = torch.autograd.grad(out, (x, w1, b1, w2, b2), dy.detach(), retain_graph=True)
    raw = [t.detach() for t in (x, pre, act, w1, w2, dy)]
    close(fused_dense.linear_gelu_forward(raw[0], raw[3], b1.detach(), True), [act.detach(), pre.detach()])
    close(fused_dense.linear_act_forward(raw[0], raw[3], b1.detach(), False, False), [pre.detach().relu()])
    close(fused_dense.linear_gelu_linear_backward(*raw), list(true))
    base = torch.randn(5, 8)
    made = fused_dense.linear_residual_gelu_linear_backward(*raw, base.clone())
    close(made[0], base + true[0])
    plain = torch.autograd.grad(F.linear(act, w2, b2), (act, w2, b2), dy.detach(), retain_graph=True)
    close(fused_dense.linear_bias_backward(raw[2], raw[4], raw[5]), list(plain))
    base = torch.randn(5, 12)
    close(fused_dense.linear_bias_residual_backward(raw[2], raw[4], raw[5], base.clone())[0], base + plain[0])
    close(fused_dense.linear_bias_forward(raw[2], raw[4], b2.detach()), out.detach())
    for level in (0, 1):
        close(fused_dense.fused_mlp_func(x, w1, w2, b1, b2, checkpoint_lvl=level), out)
    module = fused_dense.FusedMLP(8, 12, 6, return_residual=True)
    made = module(x)
    close(made, (module.fc2(F.gelu(module.fc1(x), approximate="tanh")), x))
    dense = fused_dense.FusedDense(8, 4, return_residual=True)
    close(dense(x), (F.linear(x, dense.weight, dense.bias), x))
    with pytest.raises(NotSupported, match="dense layers over a process group"):
        fused_dense.fused_dense_func(x, w1, process_group=object())


@pytest.mark.parametrize("level", [0, 1])
def test_fused_mlp_under_autocast(level: int) -> None:
    """In its dtype, as FusedDense is, whatever comes; gradients in that of the parameters."""
    module, before = fused_dense.FusedMLP(8, checkpoint_lvl=level), fused_dense.FusedDense(8, 8)
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        made = module(before(x)), module(x)
    low = copy.deepcopy(module).bfloat16()
    expected = low(F.linear(x.bfloat16(), before.weight.bfloat16(), before.bias.bfloat16())), low(x.bfloat16())
    assert [y.dtype for y in made] == [torch.bfloat16] * 2
    close(made, expected)
    leaves = (x, *module.parameters())
    grads = torch.autograd.grad(made[1].sum(), leaves)
    assert {g.dtype for g in grads} == {torch.float32}
    close(grads, tuple(g.float() for g in torch.autograd.grad(expected[1].sum(), (x, *low.parameters()))))


@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved: bool, scale_base: float | None) -> None:
    module = rotary.RotaryEmbedding(8, interleaved=interleaved, scale_base=scale_base)
    assert not module.state_dict()
    place = torch.arange(12.0)
    angle = place[:, None] * 10000.0 ** (-torch.arange(0, 8, 2.0) / 8)
    grown = torch.ones(12, 4)
    if scale_base is not None:
        grown = ((torch.arange(0, 8, 2.0) + 3.2) / 11.2) ** ((place - 6) / scale_base)[:, None]

    def turn(x: torch.Tensor, size: torch.Tensor, start: int) -> torch.Tensor:
        c, s = ((t * size)[start : start + x.shape[1], None] for t in (angle.cos(), angle.sin()))
        a, b = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
        turned = (a * c - b * s, a * s + b * c)
        return torch.cat([torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1), x[..., 8:]], -1)

    qkv = torch.randn(2, 7, 3, 3, 10)
    for offset in (0, torch.tensor([2, 5])):
        q, k, v = qkv.clone().unbind(2)
        starts = [0, 0] if isinstance(offset, int) else offset.tolist()
        true_q, true_k = (
            torch.cat([turn(t[i : i + 1], size, start) for i, start in enumerate(starts)])
            for t, size in ((q, grown), (k, 1 / grown))
        )
        made = module(qkv.clone(), seqlen_offset=offset, max_seqlen=12)
        close(made, torch.stack([true_q, true_k, v], 2), rtol=1e-4, atol=1e-5)
        made_q, made_kv = module(q.clone(), torch.stack([k, v], 2), seqlen_offset=offset, max_seqlen=12)
        close((made_q, made_kv), (true_q, torch.stack([true_k, v], 2)), rtol=1e-4, atol=1e-5)
    close(rotary.apply_rotary_emb_torch(q, angle.cos()[:7], angle.sin()[:7], interleaved), turn(q, torch.ones(12, 4), 0))
    with pytest.raises(InvalidProblem, match="seqlen_offset is a tensor and max_seqlen is None"):
        module(qkv, seqlen_offset=offset)


@pytest.mark.parametrize("rms", [False, True])
def test_plain_norms(rms: bool) -> None:
    """The names that flash-attention's own tests compare with, against its norms here."""
    x, residual, x1, w, b, w1 = draw((2, 3, 16), (2, 3, 16), (2, 3, 16), (16,), (16,), (16,))
    ref: Any = layer_norm.rms_norm_ref if rms else layer_norm.layer_norm_ref
    fn: Any = layer_norm.rms_norm_fn if rms else layer_norm.layer_norm_fn
    for upcast in (False, True):
        close(ref(x, w, b, upcast=upcast), fn(x, w, b))
        for made, true in zip(
            ref(x, w, b, residual, x1, w1, None, prenorm=True, zero_centered_weight=True, upcast=upcast),
            fn(x, w, b, residual, x1, w1, None, prenorm=True, zero_centered_weight=True), strict=True,
        ):  # fmt: skip
            close(made, true)
    scale = torch.rand(2, 3)
    out, mask = fn(x, w, b, dropout_p=0.4, rowscale=scale, return_dropout_mask=True)[:2]
    close(ref(x, w, b, dropout_p=0.4, rowscale=scale, dropout_mask=mask), out)
    with pytest.raises(InvalidProblem, match=r"dropout_p is 0\.4 and a dropout mask is None"):
        ref(x, w, b, dropout_p=0.4)
    dense, offset = torch.randn(5, 16), torch.randn(5)
    made = layer_norm.layer_norm_linear_fn(x, w, b, dense, offset, residual, prenorm=True, is_rms_norm=rms)
    true, summed = fn(x, w, b, residual, prenorm=True)
    close(made, (F.linear(true, dense, offset), summed))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer_norm.layer_norm_linear_fn(x, w, b, dense, offset).dtype == torch.bfloat16
    modules = layer_norm.RMSNorm(16), layer_norm.DropoutAddRMSNorm(16, prenorm=True)
    close(modules[0](x), F.rms_norm(x, (16,), eps=1e-5))
    close(modules[1](x, residual), (F.rms_norm(x + residual, (16,), eps=1e-5), x + residual))
    assert [name for name, _ in modules[1].named_parameters()] == ["weight"]


@pytest.mark.parametrize("how", [{"activation": "gelu_tanh"}, {"checkpoint_lvl": 3}])
def test_mlps_are_refused_by_the_names_there(how: dict[str, Any]) -> None:
    message = "activation is 'gelu_tanh'; it must be one of gelu_approx, relu, sqrelu|checkpoint_lvl is 3; it must be 0, 1 or 2"
    for make in (
        lambda: fused_dense.FusedMLP(8, **how),
        lambda: fused_dense.fused_mlp_func(*draw((3, 8), (9, 8), (8, 9)), **how),
    ):
        with pytest.raises(InvalidProblem, match=message):
            make()


def test_a_second_bias_needs_its_weight() -> None:
    x, w, b = draw((2, 16), (16,), (16,))
    for x1 in (None, x):
        with pytest.raises(InvalidProblem, match="bias1 is given without weight1"):
            layer_norm.layer_norm_fn(x, w, b, x1=x1, bias1=b)
