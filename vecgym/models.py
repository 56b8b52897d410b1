"""Models: a small GPT, as in `vecgym compare`; a classifier around any network; a model with one parameter."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vecgym.core import check


class GPT(nn.Module):
    """A decoder-only transformer as in nanoGPT: pre-norm blocks, GELU, learned positions, no biases.

    `model((tokens, targets))`, both int64 `[B, T]` with T <= `context`, is the mean cross-entropy in nats.

    Number of parameters, with V = `vocab_size`, C = `width`: embedding V C, shared with the head; positions
    `context` C; per layer 12 C^2 in matrices (4 C^2 attention, 8 C^2 MLP) and 2 C in norms; last norm C.

    Args:
        vocab_size: V, the number of different tokens.
        context: the maximal number of tokens in a sequence.
        num_layers: the number of blocks of attention and MLP.
        num_heads: the number of attention heads; must divide `width`.
        width: C, the size of a token's vector.
        dropout: the probability of dropping an entry, in [0, 1).

    Raises:
        ValueError: for sizes < 1, a width that num_heads does not divide, or a dropout outside [0, 1); in a call, for
            more tokens than `context`.

    >>> model = GPT(vocab_size=65, context=32, num_layers=2, num_heads=4, width=64)
    >>> 65 * 64 + 32 * 64 + 2 * (12 * 64**2 + 2 * 64) + 64, sum(p.numel() for p in model.parameters())
    (104832, 104832)
    >>> tokens = torch.zeros(8, 32, dtype=torch.long)
    >>> model.logits(tokens).shape, model((tokens, tokens)).shape
    (torch.Size([8, 32, 65]), torch.Size([]))

    Reference: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019;
    https://github.com/karpathy/nanoGPT.
    """

    loss_metrics: ClassVar[dict[str, Any]] = {"perplexity": torch.exp}  # e^loss: see `vecgym.runs.evaluation`

    @check.strict
    def __init__(
        self,
        vocab_size: int,
        context: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        width: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "context": context, "num_layers": num_layers, "num_heads": num_heads,
                 "width": width}  # fmt: skip
        for name, size in sizes.items():
            check.integer(name, size)
        if width % num_heads != 0:
            divisors = [n for n in range(1, width + 1) if width % n == 0]
            raise ValueError(f"num_heads={num_heads} must divide width={width}: give one of {divisors}.")
        check.number("dropout", dropout, "[0, 1)", "the probability of dropping an entry")
        self.vocab_size = vocab_size
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([_Block(width, num_heads, dropout) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        self._initialize(num_layers, width)

    def _initialize(self, num_layers: int, width: int) -> None:
        """Draw matrices from N(0, 0.02^2 * 768 / width), as GPT-2 at its width of 768, so that x W has the same scale.

        Matrices whose outputs add up along the residual stream start smaller, so that the sum does not grow.
        """
        std = 0.02 * math.sqrt(768 / width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(p, std=std / math.sqrt(2 * num_layers) if residual else std)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy of the targets, in nats; batch = (tokens `[B, T]`, targets `[B, T]`)."""
        tokens, targets = batch
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token: `[B, T]` -> `[B, T, V]`."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"tokens has {length} positions, but context={self.context}: give at most {self.context}.")
        x = self.dropout(self.tokens(tokens) + self.positions.weight[:length])  # [B, T, C]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        num_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Append `num_tokens` samples to each row of tokens, without dropout: `[B, T]` -> `[B, T + num_tokens]`.

        Args:
            tokens: int64 `[B, T]`, T >= 1; only the last `context` of them are used.
            num_tokens: the number of tokens to append to each row.
            temperature: divides the logits; 0: take the most likely token.
            top_k: sample from the k most likely tokens only; None: from all.
            generator: of the random numbers; None: torch's global generator.

        >>> model = GPT(vocab_size=5, context=4, num_heads=1, width=8)
        >>> model.generate(torch.tensor([[1, 2]]), num_tokens=6).shape
        torch.Size([1, 8])
        """
        check.instance("tokens", tokens, Tensor, "an int64 tensor [B, T]")
        check.instance("generator", generator, (torch.Generator, type(None)), "a torch.Generator, or None")
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens is a tensor of {tokens.dtype}; give int64, one number for each token.")
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise ValueError(f"tokens has shape {list(tokens.shape)}; it must be [B, T] with T >= 1.")
        check.integer("num_tokens", num_tokens, 0)
        check.number("temperature", temperature, "[0, inf)", "0 takes the most likely token")
        check.optional_integer("top_k", top_k, what="None samples from all tokens")
        was_training = self.training
        self.eval()
        try:
            for _ in range(num_tokens):
                logits = self.logits(tokens[:, -self.context :])[:, -1]  # [B, V]
                tokens = torch.cat([tokens, _sample(logits, temperature, top_k, generator)], dim=1)
        finally:
            self.train(was_training)
        return tokens


class Classifier(nn.Module):
    """A network with the loss of a classifier, which reports its accuracy in validation.

    `model((inputs, targets))`, targets int64 `[B]`, is the mean cross-entropy in nats. `val_metrics` adds the accuracy,
    the fraction of the examples with the largest output at the target: columns `val_accuracy`, `val_accuracy_local`.

    Args:
        net: inputs `[B, ...]` -> outputs `[B, C]`, one for each of C classes. The classifier starts in its mode, so
            that a network in eval mode is trained as a model in eval mode: all of it in training mode.

    >>> model = Classifier(nn.Linear(2, 3))
    >>> sorted(model.val_metrics((torch.zeros(8, 2), torch.zeros(8, dtype=torch.long))))
    ['accuracy', 'loss']
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = check.instance("net", net, nn.Module, "a network whose outputs are logits, nn.Linear(20, 4) say")
        self.training = net.training

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy, in nats."""
        inputs, targets = batch
        return F.cross_entropy(self.net(inputs), targets)

    def val_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return loss and accuracy, averaged over the batch."""
        inputs, targets = batch
        outputs = self.net(inputs)
        accuracy = (outputs.argmax(1) == targets).to(outputs.dtype).mean()
        return {"loss": F.cross_entropy(outputs, targets), "accuracy": accuracy}


class _Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = _Attention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class _Attention(nn.Module):
    """Causal self-attention, `[B, T, C]` -> `[B, T, C]`."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, T, C / heads]
        rate = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.dropout(self.project(y.transpose(1, 2).flatten(2)))


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Sample a token for each row: `[B, V]` -> `[B, 1]`."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


class Line(nn.Module):
    """One parameter w, initially 0, with the loss mean((w - x)^2), whose minimum is at the mean of x.

    Its training can be followed by hand, so the examples of this library use it.

    >>> line = Line()
    >>> loss = line(torch.tensor([1.0, 3.0]))
    >>> loss.backward()
    >>> loss.item(), line.w.grad.item()
    (5.0, -4.0)
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x).square().mean()
