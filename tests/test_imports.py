"""What an import costs and needs, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "triton", "numpy", "jax", "matplotlib", "rich", "typer")


def fresh(code: str, **environment: str) -> str:
    """What a new interpreter prints; the test fails with its traceback where it fails."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", **environment}
    command = [sys.executable, "-c", code]
    with TemporaryDirectory() as empty:  # where it stands is on its path
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=empty, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_under(*packages: str) -> list[str]:
    """Every module of some packages of flashtile."""
    assert all((ROOT / "flashtile" / package / "__init__.py").is_file() for package in packages), packages
    paths = [path for package in packages for path in sorted((ROOT / "flashtile" / package).rglob("*.py"))]
    return [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in paths]


LIGHT = ["flashtile", "flashtile.errors", "flashtile.memory", *modules_under("problem", "plan")]


def test_light_modules_import_the_standard_library_alone() -> None:
    code = f"""
import sys
from importlib import import_module
for module in {LIGHT!r}:
    import_module(module)
    heavy = [m for m in {HEAVY!r} if m in sys.modules]
    assert not heavy, f"{{module}} loads {{heavy}}"
"""
    fresh(code)


def test_every_public_name_is_lazy_and_there() -> None:
    code = """
import sys, flashtile
light = {"AttentionProblem", "Band", "Captured", "InvalidProblem", "NotSupported", "Options", "Position", "Score"}
assert light <= set(flashtile.__all__) <= set(dir(flashtile))
for name in sorted(light):
    getattr(flashtile, name)
assert "torch" not in sys.modules and "triton" not in sys.modules, "a light name loaded a heavy module"
from importlib import import_module
from types import ModuleType
for home in flashtile._HOMES.values():
    import_module(home, "flashtile")
for name in flashtile.__all__:
    assert not isinstance(getattr(flashtile, name), ModuleType), f"{name} is hidden by the module of that name"
    assert getattr(flashtile, name).__module__.startswith("flashtile."), name
try:
    flashtile.no_such_name
except AttributeError as error:
    assert "no attribute 'no_such_name'" in str(error)
else:
    raise SystemExit("an unknown name was found")
"""
    fresh(code)


def test_public_names_and_their_homes_agree() -> None:
    import flashtile

    assert sorted(flashtile.__all__) == sorted(flashtile._HOMES)


def test_dispatch_plans_without_torch() -> None:
    code = """
import sys
from flashtile import AttentionProblem, dispatch
from flashtile.plan.backend import Gradients
from flashtile.plan.device import named
problem = AttentionProblem.parse("attention(q=2x100x4x64,kv=200x2x64,bf16,band=:0)")
dispatch.select(problem, named("cpu"))
for target in ("sm80", "sm90", "gfx942"):
    plan = dispatch.plan_forward(problem, named(target))
    dispatch.plan_backward(problem, named(target), Gradients())
    assert plan.problem == problem
assert "torch" not in sys.modules, "planning loaded torch"
"""
    fresh(code)


@pytest.mark.parametrize("score", ["softcap(30.0)", "alibi(2x4:fp32:grad)", "alibi(2x4:fp32)+softcap(2.0)"])
def test_a_spelling_finds_the_library_s_modifiers_by_itself(score: str) -> None:
    fresh(f"""
from flashtile import AttentionProblem, InvalidProblem
text = "attention(q=2x100x4x64,kv=200x2x64,bf16,score={score})"
assert AttentionProblem.parse(text).spell() == text
try:
    AttentionProblem.parse(text.replace("{score}", "nocap()"))
except InvalidProblem as error:
    assert str(error) == "score modifier is 'nocap'; known are alibi, bias, relative, softcap.", error
""")


def test_without_torch_the_cpu_backend_says_so() -> None:
    code = """
import sys
sys.modules["torch"] = None
import flashtile
from flashtile import dispatch
from flashtile.plan.device import CPU
problem = flashtile.AttentionProblem.parse("attention(q=1x9x2x16,kv=9x2x16,fp16)")
assert dispatch.backend_named("cpu").unsupported(problem, CPU) == ["PyTorch is not installed"]
try:
    flashtile.explain(problem)
except flashtile.NotSupported as refusal:
    print(refusal)
"""
    assert "\n  cpu: PyTorch is not installed\n" in fresh(code) + "\n"


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, flashtile
q = torch.randn(1, 9, 2, 16, requires_grad=True)
slopes = torch.rand(2, requires_grad=True)
score = (flashtile.Softcap(3.0), flashtile.Alibi(slopes))
for options in (None, flashtile.Options(backend="cpu")):
    out, lse = flashtile.attention(q, q, q, causal=True, score=score, return_lse=True, options=options)
    (out.sum() + lse.sum()).backward()
assert out.isfinite().all() and q.grad.isfinite().all() and slopes.grad.isfinite().all()

