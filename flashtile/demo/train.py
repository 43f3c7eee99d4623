"""Training and sampling, the same for every attention function: same text, same seed, same batches."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.demo.model import GPT, Attend


@dataclass(frozen=True)
class Setup:
    """Size of the model and of its training. With the defaults two models train in about a minute on two CPU cores."""

    steps: int = 250
    seed: int = 0
    batch: int = 8
    context: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    learning_rate: float = 4e-3


class Text:
    """The topics of Python's own `help()`, as numbers: 450,000 characters of prose and grammar that every Python ships."""

    def __init__(self) -> None:
        topics = pydoc_data.topics.topics
        self.text = "".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(self.text))
        numbers = {character: i for i, character in enumerate(self.characters)}
        self.tokens = torch.tensor([numbers[character] for character in self.text])

    def decode(self, tokens: Tensor) -> str:
        """The characters of these numbers."""
        return "".join(self.characters[i] for i in tokens.tolist())


class Trainer:
    """A model in training, with the loss of each step so far in nats per character.

    Trainers of one setup differ in `attend` alone. They are stepped in turn, so that both meet the same disturbances
    of the machine and their step times compare.
    """

    def __init__(self, attend: Attend, text: Text, setup: Setup, device: torch.device):
        torch.manual_seed(setup.seed)
        self.text, self.setup, self.device = text, setup, device
        sizes = (setup.context, setup.width, setup.layers, setup.heads)
        self.model = GPT(len(text.characters), *sizes, attend).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.batches = torch.Generator().manual_seed(setup.seed)
        self.losses: list[float] = []
        self.times_ms: list[float] = []

    def step(self) -> float:
        """The loss of one more step."""
        began, setup, done = perf_counter(), self.setup, len(self.losses)
        # Up over ten steps, flat, then down to zero over the second half.
        factor = min(1.0, (done + 1) / 10, 2 * (setup.steps - done) / setup.steps)
        self.optimizer.param_groups[0]["lr"] = factor * setup.learning_rate
        starts = torch.randint(len(self.text.tokens) - setup.context, (setup.batch, 1), generator=self.batches)
        window = self.text.tokens[starts + torch.arange(setup.context + 1)].to(self.device)
        loss = F.cross_entropy(self.model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        self.times_ms.append(1000 * (perf_counter() - began))
        return self.losses[-1]

    @property
    def step_ms(self) -> float:
        """Median time of a step, without the first ones, which compile and warm up."""
        return median(self.times_ms[min(5, len(self.times_ms) - 1) :])


@torch.no_grad()
def sample(model: GPT, text: Text, setup: Setup, device: torch.device, length: int = 600, temperature: float = 0.7) -> str:
    """Text that the model writes, character by character, after a passage of the original that is not returned."""
    generator = torch.Generator().manual_seed(setup.seed)
    tokens = text.tokens[: setup.context]
    for _ in range(length):
        logits = model(tokens[-setup.context :][None].to(device))[0, -1].float().cpu()  # one shape: nothing recompiles
        chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, chosen))
    return text.decode(tokens[setup.context :])
