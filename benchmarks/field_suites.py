"""What `field_tests.py` draws of other libraries' tests, and what stands beside our names where the tests import more."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# By folder: the libraries whose names stand for us.
LIBRARIES = {
    "tests": ("flash_attn",),
    "hopper": ("flash_attn", "flash_attn_interface"),
    "cute": ("flash_attn",),
    "flash_mla": ("flash_mla",),
    "attention": ("flashinfer",),
}
# Of each test how many draws, and at most how many cases of each.
VERSION_2: dict[str, dict[str, tuple[int, int]]] = {
    "test_flash_attn.py": {
        "test_flash_attn_output": (60, 12),
        "test_flash_attn_varlen_output": (44, 12),
        "test_flash_attn_qkvpacked": (24, 8),
        "test_flash_attn_varlen_qkvpacked": (24, 8),
        "test_flash_attn_causal": (16, 10),
        "test_flash_attn_varlen_causal": (14, 10),
        "test_flash_attn_splitkv": (14, 10),
        "test_flash_attn_race_condition": (3, 2),
        "test_flash_attn_bwd_overflow": (6, 5),
        "test_flash_attn_bwd_transpose": (6, 4),
        "test_flash_attn_bwd_varlen_overflow": (6, 1),
        "test_flash_attn_deterministic": (10, 6),
        "test_flash_attn_varlen_deterministic": (10, 6),
        "test_flash_attn_kvcache": (48, 8),
        "test_flash_attn_varlen_paged_kv_num_splits": (6, 2),
        "test_flash_attn_kvcache_paged_block_table_bounds": (4, 1),
        "test_flash_attn_generator_arg_must_be_none": (1, 1),
    },
    "test_rotary.py": {
        "test_rotary_emb_func": (24, 1),
        "test_rotary_emb_qkv": (6, 1),
        "test_rotary_emb_kv": (12, 1),
        "test_rotary_emb_varlen_func": (24, 1),
        "test_compilation_count": (1, 1),
    },
    "losses/test_cross_entropy.py": {"test_cross_entropy_loss": (24, 1)},
    "ops/triton/test_layer_norm.py": {"test_layer_norm": (40, 1), "test_layer_norm_linear": (10, 1)},
    "ops/test_dropout_layer_norm.py": {
        "test_dropout_layer_norm_training": (16, 1),
        "test_dropout_layer_norm_eval": (8, 1),
        "test_dropout_layer_norm_prenorm_training": (16, 1),
        "test_dropout_layer_norm_prenorm_eval": (8, 1),
        "test_dropout_layer_norm_subset_training": (12, 1),
        "test_dropout_layer_norm_subset_prenorm_training": (12, 1),
        "test_dropout_layer_norm_parallel_residual_training": (12, 1),
        "test_dropout_layer_norm_parallel_residual_prenorm_training": (12, 1),
        "test_dropout_layer_norm_randomness": (1, 1),
    },
    "ops/test_fused_dense.py": {"test_fused_linear_bias": (8, 1), "test_fused_mlp": (24, 1)},
}
VERSION_3: dict[str, dict[str, tuple[int, int]]] = {
    "test_flash_attn.py": {
        "test_flash_attn_output": (40, 8),
        "test_flash_attn_varlen_output": (30, 8),
        "test_flash_attn_kvcache": (60, 6),
        "test_flash_attn_combine": (24, 4),
        "test_flash_attn_varlen_combine_linearize": (1, 1),
    },
}
VERSION_4: dict[str, dict[str, tuple[int, int]]] = {"test_flash_attn.py": {"test_flash_attn_kvcache": (30, 8)}}
FLASH_MLA: dict[str, dict[str, tuple[int, int]]] = {
    "test_flash_mla_dense_decoding.py": {"test_flash_mla": (30, 8)},
}
FLASHINFER: dict[str, dict[str, tuple[int, int]]] = {
    "test_batch_decode_kernels.py": {
        "test_batch_decode_with_paged_kv_cache": (24, 3),
        "test_batch_decode_with_tuple_paged_kv_cache": (8, 3),
        "test_cuda_graph_batch_decode_with_paged_kv_cache": (8, 2),
        "test_paged_decode_extreme_negative_logits": (2, 1),
    },
    "test_batch_invariant_fa2.py": {"test_batch_decode_tensor_cores": (16, 3), "test_batch_prefill_tensor_cores": (12, 2)},
    "test_batch_prefill_kernels.py": {
        "test_batch_prefill_with_paged_kv_cache": (24, 3),
        "test_batch_prefill_with_tuple_paged_kv_cache": (8, 2),
        "test_batch_prefill_with_paged_kv_cache_custom_mask": (2, 2),
        "test_batch_prefill_with_ragged_kv_cache": (12, 3),
        "test_ragged_prefill_one_valid_key": (2, 1),
        "test_paged_prefill_fully_masked_rows": (2, 1),
        "test_paged_prefill_split_kv_empty_chunk": (2, 1),
    },
    "test_shared_prefix_kernels.py": {
        "test_batch_attention_with_shared_prefix_paged_kv_cache": (12, 3),
        "test_merge_state_in_place_with_mask": (1, 1),
    },
    "test_page.py": {"test_append_paged_kv_cache": (2, 1)},
    "test_deepseek_mla.py": {
        "test_batch_mla_varlen_page_attention": (8, 4),
        "test_batch_mla_oob_kv_nan": (6, 4),
        "test_batch_mla_page_attention": (12, 4),
    },
    "test_decode_prefill_lse.py": {"test_mlc_failed_case": (1, 1)},
    "test_sliding_window.py": {
        "test_single_decode_sliding_window": (8, 3),
        "test_batch_decode_sliding_window": (12, 3),
        "test_single_prefill_sliding_window": (6, 2),
        "test_batch_paged_prefill_sliding_window": (12, 3),
        "test_batch_ragged_prefill_sliding_window": (6, 2),
    },
    "test_logits_cap.py": {"test_single_decode_logits_soft_cap": (6, 3), "test_single_prefill_logits_soft_cap": (8, 3)},
    "test_non_contiguous_decode.py": {"test_batch_paged_decode_packed_input": (8, 2)},
    "test_tensor_cores_decode.py": {
        "test_single_decode_tensor_cores": (8, 3),
        "test_batch_decode_tensor_cores": (12, 3),
        "test_batch_decode_tensor_cores_cuda_graph": (8, 2),
    },
}
DRAWS = {"tests": VERSION_2, "hopper": VERSION_3, "cute": VERSION_4, "flash_mla": FLASH_MLA, "attention": FLASHINFER}
MOST_ROWS = 1 << 18  # of a cache: the float32 copies that flashinfer's tests keep share the memory with other processes


def is_huge(arguments: dict[str, Any]) -> bool:
    """Whether a case is left out: its cache has more than MOST_ROWS rows."""
    return arguments.get("batch_size", 1) * arguments.get("kv_len", 1) > MOST_ROWS


def prepare(folder: Path) -> None:
    """Before the tests of a folder are imported: what they need that is neither ours nor theirs."""
    if folder.name == "attention":
        _prepare_flashinfer(folder)
    if folder.name == "cute":
        _prepare_version_4(folder)


def adopt(file: str, module: ModuleType) -> None:
    """After a test file is imported: FlashMLA's one test has a `parametrize` mark for each axis of its own loop."""
    if file in FLASH_MLA:
        _adopt_flash_mla(module)