class Near(flashtile.Score):
    name = "near"
    @staticmethod
    def apply(score, at, scalars, tensors):
        return score - (at.q - at.k).abs().to(score.dtype)

class Stripes(flashtile.Predicate):
    name = "stripes"
    @staticmethod
    def apply(at, scalars, tensors):
        return (at.q - at.k) // 2 % 2 == 0

own = flashtile.attention(q, q, q, score=Near(), mask=Stripes() & flashtile.Band(right=0))
ahead = (torch.arange(9)[:, None] - torch.arange(9))
added = torch.where((ahead >= 0) & (ahead // 2 % 2 == 0), -ahead.abs().float(), -torch.inf)
heads = q.transpose(1, 2)
theirs = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=added)
assert torch.allclose(own.transpose(1, 2), theirs, atol=1e-6)
try:
    flashtile.attention(q, q, q, options=flashtile.Options(backend="triton"))
except flashtile.NotSupported as refusal:
    print(refusal)
"""


def test_without_triton_the_cpu_backend_works_and_the_other_says_why_not() -> None:
    assert "triton: Triton is not installed" in fresh(WITHOUT_TRITON)


def test_with_triton_but_no_gpu_the_cpu_backend_is_chosen() -> None:
    code = """
import torch, flashtile
from flashtile import dispatch
from flashtile.plan.device import CPU
q = torch.randn(1, 9, 2, 16)
flashtile.attention(q, q, q)
print(dispatch.plan_forward(flashtile.AttentionProblem.parse("attention(q=1x9x2x16,kv=9x2x16,fp32,tf32x3)"), CPU).backend)
try:
    flashtile.attention(q, q, q, options=flashtile.Options(backend="triton"))
except flashtile.NotSupported as refusal:
    print(refusal)
"""
    printed = fresh(code).splitlines()
    assert printed[0] == "cpu"
    assert "triton: tensors are on the CPU; these kernels need a GPU" in printed[2]


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, flashtile.cli; print([m for m in ('torch', 'triton', 'matplotlib') if m in sys.modules])"
    assert fresh(code).strip() == "[]"


def test_the_ops_work_without_triton() -> None:
    fresh("""
import sys
sys.modules["triton"] = None
import torch
from flashtile import compat, nn, ops
from flashtile.compat import cross_entropy, fused_dense, fused_softmax, layer_norm, rotary
x = torch.randn(3, 8, requires_grad=True)
labels = torch.tensor([1, 2, -100])
loss = ops.cross_entropy(nn.MLP(8)(ops.softmax(ops.rms_norm(x, residual=x))), labels)
loss.backward()
assert x.grad.isfinite().all()
""")


@pytest.mark.skipif(not (ROOT / ".venv" / "jax" / "jax").is_dir(), reason="there is no JAX beside PyTorch")
def test_jax_runs_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import jax, jax.numpy as jnp
import flashtile, flashtile.jax as ours
jax.config.update("jax_platforms", "cpu")
q = jnp.ones((1, 9, 2, 16))
dq = jax.grad(lambda q: ours.dot_product_attention(q, q, q, is_causal=True).sum())(q)
x, weight = jnp.ones((3, 16)), jnp.ones(16)
dx = jax.grad(lambda x: ours.rms_norm(x, weight).sum())(x)
assert jnp.isfinite(dq).all() and jnp.isfinite(dx).all()
try:
    ours.dot_product_attention(q, q, q, implementation="triton")
except flashtile.NotSupported:
    print("refused")
"""
    assert fresh(code, PYTHONPATH=f"{ROOT}:{ROOT / '.venv' / 'jax'}") == "refused\n"


def test_companions_plan_without_torch() -> None:
    code = """
import sys
from flashtile.kernels.ops.catalogue import OPS
from flashtile.plan.op import plan_backward, plan_forward
from flashtile.plan.device import named
from flashtile.problem.op import Companion
for text in ("norm(x=9x64:bf16,weight=64:bf16)", "cross_entropy(logits=9x64:bf16,labels=9:int64)", "softmax(x=1x2x9x64:fp32)",
             "rotary(q=1x9x2x64:bf16,cos=9x32:fp32,sin=9x32:fp32)", "dense(x=9x64:bf16,weight1=32x64:bf16)"):
    problem = Companion.parse(text)
    for target in ("sm80", "sm90", "gfx942"):
        op, wanted, arriving = OPS[problem.op], frozenset(problem.differentiable[:1]), frozenset(problem.public())
        plan_forward(op, problem, named(target), "triton", True)
        plan_backward(op, problem, named(target), "triton", wanted, arriving)
assert "torch" not in sys.modules, "planning loaded torch"
"""
    fresh(code)


@pytest.mark.parametrize(("change", "told"), [
    ("import sys; sys.modules['triton.experimental.gluon'] = None", "halted"),
    ("from triton.experimental.gluon.language.nvidia import hopper; del hopper.warpgroup_mma", "no attribute 'warpgroup_mma'"),
    ("import triton; triton.__version__ = '3.10.0+git1'", "it is newer than 3.9, the last release that has compiled them"),
])  # fmt: skip
def test_a_gluon_that_differs_is_a_reason_and_no_crash(change: str, told: str) -> None:
    code = f"""
{change}
import warnings
from flashtile import AttentionProblem, NotSupported, dispatch
from flashtile.plan.device import H100
problem = AttentionProblem.parse("attention(q=2x1024x8x128,kv=1024x8x128,bf16)")
with warnings.catch_warnings(record=True) as told:
    print(dispatch.select(problem, H100).name, dispatch.select(problem, H100, None, "auto").name)
print(len(told), "Slower ones take the place of Hopper's." in str(told[0].message))
try:
    dispatch.select(problem, H100, "hopper")
except NotSupported as refusal:
    print(refusal)
"""
    pytest.importorskip("triton")
    told_first, warned, *rest = fresh(code).splitlines()
    assert (told_first, warned) == ("triton triton", "1 True")
    assert "'s Gluon differs from the one these kernels are written in: " in rest[-1]
    assert told in rest[-1]


def test_a_kernel_file_that_is_damaged_is_not_laid_to_triton() -> None:
    """A file of ours that does not parse, as one with a merge's marks: its own error, for slower kernels would hide it."""
    code = """
import importlib.abc, sys
class Damaged(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "flashtile.kernels.sm90.forward.kernel":
            raise SyntaxError("invalid syntax (kernel.py, line 375)")
sys.meta_path.insert(0, Damaged())
from flashtile import AttentionProblem, dispatch
from flashtile.plan.device import H100
try:
    dispatch.select(AttentionProblem.parse("attention(q=2x1024x8x128,kv=1024x8x128,bf16)"), H100)
except SyntaxError as error:
    print(error)
"""
    pytest.importorskip("triton")
    assert fresh(code).splitlines() == ["invalid syntax (kernel.py, line 375)"]


def test_whoever_switches_triton_s_interpreter_on_gets_bfloat16() -> None:
    """Whose arithmetic Triton's own is not: `flashtile.triton_glue.interpreter`."""
    pytest.importorskip("triton")
    code = """
import torch
from flashtile import Options, attention
for dtype in (torch.bfloat16, torch.float32):
    given = [torch.randn(1, 40, 2, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    def step(backend):
        out = attention(*given, causal=True, options=Options(backend=backend, backward="split"))
        return out, *torch.autograd.grad(out.float().square().sum(), given)
    off = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for a, b in zip(step("triton"), step("cpu")):
        torch.testing.assert_close(a, b, rtol=off, atol=off)
"""
    fresh(code, TRITON_INTERPRET="1")


def test_an_op_of_plain_tensors_imports_nothing_of_dtensors() -> None:
    """Which takes a tenth of a second."""
    code = "import sys, torch; from flashtile import ops; ops.layer_norm(torch.randn(4, 16), torch.ones(16))"
    assert fresh(f"{code}; print('torch.distributed.tensor' in sys.modules)").strip() == "False"


def test_attention_loads_no_sympy() -> None:
    """PyTorch loads it for sizes that are symbols; with it the first call of a process took 0.46 s of a core longer."""
    pytest.importorskip("torch")
    fresh("""
import sys, torch, flashtile
q = torch.zeros(1, 8, 1, 8, requires_grad=True)
flashtile.attention(q, q, q).sum().backward()
assert "sympy" not in sys.modules
""")


def test_triton_digests_itself_once_in_a_thread() -> None:
    """`digest_ahead` begins what the first look for a kernel on disk waits for."""
    pytest.importorskip("triton")
    fresh("""
from triton.runtime.cache import triton_key
from flashtile.triton_glue import language
for _ in range(2):
    language.digest_ahead()
with language.compiling("cuda"):
    assert triton_key.cache_info().currsize == 1
triton_key()
assert triton_key.cache_info().misses == 1
""")


def test_a_kernel_s_key_on_disk_is_the_same_whatever_was_looked_for_before() -> None:
    """By KEY_BY_ORDER in `workarounds.py`; constants of one name, which Triton sorts by their modules' addresses, are equal."""
    pytest.importorskip("triton")
    fresh("""
from flashtile.kernels.portable.backward import attention_backward_queries as queries
from flashtile.kernels.sm90.backward.kernel import attention_backward as backward
from flashtile.kernels.sm90.forward.kernel import attention_forward as forward
from flashtile.triton_glue.language import compiling, constexpr
for kernel in (forward, backward, queries):
    with compiling("cuda"):
        alone = kernel.cache_key
        kernel.hash = None  # what it calls is known now
        assert kernel.cache_key == alone, kernel
    known = [(name, value) for (name, _), (value, _) in kernel.used_global_vals.items()]
    constants = {(name, str(value)) for name, value in known if isinstance(value, constexpr)}
    assert len(constants) == len(dict(constants)), sorted(constants)
""")
