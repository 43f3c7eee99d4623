"""Serves requests from a paged cache with continuous batching, and compares every token with transformers' own attention.

python examples/generate.py [--requests N] [--pages N]

Needs PyTorch, transformers and rich, and downloads nothing: the model is a small Llama of random weights. It takes seconds on
a CPU, and uses a GPU if there is one. Requests come and go at each step: prompts, cut into chunks, stand beside requests that
decode one token, all in one call per layer. Where pages run out, the youngest request gives its own back and begins again.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import AutoModelForCausalLM, LlamaConfig

import flashtile

HEADS, HEADS_KV, HEAD_DIM = 4, 2, 16
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=HEADS * HEAD_DIM, intermediate_size=128, num_hidden_layers=3, num_attention_heads=HEADS,
    num_key_value_heads=HEADS_KV,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
PAGE_SIZE = 8
MOST_TOKENS = 48  # of one step: decodes first, then as much of prompts as fits


@dataclass(eq=False)
class Request:
    """A prompt, what was made of it, and the pages that hold its first `cached` tokens."""

    prompt: list[int]
    wanted: int
    made: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.made

    @property
    def done(self) -> bool:
        return len(self.made) == self.wanted or self.made[-1:] == [CONFIG.eos_token_id]


class Allocator:
    """Which page is whose. A page belongs to one request, and goes back when that ends."""

    def __init__(self, pages: int):
        self.free = list(range(pages))

    def hold(self, request: Request, rows: int) -> bool:
        """Whether the request has pages for so many rows now."""
        missing = -(-rows // PAGE_SIZE) - len(request.pages)
        if missing > len(self.free):
            return False
        request.pages += [self.free.pop() for _ in range(missing)]
        return True

    def drop(self, request: Request) -> None:
        """Take all pages of a request, whose keys are gone with them."""
        self.free += request.pages
        request.pages, request.cached = [], 0


class Scheduler:
    """Who takes part in the next step, and with how many tokens."""

    def __init__(self, requests: list[Request], pages: int):
        self.waiting, self.running, self.allocator, self.preempted = list(requests), list[Request](), Allocator(pages), 0

    def plan(self) -> list[tuple[Request, int]]:
        """(request, tokens) of one step; a request's tokens follow those that are in the cache."""
        left, chosen = MOST_TOKENS, list[tuple[Request, int]]()
        for request in list(self.running):
            count = min(len(request.tokens) - request.cached, left)
            if request not in self.running or not count:  # another one took its pages
                continue
            while not self.allocator.hold(request, request.cached + count):
                youngest = self.running.pop()
                self.allocator.drop(youngest)
                self.waiting.insert(0, youngest)
                self.preempted += 1
                if youngest is request:
                    break
            else:
                chosen.append((request, count))
                left -= count
        while self.waiting and left:
            request, count = self.waiting[0], min(len(self.waiting[0].tokens), left)
            if not self.allocator.hold(request, count):
                break
            self.running.append(self.waiting.pop(0))
            chosen.append((request, count))
            left -= count
        if not chosen:
            raise SystemExit("a request needs more pages than there are; give more --pages")
        return chosen

    def finish(self, request: Request) -> None:
        """Give its pages to others."""
        self.running.remove(request)
        self.allocator.drop(request)


class Engine:
    """A Llama of transformers, with its layers' keys and values in pools of pages."""

    def __init__(self, model: Any, pages: int):
        self.model, self.device = model.model, model.device
        self.head = model.lm_head
        shape = (pages, PAGE_SIZE, HEADS_KV, HEAD_DIM)
        self.pools = [tuple(torch.zeros(shape, device=self.device) for _ in "kv") for _ in self.model.layers]
        angles = torch.arange(CONFIG.max_position_embeddings, device=self.device)[:, None] * self.model.rotary_emb.inv_freq
        self.rotary = angles.cos(), angles.sin()

    def ints(self, numbers: list[Any]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def step(self, chosen: list[tuple[Request, int]]) -> list[int]:
        """The likeliest next token of each request, after the tokens of this step, which are in the cache then."""
        columns = max(len(request.pages) for request, _ in chosen)
        table = self.ints([request.pages + [-1] * (columns - len(request.pages)) for request, _ in chosen])
        used = self.ints([request.cached for request, _ in chosen])
        ends = [0]
        tokens: list[int] = []
        for request, count in chosen:
            tokens += request.tokens[request.cached : request.cached + count]
            ends.append(len(tokens))
        cu_seqlens = self.ints(ends)
        x = self.model.embed_tokens(torch.tensor(tokens, device=self.device))
        for layer, (k_cache, v_cache) in zip(self.model.layers, self.pools, strict=True):
            attention, normal = layer.self_attn, layer.input_layernorm(x)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (part(normal).unflatten(-1, (-1, HEAD_DIM)) for part in projections)
            out = flashtile.attention_cached(
                q, k_cache, v_cache, table, seqused_k=used, cu_seqlens_q=cu_seqlens, append=(k, v), rotary=self.rotary,
                causal=True,
            )  # fmt: skip
            x = x + attention.o_proj(out.flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        for request, count in chosen:
            request.cached += count
        return self.head(self.model.norm(x[cu_seqlens[1:] - 1])).argmax(-1).tolist()


def serve(engine: Engine, scheduler: Scheduler, total: int) -> tuple[int, float]:
    """(steps, seconds) until every request is done."""
    begun, steps = time.perf_counter(), 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}")
    with Progress(*columns) as progress:
        bar = progress.add_task("tokens", total=total, speed="")
        while scheduler.running or scheduler.waiting:
            chosen = scheduler.plan()
            for (request, _), token in zip(chosen, engine.step(chosen), strict=True):
                if request.cached < len(request.tokens):
                    continue  # a part of a prompt, or of what was made before its pages were taken
                request.made.append(token)
                progress.advance(bar)
                if request.done:
                    progress.advance(bar, request.wanted - len(request.made))
                    scheduler.finish(request)
            steps += 1
            progress.update(bar, speed=f"{progress.tasks[0].completed / (time.perf_counter() - begun):.0f} tokens/s")
    return steps, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--pages", type=int, default=40, help=f"of {PAGE_SIZE} tokens each, for all requests")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").to(device).eval()
    for parameter in model.parameters():  # transformers' start leaves all tokens about alike
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    draw = random.Random(0)
    requests = [
        Request([draw.randrange(3, CONFIG.vocab_size) for _ in range(draw.randint(3, 60))], draw.randint(8, 40))
        for _ in range(chosen.requests)
    ]
    scheduler = Scheduler(requests, chosen.pages)
    with torch.inference_mode():
        steps, seconds = serve(Engine(model, chosen.pages), scheduler, sum(r.wanted for r in requests))
        made = sum(len(request.made) for request in requests)
        print(f"{len(requests)} requests, {made} tokens in {steps} steps, {made / seconds:.0f} tokens/s on {device}")
        print(f"{scheduler.preempted} requests gave their pages back to older ones and began again")
        same = 0
        for request in requests:
            ids = torch.tensor([request.prompt], device=device)
            wanted = model.generate(ids, max_new_tokens=request.wanted, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
            same += sum(a == b for a, b in zip(request.made, wanted.tolist(), strict=True))
    kinds = len({token for request in requests for token in request.made})
    print(f"{same} of {made} tokens, of {kinds} kinds, are those of transformers' eager attention, one request at a time")


if __name__ == "__main__":
    main()
