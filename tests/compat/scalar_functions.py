"""Functions as users write them for FlexAttention, drawn from a seed as text: trees of what torch.vmap takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

BATCH, HEADS, ROWS, KEYS, WIDTH = 2, 2, 5, 7, 3
SHAPES: dict[str, tuple[int, ...]] = {
    "by_head": (HEADS,),
    "by_key": (KEYS,),
    "by_query": (ROWS,),
    "of_head_key": (HEADS, KEYS),
    "of_pair": (ROWS, KEYS),
    "of_item": (BATCH, HEADS, KEYS),
    "of_score": (BATCH, HEADS, ROWS, KEYS),
    "head_rows": (HEADS, WIDTH),
    "key_rows": (KEYS, WIDTH),
    "query_rows": (ROWS, WIDTH),
    "cube": (HEADS, KEYS, WIDTH),
    "number": (),
    "table": (24,),
}


def environment(seed: int, place: torch.device) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """(all that the functions name, the tensors in it that want a gradient)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(s, generator=generator).to(place).requires_grad_() for n, s in SHAPES.items()}
    fixed = {
        "half": torch.randn(HEADS, generator=generator).half(),
        "double": torch.randn(KEYS, generator=generator).double(),
        "document": torch.randint(0, 3, (BATCH, KEYS), generator=generator),
        "flags": torch.rand(KEYS, generator=generator) < 0.6,
        "segments": torch.rand(KEYS, 4, generator=generator) < 0.4,
        "order": torch.randint(0, KEYS, (ROWS,), generator=generator),
        "small": torch.randint(0, 5, (HEADS,), generator=generator).to(torch.int32),
        "bits": torch.rand(ROWS, KEYS, generator=generator) < 0.6,
    }
    fixed = {name: tensor.to(place) for name, tensor in fixed.items()}
    return {"torch": torch, "F": torch.nn.functional, **tensors, **fixed}, list(tensors.values())


