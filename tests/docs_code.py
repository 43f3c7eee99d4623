"""Runs the code that pages of the documentation show: `python -m tests.docs_code README.md`, in a folder of its own.

A block that needs a package which is not installed is left out, and said so; every other one must run. What a block does not
define itself is in `given`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ANSWERS = [page for page in sorted((ROOT / "docs" / "answers").glob("*.md")) if page.stem != "jax"]  # that one is tests/jax's
LAB = [page for page in sorted((ROOT / "docs" / "lab").glob("*.md")) if page.stem != "changes-0.2"]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for page in [*sorted((ROOT / "docs").glob("*.md")), *ANSWERS, *LAB]),
)
OURS = ("flashtile", "tests", "tools")


def blocks(page: str, language: str = "python") -> list[str]:
    """The blocks of a language, "" for unnamed ones."""
    found, inside = list[str](), None
    for line in (ROOT / page).read_text().splitlines(keepends=True):
        if line.startswith("```"):
            inside = line[3:].strip() if inside is None else None
            if inside == language:
                found.append("")
        elif inside == language:
            found[-1] += line
    return found


def inline(page: str) -> list[str]:
    """What stands between backquotes, outside of blocks."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return list(dict.fromkeys(re.findall(r"`([^`\n]+)`", text)))


def commands(page: str) -> Iterator[list[str]]:
    """The lines of unnamed blocks that call flashtile's command line, as words."""
    import shlex

    for block in blocks(page, ""):
        for line in block.splitlines():
            if line.startswith("flashtile "):
                yield shlex.split(re.split(r"\s{3,}", line)[0])[1:]


def missing(error: ImportError) -> str:
    """The package that is not installed; raises the error where it is one of ours, or is there."""
    name = (error.name or "").partition(".")[0]
    if not name or name in OURS or find_spec(name) is not None:
        raise error
    return name


def run(code: str, given: Callable[[str], dict[str, Any]]) -> str:
    """What happened: "ran", which package is missing, or what the block's first line says that it needs."""
    if code.startswith("# needs "):
        return code.partition(":")[0].removeprefix("# ")
    wanted = {alias for node in ast.walk(ast.parse(code)) for alias in _packages(node)}
    wanted -= set(re.findall(r'compat\.install\("(\w+)', code))  # whose names flashtile gives itself
    try:
        for package in sorted(wanted - set(OURS)):
            import_module(package)
        exec(compile(code, "<docs>", "exec"), given(code))
    except ImportError as error:
        return f"needs {missing(error)}"
    return "ran"


def _packages(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [node.module.partition(".")[0]] if isinstance(node, ast.ImportFrom) and node.module else []


def look_up(text: str) -> str:
    """What inline code is: "" for none of ours. Names must be there, imports must work, calls of constants must run."""
    import flashtile

    if re.match(r"(import|from) flashtile\b", text):
        return run(text, lambda _: {})
    dotted = re.match(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", text)
    first, *rest = dotted[0].split(".") if dotted else [""]
    behind = text[len(first) :][:1]
    ours = first == "flashtile" or first in flashtile.__all__
    if not ours or not (behind == "(" or (behind == "." and not first.startswith("attention"))):  # attention.c is a file
        return ""
    try:
        found: Any = flashtile if first == "flashtile" else getattr(flashtile, first)
        for name in rest:
            found = getattr(found, name) if hasattr(found, name) else found.__dataclass_fields__[name]
        tree = ast.parse(text, mode="eval")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if names == {"flashtile"}:  # what it takes is said whole
            eval(text, {"flashtile": flashtile})
    except SyntaxError:
        return "named"
    except ImportError as error:
        return f"needs {missing(error)}"
    return "there"


def given(code: str) -> dict[str, Any]:
    """What a block of docs/*.md and README.md does not define itself."""
    import torch

    import flashtile

    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    names: dict[str, Any] = dict(torch=torch, flashtile=flashtile, q=q, k=k, v=v, x=torch.randn(1, 6, 32))
    names["loss"] = lambda weight, sample: (weight * sample).sum()
    names["model"] = torch.nn.Linear(32, 32)
    if "AutoModelForCausalLM" in code:
        theirs: Any = import_module("transformers")
        config = theirs.LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        theirs.LlamaForCausalLM(config).save_pretrained("model")
        names |= dict(AutoModelForCausalLM=theirs.AutoModelForCausalLM, path="model")
    if "pipeline" in code:
        theirs = import_module("diffusers")
        made = theirs.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
        )  # fmt: skip
        pipeline = type("Pipeline", (), {"transformer": made, "__call__": lambda self, prompt: prompt})
        names |= dict(pipeline=pipeline(), prompt="")
    if "onnx" in code:
        names["model"] = flashtile.nn.Attention(32, 2, causal=True).eval()
    if "get_local_kernel" in code:
        subprocess.run([sys.executable, str(ROOT / "tools" / "make_kernel.py"), "attention"], check=True)
    return names


def given_answers(code: str) -> dict[str, Any]:
    """What blocks of docs/answers do not define themselves: tensors of two sequences, padding, and a cache."""
    import torch

    packed = "attention_varlen(" in code
    cached = "_pool" in code or "cache" in code
    shape = (64, 4, 16) if packed else (2, 1 if cached else 32, 4, 16)
    dtype = torch.bfloat16 if "quantize" in code else torch.float32
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=not cached and "quantize" not in code) for _ in range(3))
    if cached:
        k, v = k[:, :, :2], v[:, :, :2]
    lengths = torch.tensor([20, 32], dtype=torch.int32)
    names = given(code) | dict(q=q, k=k, v=v, lengths=lengths, attention_mask=torch.arange(32) < lengths[:, None])
    names |= dict(cu_seqlens=torch.tensor([0, 20, 64], dtype=torch.int32), used=torch.tensor([5, 9], dtype=torch.int32))
    first = 3 if "shared_prefix" in code else 4  # else two empty items would write into one page
    names |= dict(table=torch.tensor([[3, 7, 1], [first, 2, 6]], dtype=torch.int32))
    names |= {pool: torch.randn(8, 4, 2, 16) for pool in ("k_pool", "v_pool")}
    names |= {draft: torch.randn(2, 2, 4 if draft == "q2" else 2, 16) for draft in ("q2", "k2", "v2")}
    return names


def given_jax(code: str) -> dict[str, Any]:
    """What a block of docs/jax.md does not define itself."""
    import jax
    import jax.numpy as jnp

    import flashtile
    from flashtile.jax import dot_product_attention

    q, k, v = (jax.random.normal(jax.random.key(i), (1, 256, 2, 64), jnp.bfloat16) for i in range(3))
    names: dict[str, Any] = dict(jax=jax, jnp=jnp, flashtile=flashtile, q=q, k=k, v=v)
    names["dot_product_attention"] = dot_product_attention
    names |= dict(bias=jnp.zeros((1, 2, 256, 256)), sinks=jnp.zeros(2), shapes=(q,), f=lambda q: dot_product_attention(q, q, q))
    names["block"] = names["f"]
    if "lengths" in code:
        names["lengths"] = jnp.array([200])
    if "nn." in code:
        names["nn"] = import_module("flax.linen")
    if "torch" in code:
        names["torch"] = import_module("torch")
        names["tensor"] = names["torch"].zeros(1)
    return names


def run_page(page: str) -> None:
    """Print what happened to each block, and what inline code is."""
    known = given_answers if page.startswith("docs/answers/") else given
    modifier = re.compile(r"^@triton\.jit", re.MULTILINE)  # Triton reads sources from files
    for number, block in enumerate(blocks(page)):
        if "strides[" in block and "def " not in block:
            print("a line of a kernel")
        elif modifier.search(block):
            Path(f"block_{number}.py").write_text(block.partition("\nout = ")[0])
            sys.path.insert(0, ".")
            code = f"from block_{number} import *\nout = " + block.partition("\nout = ")[2]
            print(run(code, known))
        else:
            print(run(block, known))
    for text in inline(page):
        if told := look_up(text):
            print(f"{told}: {text}")
    print(f"{page}: done")


if __name__ == "__main__":
    for page in sys.argv[1:]:
        run_page(page)
