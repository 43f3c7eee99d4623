"""A GPT-2-124M-shaped model in training under torch.compile, bf16, with each attention: tokens/s, loss curves, host time.

    python benchmarks/train.py [--steps 50] [--context 8192] [--budget 160] [--output train.csv] [--commit HASH, without git]

Contestants differ in one function, get the same weights and the same batches, and are checked first: loss and gradients of one
batch against the first contestant's. Processes of their own compile them before that, side by side. They are stepped in turn,
so that they share what the machine does; a step's time is the median of those after the first three. Then host time: of a
forward and a backward of one small attention, compiled and eager, calls queued and not waited for. The exit status is 1 if one
is wrong or loss curves part.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from benchmarks.experiment import Experiment, main_of
from benchmarks.processes import compile_ahead
from benchmarks.record import Record, at_least_one

Attend = Callable[[Tensor], Tensor]  # (batch, seqlen, 3, heads, head_dim) -> (batch, seqlen, heads, head_dim), causal
WIDTH, LAYERS, HEADS, VOCABULARY = 768, 12, 12, 50304
HOST_SHAPE = (1, 128, 3, 8, 64)  # of the attention whose host time is measured
MOST_APART = 0.05  # nats between two loss curves at any step; bf16 runs of one seed part by as much by rounding alone
PROBE_TOLERANCE = 0.05  # of a gradient's norm, in bf16


def attend_flashtile(qkv: Tensor) -> Tensor:
    """This library's."""
    return flashtile.attention_qkvpacked(qkv, causal=True)


def attend_sdpa(kernel: SDPBackend) -> Attend:
    """torch's, by this kernel: chosen inside, where a compiled graph has it from."""

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


def attend_flex(context: int, device: torch.device) -> Attend:
    """FlexAttention's, with its block mask."""
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, context, context, device=str(device))

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        made = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(made, Tensor)
        return made.transpose(1, 2)

    return attend


class Block(nn.Module):
    """One layer of GPT-2."""

    def __init__(self, attend: Attend):
        super().__init__()
        self.attend = attend
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        x = x + self.proj(self.attend(qkv).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """124M parameters with GPT-2's context; the position table grows with the context."""

    def __init__(self, context: int, attend: Attend, layers: int = LAYERS, vocabulary: int = VOCABULARY):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if "proj" in name or "down" in name else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def text(context: int, batch: int, vocabulary: int, device: torch.device) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches by number: a second-order chain of few symbols, so that there is something to learn from far and near."""
    table = torch.randint(min(vocabulary, 256), (64, 64), generator=torch.Generator().manual_seed(7))

    def draw(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + number)
        noise = torch.randint(256, (batch, context + 1), generator=generator)
        tokens = noise.clone()
        period = 37
        for start in range(period, context + 1, period):  # each stretch repeats the one before it, through the table
            stop = min(start + period, context + 1)
            before = tokens[:, start - period : stop - period]
            tokens[:, start:stop] = torch.where(
                noise[:, start:stop] < 40, noise[:, start:stop], table[before % 64, before // 4 % 64]
            )
        tokens = tokens % vocabulary
        return tokens[:, :-1].to(device), tokens[:, 1:].to(device)

    return draw


class Run:
    """A contestant in training."""

    def __init__(self, name: str, attend: Attend, chosen: argparse.Namespace, device: torch.device):
        torch.manual_seed(0)
        self.name, self.device = name, device
        self.model = GPT2(chosen.context, attend, chosen.layers, chosen.vocabulary).to(device)
        self.compiled = torch.compile(self.model, fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 6e-4, (0.9, 0.95), fused=device.type == "cuda")
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.compiled(*batch)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        wait(self.device)
        began = time.perf_counter()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - began)

    def probe(self, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Loss of a batch and two gradients; nothing is changed."""
        loss = self.loss(batch)
        block: Any = self.model.blocks[0]
        return [loss.detach(), *torch.autograd.grad(loss, [block.qkv.weight, self.model.token.weight])]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_us(call: Callable[[], object], device: torch.device, calls: int, rounds: int = 9) -> float:
    """Microseconds per call, a burst short enough not to fill the launch queue."""
    for _ in range(calls // 5):
        call()
    found = []
    for _ in range(rounds):
        wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) / calls * 1e6)
        wait(device)
    return median(found)


def host_rows(device: torch.device, record: Record, count: int = 100) -> None:
    """Host time of one attention, (1, 128, 8, 64), forward and forward with backward, eager and compiled."""
    dtype = torch.bfloat16
    qkv = torch.randn(HOST_SHAPE, device=device, dtype=dtype)
    wanting = qkv.clone().requires_grad_()
    contestants = {"flashtile": attend_flashtile, "sdpa/flash": attend_sdpa(SDPBackend.FLASH_ATTENTION)}
    cells = [(name, how) for name in contestants for how in ("eager", "compiled")]
    for (name, how), _ in record.parts(cells, lambda cell: f"host time of {' '.join(cell)}"):
        with record.attempt(section="host", contestant=name, what=how):
            attend = contestants[name]
            function = attend if how == "eager" else torch.compile(attend, fullgraph=True)
            dout = torch.randn_like(function(qkv))
            calls = {
                "forward": lambda f=function: f(qkv),
                "forward+backward": lambda f=function, d=dout: torch.autograd.grad(f(wanting), wanting, d),
            }
            for what, call in calls.items():
                taken = round(host_us(call, device, count), 2)
                record.add(dict(section="host", contestant=name, what=f"{how} {what}", host_us=taken))
                print(f"host time, {name} {how} {what}: {taken} us", flush=True)