class Draw:
    """Draws expressions of one kind each. i and j are positions; whatever an expression divides by is not 0."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def one(self, *choices: Callable[[], str]) -> str:
        return self.random.choice(choices)()

    def number(self) -> str:
        return f"{self.random.choice([-1, 1]) * self.random.uniform(0.2, 2):.3g}"

    def count(self) -> str:
        return str(self.random.randint(1, 5))

    def integer(self, depth: int) -> str:
        """An int64, of any size."""
        plain = ["b", "h", "i", "j", "(j - i)", "order[i]", "document[b, j]", "document[b][j]", "small[h].long()"]
        if depth <= 0:
            return self.random.choice(plain)
        inner, other = self.integer(depth - 1), self.integer(depth - 1)
        return self.random.choice(
            [
                *plain,
                f"({inner} + {other})",
                f"({inner} - {other})",
                f"({inner} * {self.count()})",
                f"({inner} // {self.count()})",
                f"({inner} % {self.count()})",
                f"({inner}).abs()",
                f"-({inner})",
                f"torch.clamp({inner}, -2, 3)",
                f"torch.minimum({inner}, {other})",
                f"torch.maximum({inner}, {other})",
                f"torch.where({self.boolean(0)}, {inner}, {other})",
                f"({inner} // ({other}.abs() + 1))",
                f"({inner} & 3)",
                f"torch.div({inner}, 2, rounding_mode='floor')",
            ]
        )

    def place(self, size: int, depth: int) -> str:
        """An int64 from 0 to size - 1."""
        return f"({self.integer(depth)}).abs() % {size}"

    def vector(self, depth: int) -> str:
        plain = [
            "head_rows[h]",
            "key_rows[j]",
            "query_rows[i]",
            "cube[h][j]",
            "cube[h, j]",
            "key_rows[order[i]]",
            "F.embedding(j, key_rows)",
        ]
        if depth <= 0:
            return self.random.choice(plain)
        inner, other = self.vector(depth - 1), self.vector(depth - 1)
        return self.random.choice(
            [
                *plain,
                f"({inner} * {other})",
                f"({inner} - {other})",
                f"torch.tanh({inner})",
                f"torch.relu({inner})",
                f"({inner} + {self.real(0)})",
                f"F.softmax({inner}, -1)",
                f"torch.stack([{self.real(0)}, {self.real(0)}, {self.real(0)}])",
                f"key_rows[{self.place(KEYS, 1)}]",
                f"({inner}).cumsum(0)",
            ]
        )

    def real(self, depth: int) -> str:
        """A float that does not depend on the score."""
        plain = [
            "by_head[h]",
            "by_key[j]",
            "by_query[i]",
            "of_head_key[h, j]",
            "of_head_key[h][j]",
            "of_pair[i, j]",
            "of_pair[i][j]",
            "of_item[b][h][j]",
            "of_item[b, h, j]",
            "of_score[b, h, i, j]",
            "of_score[b][h][i][j]",
            "number",
            "half[h]",
            "double[j]",
            "table[j - i + 6]",
            "by_key[j - i]",
            "head_rows[h, 0]",
            "head_rows[h][-1]",
            "(j - i).float()",
            "of_score[b, h][i, j]",
        ]
        if depth <= 0:
            return self.random.choice(plain)
        inner, other, some = self.real(depth - 1), self.real(depth - 1), self.vector(depth - 1)
        return self.random.choice(
            [
                *plain,
                f"({inner} + {other})",
                f"({inner} * {other})",
                f"({inner} - {self.number()})",
                f"({self.number()} * {inner})",
                f"({inner} / (1.0 + ({other}).abs()))",
                f"torch.exp(-({inner}).abs())",
                f"torch.sigmoid({inner})",
                f"({inner}).clamp(-1.0, 1.5)",
                f"F.relu({inner})",
                f"torch.maximum({inner}, {other})",
                f"({some}).sum()",
                f"({some}).mean()",
                f"({some}).max()",
                f"torch.dot(({some}).float(), ({self.vector(depth - 1)}).float())",
                f"(({some}).float() @ {self.vector(0)})",
                f"({some})[{self.random.randint(0, 2)}]",
                f"({some})[{self.place(3, 0)}]",
                f"({self.integer(depth - 1)}).float() * 0.1",
                f"table[{self.place(24, depth - 1)}]",
                f"torch.where({self.boolean(depth - 1)}, {inner}, {other})",
                f"F.embedding({self.place(KEYS, 0)}, key_rows)[0]",
                f"({inner}).to(torch.float64)",
                f"({self.boolean(depth - 1)}).float()",
                f"({inner}) * ({self.boolean(depth - 1)})",
                f"torch.log1p(({inner}).abs())",
                f"({some}).norm()",
                f"({inner}).detach()",
                f"torch.logsumexp({some}, 0)",
                f"torch.einsum('d,d->', ({some}).float(), {self.vector(0)})",
                f"({inner}).square()",
                f"by_key.sum() * {inner}",
                "head_rows[h].amax()",
                "(head_rows @ key_rows[j])[h]",
            ]
        )

    def boolean(self, depth: int) -> str:
        plain = [
            "i >= j",
            "(i - j).abs() < 3",
            "flags[j]",
            "bits[i, j]",
            "bits[i][j]",
            "document[b, j] == document[b, order[i]]",
            "(segments[order[i]] & segments[j]).any()",
            "h == 0",
        ]
        if depth <= 0:
            return f"({self.random.choice(plain)})"
        inner, other = self.boolean(depth - 1), self.boolean(depth - 1)
        return self.random.choice(
            [
                f"({self.random.choice(plain)})",
                f"({inner} & {other})",
                f"({inner} | {other})",
                f"({inner} ^ {other})",
                f"(~{inner})",
                f"({self.integer(depth - 1)} > {self.integer(depth - 1)})",
                f"({self.real(depth - 1)} < {self.number()})",
                f"(({self.integer(depth - 1)} % {self.count()}) != 0)",
                f"torch.logical_and({inner}, {other})",
                f"((segments[j] == segments[order[i]]).sum() >= {self.random.randint(1, 3)})",
                f"(segments[j] | {inner}).all()",
            ]
        )

    def score(self, depth: int) -> str:
        """A float that depends on the score."""
        if depth <= 0:
            return "s"
        inner, other = self.score(depth - 1), self.score(self.random.randint(0, depth - 1))
        real, test = self.real(self.random.randint(0, 2)), self.boolean(self.random.randint(0, 2))
        return self.random.choice(
            [
                f"({inner} + {real})",
                f"({real} - {inner})",
                f"({inner} * {self.number()})",
                f"({inner} - {self.number()})",
                f"({inner} * torch.tanh({real}))",
                f"({inner} / (1 + ({real}).abs()))",
                f"torch.where({test}, {inner}, {other})",
                f"torch.where({test}, {inner}, {real})",
                f"torch.tanh({inner})",
                f"({self.number()} * torch.tanh({inner} / 2))",
                f"torch.sigmoid({inner})",
                f"F.relu({inner})",
                f"({inner}).abs()",
                f"({inner}).clamp(-1.5, 1.25)",
                f"({inner} + {other})",
                f"({inner} * {other})",
                f"torch.maximum({inner}, {real})",
                f"torch.minimum({inner}, {other})",
                f"-({inner})",
                f"torch.exp(({inner}).clamp(max=1.0))",
                f"torch.where({inner} > {self.number()}, {inner}, {other} * 0.5)",
                f"({inner}).to(torch.float64)",
                f"F.leaky_relu({inner}, 0.1)",
                f"F.gelu({inner})",
                f"F.silu({inner})",
                f"({inner}).masked_fill({test}, {self.number()})",
                f"torch.lerp(({inner}).float(), ({other}).float(), 0.25)",
                f"F.softplus({inner})",
                f"torch.stack([{inner}, {real}]).float().logsumexp(0)",
                f"({inner} * {self.vector(1)}).sum()",
                f"({inner}) ** 2",
                f"torch.addcmul({inner}, {real}, {other})",
                f"({inner}).square() / 4",
                f"({inner} * {test})",
            ]
        )


def score_mod(seed: int) -> str:
    draw = Draw(seed)
    return draw.score(2 + seed % 3)


def mask_mod(seed: int) -> str:
    draw = Draw(seed)
    return draw.boolean(2 + seed % 2)


def compiled(text: str, names: str, scope: dict[str, Any]) -> Callable[..., Any]:
    return eval(f"lambda {names}: {text}", scope)
