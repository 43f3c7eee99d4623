"""flashtile as a kernel of a hub: written by tools/make_kernel.py, loaded by the `kernels` package, called by transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

kernels = pytest.importorskip("kernels", reason="kernels is not installed")

import flashtile  # noqa: E402
from tests.test_imports import fresh  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
TOOL = ROOT / "tools" / "make_kernel.py"
VARIANTS = {"cpu", "cuda", "rocm"}


def make(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), str(folder)], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of a hub, somewhere that no path of Python's names."""
    folder = tmp_path_factory.mktemp("hub") / "attention"
    done = make(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_each_variant_says_what_it_holds(repository: Path) -> None:
    from kernels._rust import Digest, DigestAlgorithm

    names = {path.name for path in (repository / "build").iterdir()}
    assert names == {f"torch-{backend}" for backend in VARIANTS}
    for backend in VARIANTS:
        variant = repository / "build" / f"torch-{backend}"
        said = kernels.Metadata.read_from_file(variant / "metadata.json")
        assert (str(said.name), said.version, said.license, said.python_depends) == ("flashtile", 1, "Apache-2.0", [])
        assert str(said.backend.backend_type).lower() == backend
        assert said.id.isidentifier()
        assert said.id.startswith(f"_flashtile_{backend}_")
        assert "flashtile/plan/tuned/sm90.json" in said.digest.files
        if not list(variant.rglob("__pycache__")):  # no test has loaded it yet
            said.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_nothing_in_it_imports_flashtile_by_name(repository: Path) -> None:
    """All its modules, in a process where that name cannot be imported; its functions against torch's, with gradients."""
    fresh(f"""
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
sys.modules["flashtile"] = None
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
import kernels, torch
kernel = kernels.get_local_kernel(Path({str(repository)!r}))
assert kernels.get_local_kernel(Path({str(repository)!r})) is kernel
(loaded,) = kernels.get_loaded_kernels()
assert kernel.__name__ == loaded.metadata.id

found = [module.name for module in walk_packages(kernel.__path__, kernel.__name__ + ".")]
assert len(found) > 100
for name in found:
    import_module(name)

q = torch.randn(2, 9, 4, 16, requires_grad=True)
k, v = (torch.randn(2, 9, 2, 16, requires_grad=True) for _ in range(2))
sdpa = torch.nn.functional.scaled_dot_product_attention
theirs = sdpa(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)
starts = torch.tensor([0, 9, 18], dtype=torch.int32)
runs = [
    kernel.flash_attn_func(q, k, v, causal=True),
    kernel.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), starts, starts, 9, 9, causal=True).view(2, 9, 4, 16),
    torch.compile(kernel.flash_attn_func, fullgraph=True, backend="eager")(q, k, v, causal=True),
]
dout = torch.randn_like(theirs)
wanted = torch.autograd.grad(theirs, (q, k, v), dout)
for out in runs:
    torch.testing.assert_close(out, theirs)
    for gradient, expected in zip(torch.autograd.grad(out, (q, k, v), dout), wanted, strict=True):
        torch.testing.assert_close(gradient, expected)
try:
    paged = dict(block_table=starts[None], dropout_p=0.1)
    kernel.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), starts, starts, 9, 9, **paged)
except NotImplementedError as error:
    assert "attention over pages has no dropout" in str(error)
else:
    raise SystemExit("dropout was ignored")
""")


def test_it_stands_beside_an_installed_flashtile(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies, each with its own classes and operators; here without a GPU in Triton's interpreter, both of them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kernel = kernels.get_local_kernel(repository)
    its = sys.modules[f"{kernel.__name__}.flashtile"]
    assert its.__file__ is not None
    assert Path(its.__file__).is_relative_to(repository)
    assert its is not flashtile
    assert its.InvalidProblem is not flashtile.InvalidProblem
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(1, 5, 2, 16, device=device)
    sink = torch.randn(2, device=device)
    expected = flashtile.attention(q, q, q, causal=True, sink=sink)
    assert torch.equal(kernel.flash_attn_func(q, q, q, causal=True, s_aux=sink), expected)
    from flashtile.torch.routes.functional import ATTENTION

    assert str(ATTENTION) == "flashtile.attention.default"
    operator = sys.modules[f"{its.__name__}.torch.routes.functional"].ATTENTION
    assert str(operator) == f"{kernel.__name__}_flashtile.attention.default"


def test_transformers_calls_it_by_the_name_of_its_repository(repository: Path) -> None:
    """Causal with padding, a window and sinks: logits and gradients are eager's, where initializer_range lets mistakes show.

    transformers accepts a narrow range of releases of `kernels`, which here is widened to the one that is installed.
    """
    pytest.importorskip("transformers", reason="transformers is not installed")
    setting = {"HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"tiles/attention={repository}"}
    fresh(
        """
import sys
sys.modules["flashtile"] = None
import torch, kernels
from transformers.utils import import_utils
import_utils.is_kernels_available.__wrapped__.__defaults__ = (kernels.__version__, "999")
import transformers as hf

small = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, initializer_range=1.0, sliding_window=5, pad_token_id=0,
)
configs = hf.MistralConfig(**small), hf.GptOssConfig(**small, num_local_experts=2, num_experts_per_tok=1)
for config in configs:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    ids, mask = torch.randint(1, 64, (2, 13)), torch.ones(2, 13, dtype=torch.int64)
    mask[0, :4] = 0
    found = []
    for implementation in ("eager", "tiles/attention"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        logits.log_softmax(-1)[:, 7].sum().backward()
        found.append((logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert model.config._attn_implementation == "tiles/attention"
    (eager, expected), (ours, gradients) = found
    torch.testing.assert_close(ours, eager, rtol=2e-4, atol=2e-4 * eager.abs().max().item())
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        close = dict(rtol=1e-3, atol=1e-3 * gradient.abs().max().item() + 1e-6)
        torch.testing.assert_close(gradients[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **close)
(loaded,) = kernels.get_loaded_kernels()
assert loaded.metadata.id in sys.modules
""",
        **setting,
    )


def test_it_is_not_written_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    done = make(tmp_path)
    assert (done.returncode, done.stderr.strip()) == (1, f"{tmp_path} is not empty")
    assert os.listdir(tmp_path) == ["mine"]