def contestant(name: str, context: int, device: torch.device) -> Attend:
    """The attention of a contestant."""
    kernels = {"sdpa/cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa/flash": SDPBackend.FLASH_ATTENTION}
    if name in kernels:
        return attend_sdpa(kernels[name])
    return attend_flashtile if name == "flashtile" else attend_flex(context, device)


CONTESTANTS = ("sdpa/cudnn", "flashtile", "sdpa/flash", "flex")


def configure() -> torch.device:
    """How torch.compile is to work here and in the processes that compile ahead; the device."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # every contestant's model is a specialisation of one forward
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def warm(name: str, chosen: argparse.Namespace) -> None:
    """Step a contestant once, which compiles it."""
    device = configure()
    draw = text(chosen.context, chosen.batch, chosen.vocabulary, device)
    run = Run(name, contestant(name, chosen.context, device), chosen, device)
    run.probe(draw(0))
    run.step(draw(0))


def train(chosen: argparse.Namespace, device: torch.device, record: Record) -> None:
    """A row for each contestant; failed where one is wrong, or its loss curve parts from the first one's."""
    draw = text(chosen.context, chosen.batch, chosen.vocabulary, device)
    runs: list[Run] = []
    known = list[Tensor]()
    names = chosen.only or CONTESTANTS
    if device.type == "cuda":
        compile_ahead(warm, [(name, chosen) for name in names], record.left(), 0.5, len(names))
    for name, _ in record.parts(names, reserve_s=0.3 * chosen.budget):
        with record.attempt(section="train", contestant=name):
            run = Run(name, contestant(name, chosen.context, device), chosen, device)
            found = run.probe(draw(0))
            known = known or found
            off = max(((a - b).float().norm() / b.float().norm()).item() for a, b in zip(found, known, strict=True))
            print(f"{name}: loss {found[0].item():.4f}, off the first by {off:.2g}; {record.left():.0f} s left", flush=True)
            if not off < PROBE_TOLERANCE:
                raise ArithmeticError(f"off the first contestant by {off:.2g} of the norm")
            runs.append(run)
    host_s = 0.15 * chosen.budget  # kept for host times
    for number in range(chosen.steps):
        batch = draw(number)
        for run in runs if number % 2 == 0 else reversed(runs):
            run.step(batch)
        if number in (0, 1, chosen.steps - 1) or number % 10 == 9:
            print(f"step {number + 1}: " + ", ".join(f"{r.name} {r.losses[-1]:.4f}" for r in runs), flush=True)
        if record.left() < host_s and number + 1 < chosen.steps:
            record.leave(f"steps {number + 2} to {chosen.steps}")
            break
    tokens = chosen.batch * chosen.context
    for run in runs:
        seconds = median(run.seconds[3:] or run.seconds)
        apart = max(abs(a - b) for a, b in zip(run.losses, runs[0].losses, strict=True))
        row = dict(
            section="train", contestant=run.name, what=f"GPT-2 124M, {chosen.batch} x {chosen.context}", steps=len(run.losses),
            step_ms=round(seconds * 1e3, 2), tokens_per_s=round(tokens / seconds), first_loss=round(run.losses[0], 4),
            last_loss=round(run.losses[-1], 4), most_apart=round(apart, 4), losses=" ".join(f"{x:.4f}" for x in run.losses),
            failure="" if apart < MOST_APART else "the loss curve parts from the first contestant's",
        )  # fmt: skip
        record.add(row)
        print(*(f"{name}={row[name]}" for name in ("contestant", "tokens_per_s", "step_ms", "last_loss", "most_apart")))


class Train(Experiment[str]):
    """Two cells: the training of all contestants, step by step in turns, and the host time of their calls."""

    output, budget_s, gpu = "benchmarks/results/train.csv", 160, False  # a CPU trains too, if it is told to be small

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        for name, default in (("steps", 50), ("context", 8192), ("batch", 2), ("layers", LAYERS), ("vocabulary", VOCABULARY)):
            parser.add_argument(f"--{name}", type=at_least_one, default=default)
        parser.add_argument("--only", nargs="+", choices=CONTESTANTS)

    def device(self) -> torch.device:
        return configure()

    def cells(self) -> list[str]:
        return ["train", "host"]

    def place(self, cell: str) -> dict[str, str]:
        return {"section": cell, "contestant": "all"}

    def measure(self, cell: str, record: Record, until: float) -> None:
        device = self.device()
        if cell == "train":
            train(self.chosen, device, record)
        else:
            host_rows(device, record, 100 if device.type == "cuda" else 2)


def main() -> int:
    return main_of(Train)


if __name__ == "__main__":
    sys.exit(main())
