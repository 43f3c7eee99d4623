"""Modules under other libraries' names: put into `sys.modules`, and taken out again."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flashtile.errors import InvalidProblem

HERE = __name__.rpartition(".")[0]
FUNCTIONS = (
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
)  # fmt: skip
PASSES = (
    "_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward",
    "_wrapped_flash_attn_forward=_flash_attn_forward", "_wrapped_flash_attn_varlen_forward=_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward=_flash_attn_backward", "_wrapped_flash_attn_varlen_backward=_flash_attn_varlen_backward",
    "_get_block_size_n", "USE_TRITON_ROCM", "flash_attn_gpu",
)  # fmt: skip
NORMS = (
    "dropout_add_layer_norm", "dropout_add_layer_norm_subset", "dropout_add_layer_norm_parallel_residual",
    "DropoutAddLayerNorm",
)  # fmt: skip
RMS_NORMS = (
    "dropout_add_rms_norm", "dropout_add_rms_norm_subset", "dropout_add_rms_norm_parallel_residual", "DropoutAddRMSNorm",
    "RMSNorm",
)  # fmt: skip
TRITON_NORMS = ("layer_norm_fn", "rms_norm_fn", "layer_norm_linear_fn", "layer_norm_ref", "rms_norm_ref")
ROTARY = (
    "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_qkv_", "apply_rotary_emb_kv_", "apply_rotary_emb_torch",
    "RotaryEmbedding",
)  # fmt: skip
PADDING = (
    "index_first_axis", "index_put_first_axis", "index_first_axis_residual", "unpad_input",
    "unpad_input_for_concatenated_sequences", "pad_input",
)  # fmt: skip
MODULES = ("get_alibi_slopes", "FlashSelfAttention", "FlashCrossAttention", "SelfAttention", "CrossAttention", "MHA")
VERSION_1 = (
    "flash_attn_func", "flash_attn_unpadded_func", "flash_attn_unpadded_kvpacked_func", "flash_attn_unpadded_qkvpacked_func",
    "flash_attn_unpadded_qkvpacked_split_func",
)  # fmt: skip
XFORMERS = (
    "memory_efficient_attention", "memory_efficient_attention_forward", "memory_efficient_attention_forward_requires_grad",
)  # fmt: skip
XFORMERS_OPS = ("AttentionBias", "AttentionMask=AttentionBias", "LowerTriangularMask")
XFORMERS_FMHA = (
    "AttentionBias",
    "BlockDiagonalMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
)
XFORMERS_BIASES = (
    *XFORMERS_FMHA, "BlockDiagonalCausalFromBottomRightMask", "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask", "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask", "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask", "BlockDiagonalPaddedKeysMask", "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask", "LowerTriangularFromBottomRightMask",
)  # fmt: skip
XFORMERS_PAGED = (
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask", "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalGappyKeysMask", "PagedBlockDiagonalPaddedKeysMask", "VARLEN_BIASES",
)  # fmt: skip
XFORMERS_ITEMS = ("_SeqLenInfo", "_PaddedSeqLenInfo", "_GappySeqInfo")
VERSION_3 = ("_flash_attn_forward", "_flash_attn_backward", "flash_attn_qkvpacked_func", "flash_attn_with_kvcache")
VERSION_4 = ("flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata")
RING = tuple(
    f"{kind}{packed}_func"
    for kind in ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn", "ring_flash_attn_varlen",
                 "zigzag_ring_flash_attn_varlen", "llama3_flash_attn_varlen")
    for packed in ("", "_kvpacked", "_qkvpacked")
)  # fmt: skip

FLASH_MLA = ("FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata")
FLASHINFER_DECODE = (
    "BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "single_decode_with_kv_cache",
)  # fmt: skip
FLASHINFER_PREFILL = (
    "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "single_prefill_with_kv_cache",
)  # fmt: skip
FLASHINFER_CASCADE = ("MultiLevelCascadeAttentionWrapper", "merge_state", "merge_state_in_place", "merge_states")
FLASHINFER_SHARED = (
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper", "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
)  # fmt: skip
FLASHINFER_MLA = ("BatchMLAPagedAttentionWrapper",)
FLASHINFER_PAGE = ("append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens")

# Of each library its modules, and the names in each: (module of flashtile.compat, names). A name may be "theirs=ours".
Sources = tuple[tuple[str, tuple[str, ...]], ...]
TREES: dict[str, dict[str, Sources]] = {
    "flash_attn": {
        "flash_attn": (("flash_attn", FUNCTIONS),),
        "flash_attn.flash_attn_interface": (("flash_attn", FUNCTIONS), ("flash_attn_passes", PASSES)),
        "flash_attn.bert_padding": (("bert_padding", PADDING),),
        "flash_attn.layers": (),
        "flash_attn.layers.rotary": (("rotary", ROTARY),),
        "flash_attn.losses": (),
        "flash_attn.losses.cross_entropy": (("cross_entropy", ("CrossEntropyLoss",)),),
        "flash_attn.modules": (),
        "flash_attn.modules.mha": (("mha", MODULES), ("rotary", ("RotaryEmbedding",))),
        "flash_attn.ops": (),
        "flash_attn.ops.layer_norm": (("layer_norm", NORMS),),
        "flash_attn.ops.rms_norm": (("layer_norm", RMS_NORMS),),
        "flash_attn.ops.fused_dense": (("fused_dense", ("fused_dense_func", "fused_mlp_func", "FusedDense", "FusedMLP")),),
        "flash_attn.ops.triton": (),
        "flash_attn.ops.triton.cross_entropy": (("cross_entropy", ("cross_entropy_loss",)),),
        "flash_attn.ops.triton.layer_norm": (("layer_norm", TRITON_NORMS),),
        "flash_attn.ops.triton.rotary": (("rotary", ("apply_rotary",)),),
        "flash_attn.cute": (("flash_attn_4", VERSION_4),),
        "flash_attn.cute.interface": (("flash_attn_4", VERSION_4),),
        "flash_attn.utils": (),
        "flash_attn.utils.generation": (("mha", ("InferenceParams",)),),
        "flash_attn_2_cuda": (("flash_attn_passes", tuple(f"{n}=flash_attn_gpu.{n}" for n in
                               ("fwd", "varlen_fwd", "bwd", "varlen_bwd"))),),
    },
    "flash_attn 1": {
        "flash_attn": (),
        "flash_attn.bert_padding": (("bert_padding", PADDING[:2] + PADDING[5:]), ("flash_attn_1", ("unpad_input",))),
        "flash_attn.flash_attention": (("flash_attn_1", ("FlashAttention", "FlashMHA")),),
        "flash_attn.flash_attn_interface": (("flash_attn_1", VERSION_1),),
        "flash_attn.flash_blocksparse_attention": (
            ("blocksparse", ("FlashBlocksparseAttention", "FlashBlocksparseMHA")),
        ),
        "flash_attn.flash_blocksparse_attn_interface": (
            ("blocksparse", ("convert_blockmask", "flash_blocksparse_attn_func")),
        ),
        "rotary_emb": (("rotary", ("apply_rotary=rotary_emb_apply_rotary",)),),
        "xentropy_cuda_lib": (("cross_entropy", ("forward", "backward")),),
    },
    "xformers": {
        "xformers": (),
        "xformers.ops": (("xformers", XFORMERS), ("xformers_bias", XFORMERS_OPS)),
        "xformers.ops.fmha": (("xformers", XFORMERS), ("xformers_bias", XFORMERS_FMHA),
                               ("xformers_paged", ("VARLEN_BIASES",))),
        "xformers.ops.fmha.attn_bias": (
            ("xformers_bias", XFORMERS_BIASES), ("xformers_paged", XFORMERS_PAGED), ("xformers_items", XFORMERS_ITEMS)
        ),
    },
    "flash_attn_interface": {
        "flash_attn_interface": (("flash_attn_3", (*VERSION_4, *VERSION_3)),),
    },
    "flashinfer": {
        "flashinfer": (
            ("flashinfer", (*FLASHINFER_DECODE, *FLASHINFER_PREFILL, *FLASHINFER_CASCADE, *FLASHINFER_PAGE)),
            ("flashinfer_shared", FLASHINFER_SHARED),
            ("flashinfer_mla", FLASHINFER_MLA),
        ),
        "flashinfer.decode": (("flashinfer", FLASHINFER_DECODE),),
        "flashinfer.prefill": (("flashinfer", FLASHINFER_PREFILL),),
        "flashinfer.cascade": (("flashinfer", FLASHINFER_CASCADE), ("flashinfer_shared", FLASHINFER_SHARED)),
        "flashinfer.page": (("flashinfer", FLASHINFER_PAGE),),
        "flashinfer.mla": (("flashinfer_mla", FLASHINFER_MLA),),
    },
    "flash_mla": {
        "flash_mla": (("flash_mla", FLASH_MLA[1:]),),
        "flash_mla.flash_mla_interface": (("flash_mla", FLASH_MLA),),
    },
    "jvp_flash_attention": {
        "jvp_flash_attention": (),
        "jvp_flash_attention.jvp_attention": (("jvp_flash_attention", ("JVPAttn", "attention", "MASK_CONST")),),
    },
    "ring_flash_attn": {
        "ring_flash_attn": (("ring_flash_attn", (*RING, "llama3_flash_attn_prepare_cu_seqlens")),),
    },
}  # fmt: skip
VERSIONS = {
    "flash_attn": "2.8.4",
    "flash_attn 1": "1.0.9",
    "ring_flash_attn": "0.1.8",
    "jvp_flash_attention": "0.14.0",
    "flashinfer": "0.7.4",
    "flash_mla": "1.0.0",
}  # whose names and signatures these are

_kept: dict[str, dict[str, ModuleType]] = {}  # of each installed tree, the modules that it stands in for


def install(library: str) -> None:
    """Make `import <library>` give flashtile's translation of it, until `uninstall`; a second time changes nothing.

    library: "flash_attn" (version 2), "flash_attn 1", "flash_attn_interface" (version 3), "xformers",
        "flashinfer" (0.7.4), "flash_mla" (1.0.0), "ring_flash_attn" (0.1.8), "jvp_flash_attention" (0.14.0).
    Only imports to come see it: what was imported from the library before stays what it was. Its distribution
    is not pretended: `importlib.metadata` knows nothing of it.
    Raises InvalidProblem for another library, and beside an installed one that has modules of the same names.
    """
    tree = _tree(library)
    if library in _kept:
        return
    roots = {name.partition(".")[0] for name in tree}
    other = next((o for o in _kept if roots & {name.partition(".")[0] for name in TREES[o]}), None)
    if other is not None:
        raise InvalidProblem(f"library is {library!r} and {other!r} is installed, which has modules of the same names; "
                             f"uninstall({other!r}) first.")  # fmt: skip
    modules = {name: _module(library, name, sources, tree) for name, sources in tree.items()}
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in roots}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    _kept[library] = kept


def uninstall(library: str) -> None:
    """Take the translation out of `sys.modules` again, and put back what was there before."""
    tree = _tree(library)
    if library not in _kept:
        raise InvalidProblem(f"library is {library!r}; it is not installed.")
    for name in tree:
        sys.modules.pop(name, None)
    sys.modules.update(_kept.pop(library))


def _tree(library: str) -> dict[str, Sources]:
    if library not in TREES:
        raise InvalidProblem(f"library is {library!r}; it must be one of {', '.join(TREES)}.")
    return TREES[library]


def _module(library: str, name: str, sources: Sources, tree: dict[str, Sources]) -> ModuleType:
    package = any(other.startswith(name + ".") for other in tree)
    module = ModuleType(name, f"flashtile's translation of {name}.")
    module.__spec__ = ModuleSpec(name, None, origin=HERE, is_package=package)
    module.__package__ = name if package else name.rpartition(".")[0]
    if package:
        module.__path__ = []
    if "." not in name and library in VERSIONS:
        module.__dict__["__version__"] = VERSIONS[library]
    for home, names in sources:
        origin = import_module(f"{HERE}.{home}")
        for entry in names:
            theirs, _, ours = entry.partition("=")
            value: Any = origin
            for part in (ours or theirs).split("."):
                value = getattr(value, part)
            setattr(module, theirs, value)
    module.__dict__["__getattr__"] = partial(_refuse, library, module)
    return module


def _refuse(library: str, module: ModuleType, attribute: str) -> Any:
    """Raise AttributeError for a name that the translation of a module has not."""
    has = ", ".join(sorted(name for name in vars(module) if not name.startswith("__"))) or "no names"
    raise AttributeError(
        f"module {module.__name__!r} is flashtile's translation and has no attribute {attribute!r}; it has {has}. "
        f"flashtile.compat.uninstall({library!r}) gives back the library itself, if there is one.",
        name=attribute, obj=module,
    )  # fmt: skip
