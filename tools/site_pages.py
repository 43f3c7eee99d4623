"""Pages of the site that are no files in docs: the front page, CONTRIBUTING, CHANGELOG, the API. mkdocs-gen-files runs this."""

from __future__ import annotations

from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parent.parent
API = {
    "api": ("Attention", "flashtile", ("attention", "attention_varlen", "attention_qkvpacked", "attention_kvpacked", "Options",
            "Dropout", "dropout_mask", "explain", "use_tuning", "AttentionProblem", "InvalidProblem", "NotSupported",
            "cache_info", "cache_clear")),
    "masks": ("Masks and score modifiers", "flashtile", ("Band", "Document", "Prefix", "Dilated", "TopLeft", "Tree",
              "KeyPadding", "Stored", "Blocks", "Predicate", "Softcap", "Alibi", "Bias", "Score", "Captured", "Position")),
    "caches": ("Caches and merging", "flashtile", ("attention_cached", "append_to_cache", "PagedCache", "merge")),
    "ranks": ("Sequences that ranks share", "flashtile.distributed", ("attention", "Context", "shard", "unshard",
              "position_ids", "document_ids", "padded_length")),
    "ops": ("Ops and modules", "flashtile", ("ops.layer_norm", "ops.rms_norm", "ops.rotary", "ops.softmax", "ops.cross_entropy",
            "ops.linear_cross_entropy", "ops.linear_act", "ops.mlp", "nn.Attention", "nn.LayerNorm", "nn.RMSNorm", "nn.MLP",
            "nn.CrossEntropyLoss")),
    "jax": ("JAX", "flashtile.jax", ("dot_product_attention", "dot_product_attention_varlen", "mha", "attention_cached",
            "append_to_cache", "layer_norm", "rms_norm", "rotary", "cross_entropy", "linear_cross_entropy", "softmax",
            "target")),
    "compat": ("Other libraries' names", "flashtile.compat", ("install", "uninstall", "sdpa.scaled_dot_product_attention",
               "sdpa.Override", "flex.flex_attention", "xformers.memory_efficient_attention", "flash_attn.flash_attn_func",
               "flash_attn.flash_attn_varlen_func", "flash_attn_cache.flash_attn_with_kvcache")),
}  # fmt: skip
MEMBERS = {
    "Blocks": ("build", "from_block_mask", "from_flex", "padded", "density"),
    "Band": ("show",),
    "PagedCache": ("append", "attention", "dense"),
    "Context": ("explain",),
    "nn.Attention": ("forward",),
}
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

for source, page in PAGES.items():
    text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
    for other, its_page in PAGES.items():
        text = text.replace(f"]({other})", f"]({its_page})")
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)
    mkdocs_gen_files.set_edit_path(page, source)

for page, (title, package, names) in API.items():
    parts = [f"# {title}\n"]
    for name in names:
        members = "".join(f"\n        - {member}" for member in MEMBERS.get(name, ()))
        parts.append(f"::: {package}.{name}" + (f"\n    options:\n      members:{members}" if members else "") + "\n")
    with mkdocs_gen_files.open(f"reference/{page}.md", "w") as file:
        file.write("\n".join(parts))
