"""Lion and both kinds of Muon as their papers and authors write them: one model, parameter after parameter."""

import torch


class Lion:
    """Chen et al. 2023, arXiv 2302.06675, algorithm 2."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        self.params, self.lr, self.betas, self.weight_decay = list(params), lr, betas, weight_decay
        self.moments = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        beta1, beta2 = self.betas
        for i, p in enumerate(self.params):
            m = self.moments[i]
            c = beta1 * m + (1 - beta1) * p.grad
            p -= self.lr * (torch.sign(c) + self.weight_decay * p)
            self.moments[i] = beta2 * m + (1 - beta2) * p.grad


class Muon:
    """Jordan et al. 2024, kellerjordan.github.io/posts/muon, with the conventions of `torch.optim.Muon`."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, ns_steps=5, rounded=True):
        self.params, self.lr, self.weight_decay, self.rounded = list(params), lr, weight_decay, rounded
        self.momentum, self.ns_steps = momentum, ns_steps
        self.moments = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.params):
            self.moments[i] = self.momentum * self.moments[i] + (1 - self.momentum) * p.grad
            update = self.momentum * self.moments[i] + (1 - self.momentum) * p.grad
            p -= self.lr * self.weight_decay * p
            p -= self.lr * max(1, p.shape[0] / p.shape[1]) ** 0.5 * self.orthogonal(update).to(p.dtype)

    def orthogonal(self, update):
        a, b, c = 3.4445, -4.7750, 2.0315
        x = update.bfloat16() if self.rounded else update
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(self.ns_steps):
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        return x.T if update.shape[0] > update.shape[1] else x


class DionMuon:
    """github.com/microsoft/dion, dion/muon.py, as the authors of MuLoCo (arXiv 2505.23725) have it: `nesterov=False`,
    `adjust_lr="spectral_norm"`. The momentum is a sum, each Newton-Schulz step has coefficients of its own, and the
    scale sqrt(rows / columns) may be below 1.
    """

    STEPS = (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )

    def __init__(self, params, lr=0.01, weight_decay=0.01, momentum=0.95, eps=1e-8, rounded=True):
        self.params, self.eps, self.rounded = list(params), eps, rounded
        self.param_groups = [{"lr": lr, "weight_decay": weight_decay, "momentum": momentum}]
        self.moments = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        lr, decay, momentum = self.param_groups[0].values()
        for i, p in enumerate(self.params):
            self.moments[i] = momentum * self.moments[i] + p.grad
            p *= 1 - lr * decay
            p -= lr * (p.shape[0] / p.shape[1]) ** 0.5 * self.orthogonal(self.moments[i]).to(p.dtype)

    def orthogonal(self, m):
        x = m.bfloat16() if self.rounded else m
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / (x.norm() + self.eps)
        for a, b, c in self.STEPS:
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if m.shape[0] > m.shape[1] else x