def _mark(names: str, values: Any) -> Any:
    return SimpleNamespace(name="parametrize", args=(names, values))


def _adopt_flash_mla(module: ModuleType) -> None:
    """The cases that its `main` lists, without those that time."""
    import torch

    test = module.test_flash_mla

    def run(zeros: bool, dtype: torch.dtype, **arguments: Any) -> None:
        import pytest

        if arguments["h_q"] % arguments["h_kv"]:
            pytest.skip("h_q is no multiple of h_kv")
        if zeros:  # its corner cases
            arguments |= dict(b=128, s_q=2, s_k=4096, is_varlen=True)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(0):
                test(module.TestParam(**arguments, test_performance=False, have_zero_seqlen_k=zeros))
        finally:
            torch.set_default_dtype(before)

    run.pytestmark = [  # pyright: ignore[reportFunctionMemberAccess]
        _mark("b", [1, 2, 6, 64]), _mark("s_q", [1, 2, 4]), _mark("s_k", [20, 140, 4096]),
        _mark("h_q", [1, 3, 9, 63, 64, 126, 128]), _mark("h_kv", [1, 2, 3, 8]), _mark("is_varlen", [False, True]),
        _mark("is_causal", [False, True]), _mark("zeros", [False, False, True]),
        _mark("dtype", [torch.bfloat16, torch.float16]),
    ]  # fmt: skip
    module.test_flash_mla = run  # pyright: ignore[reportAttributeAccessIssue]


class _Absent(ModuleType):
    """A module whose functions skip the test that calls them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def skip(*args: Any, **kwargs: Any) -> None:
            import pytest

            pytest.skip(f"{self.__name__}.{name} is flashinfer's own")

        return skip


def _prepare_version_4(folder: Path) -> None:
    """Of flash-attention 4 the helpers `testing.py`, which lies in the folder; names that other tests call are None."""
    interface = import_module("flash_attn.cute.interface")
    for name in ("_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd_sparse_mla"):
        setattr(interface, name, None)
    sys.modules["flash_attn.cute.cache_utils"] = _Absent("flash_attn.cute.cache_utils")
    spec = spec_from_file_location("flash_attn.cute.testing", folder / "testing.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])


def _prepare_flashinfer(folder: Path) -> None:
    """The package `tests` that holds the folder, and flashinfer's helpers: those that its kernels are compiled by skip."""
    import torch

    package = ModuleType("tests")
    package.__path__ = [str(folder.parent)]
    sys.modules["tests"] = package
    absent = ("flashinfer.jit", "flashinfer.jit.attention", "flashinfer.fp4_quantization", "tests.test_helpers.jit_utils",
              "tests.test_helpers.utils_fp4")  # fmt: skip
    for name in absent:
        sys.modules[name] = _Absent(name)
    helpers = _Absent("flashinfer.utils")
    capability = torch.cuda.get_device_capability
    given = dict(
        get_compute_capability=capability, has_flashinfer_jit_cache=lambda: True, GPUArchitectureError=RuntimeError,
        is_sm90a_supported=lambda device: capability(device) == (9, 0), is_sm100a_supported=lambda device: False,
        is_sm110a_supported=lambda device: False,
    )  # fmt: skip
    for name, value in given.items():
        setattr(helpers, name, value)
    sys.modules["flashinfer.utils"] = helpers
    for name in ("jit", "fp4_quantization", "utils"):
        setattr(sys.modules["flashinfer"], name, sys.modules[f"flashinfer.{name}"])
