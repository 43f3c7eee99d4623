"""The API pages of the site: what stands on each, as text for mkdocstrings. It imports nothing but names' own tables."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flashtile.compat.trees import TREES

ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """A heading (none for the page's own), what is said below it, and names of one package."""

    heading: str
    package: str
    names: tuple[str, ...]
    text: str = ""


API: dict[str, tuple[str, tuple[Part, ...]]] = {
    "api": ("Attention", (Part("", "flashtile", (
        "attention", "attention_varlen", "attention_qkvpacked", "attention_kvpacked", "Options", "Dropout", "dropout_mask",
        "Statistics", "Mass", "qk_clip", "quantize", "Quantized", "explain", "use_tuning", "AttentionProblem",
        "InvalidProblem", "NotSupported", "cache_info", "cache_clear",
    )),)),
    "masks": ("Masks and score modifiers", (Part("", "flashtile", (
        "Band", "Document", "Prefix", "Chunked", "Dilated", "TopLeft", "Tree", "KeyPadding", "Stored", "Blocks", "Predicate",
        "Softcap", "Alibi", "Bias", "Score", "Captured", "Position",
    )),)),
    "caches": ("Caches and merging", (Part("", "flashtile", ("attention_cached", "append_to_cache", "PagedCache", "merge")),)),
    "ranks": ("Sequences that ranks share", (Part("", "flashtile.distributed", (
        "attention", "attention_varlen", "Context", "shard", "unshard", "position_ids", "document_ids", "padded_length",
    )),)),
    "ops": ("Ops and modules", (
        Part("", "flashtile.ops", (
            "layer_norm", "rms_norm", "Dropout", "Branch", "Subset", "rotary", "softmax", "cross_entropy",
            "linear_cross_entropy", "linear_act", "mlp",
        )),
        Part("Modules", "flashtile.nn", ("Attention", "LayerNorm", "RMSNorm", "MLP", "CrossEntropyLoss")),
    )),
    "jax": ("JAX", (
        Part("", "flashtile.jax", (
            "dot_product_attention", "dot_product_attention_varlen", "dot_product_attention_sharded", "shard_order",
            "shard_positions", "mha", "attention_cached", "append_to_cache", "layer_norm", "rms_norm", "rotary",
            "cross_entropy", "linear_cross_entropy", "softmax", "target",
        )),
        Part("flax", "flashtile.jax.flax", ("dot_product_attention",)),
    )),
    "integrations": ("Libraries that call attention", (
        Part("transformers", "flashtile.integrations.transformers", ("register",)),
        Part("diffusers", "flashtile.integrations.diffusers", ("register",)),
        Part("torchtitan", "flashtile.integrations.torchtitan", ("kernel",)),
        Part("Megatron-LM", "flashtile.integrations.megatron", ("DotProductAttention",)),
        Part("PyTorch's SDPA", "flashtile.integrations.sdpa", ("register",)),
        Part("ONNX", "flashtile.integrations.onnx", ("translations",)),
        Part("vLLM", "flashtile.integrations.vllm", ("register",)),
    )),
}  # fmt: skip
MEMBERS = {
    "AttentionProblem": ("parse", "spell", "flops", "bytes"),
    "Band": ("show",),
    "Blocks": ("build", "from_block_mask", "from_flex", "padded", "density"),
    "Context": ("explain",),
    "PagedCache": ("append", "attention", "dense"),
    "Predicate": ("apply", "scalars", "tensors", "check", "along", "broadcast", "grain"),
    "Quantized": ("tensors", "scales"),
    "Score": ("apply", "apply_jax", "scalars", "tensors", "captured", "check", "by_distance"),
    "Attention": ("forward",),
    "LayerNorm": ("forward",),
    "RMSNorm": ("forward",),
    "MLP": ("forward",),
    "CrossEntropyLoss": ("forward",),
}

# Modules of flashtile.compat that are called by their own names, and what each offers beside what `install` puts elsewhere.
CALLED = {
    "sdpa": ("scaled_dot_product_attention", "Override"),
    "flex": ("flex_attention",),
    "triton_tutorial": ("attention",),
    "cudnn": ("attention_kvpacked_padded",),
    "fused_softmax": (
        "FusedScaleMaskSoftmax", "scaled_masked_softmax", "scaled_upper_triang_masked_softmax",
        "scaled_masked_softmax_forward", "scaled_masked_softmax_backward", "scaled_upper_triang_masked_softmax_forward",
        "scaled_upper_triang_masked_softmax_backward",
    ),
    "fused_dense": (
        "linear_bias_forward", "linear_bias_wgrad", "linear_bias_backward", "linear_bias_residual_backward",
        "linear_gelu_forward", "linear_act_forward", "linear_gelu_linear_backward", "linear_residual_gelu_linear_backward",
    ),
    "hub": ("flash_attn_func", "flash_attn_varlen_func"),
}  # fmt: skip
COMPAT = {
    "compat": ("Other libraries' names", (
        "xformers", "xformers_bias", "xformers_paged", "xformers_items", *(name for name in CALLED if name != "fused_dense"),
    )),
    "compat-flash-attn": ("flash-attention's names", (
        "flash_attn", "flash_attn_passes", "flash_attn_1", "blocksparse", "flash_attn_3", "flash_attn_4",
        "bert_padding", "mha", "rotary", "cross_entropy", "layer_norm", "fused_dense",
    )),
    "compat-inference": ("flashinfer's, FlashMLA's, ring-flash-attn's and jvp_flash_attention's names", (
        "flashinfer", "flashinfer_mla", "flashinfer_shared", "flash_mla", "ring_flash_attn", "jvp_flash_attention",
    )),
}  # fmt: skip


def offered(module: str) -> tuple[str, ...]:
    """What a module of flashtile.compat offers to callers, in its order: what `install` takes of it, and what is called."""
    sources = [source for tree in TREES.values() for place in tree.values() for source in place]
    taken = [entry.rpartition("=")[2].partition(".")[0] for home, names in sources if home == module for entry in names]
    return tuple(dict.fromkeys((*taken, *CALLED.get(module, ()))))


def told(module: str, name: str) -> bool:
    """Whether a name of a module of flashtile.compat has a docstring, there or where that module has it from."""
    for part in parsed(module).body:
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name == name:
            return ast.get_docstring(part) is not None
        if isinstance(part, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in part.names):
            package, _, other = (part.module or "").rpartition(".")
            return package == "flashtile.compat" and told(other, name)
    return False


def parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / "flashtile" / "compat" / f"{module}.py").read_text(encoding="utf-8"))


def parts_of(modules: Iterable[str]) -> Iterable[Part]:
    """A part for each module: names with docstrings are shown with them, the others named in a sentence."""
    for module in modules:
        shown = tuple(name for name in offered(module) if not name.startswith("_") and told(module, name))
        rest = [f"`{name}`" for name in offered(module) if name not in shown]
        also = f"\n\nAlso here: {', '.join(rest)}." if rest else ""
        text = (ast.get_docstring(parsed(module)) or "") + also
        yield Part(f"`flashtile.compat.{module}`", f"flashtile.compat.{module}", shown, text)


def written(title: str, parts: Iterable[Part]) -> str:
    """A page's text."""
    lines = [f"# {title}\n"]
    for part in parts:
        lines += [f"## {part.heading}\n"] if part.heading else []
        lines += [part.text + "\n"] if part.text else []
        for name in part.names:
            members = "".join(f"\n        - {member}" for member in MEMBERS.get(name, ()))
            options = f"\n    options:\n      members:{members}" if members else ""
            lines.append(f"::: {part.package}.{name}{options}\n")
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Every API page's text, by its name."""
    made = {page: written(title, parts) for page, (title, parts) in API.items()}
    for page, (title, modules) in COMPAT.items():
        first = [Part("", "flashtile.compat", ("install", "uninstall"))] if page == "compat" else []
        made[page] = written(title, [*first, *parts_of(modules)])
    return made
