"""The worth of schedules that are learned over many runs: the gain over tuned rivals, on runs never seen.

DiLoCo with AdamW inside, of which the inner rate, the outer rate, the outer momentum and the times of exchanges are
learned, 16 fresh runs in each step of learning. Rivals are tuned in as many steps, on the same runs.

- mlp: a teacher of each run's own, nodes with inputs around centres of their own and 10 % wrong labels; 10-32-4, K = 4,
  96 steps with 8 exchanges.
- gpt: characters of the source of Python's library, from another place in each run; 2 layers of width 64, K = 8, 300
  steps with 12 exchanges.
- estimators: the variance and the seconds of the gradient through 16 runs of the mlp, and of evolution strategies on
  them, for FedAvg with SGD at three rates.

A step of learning is timed by the seconds of the processor, and as many are taken as `--seconds` allow: so the budget
does not depend on other programs. With `--parts`, a rival "only X" may change X over the run and has the others
constant: what it is better than the constants is what X earns alone. About 8 minutes for each seed, 13 with parts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from figures import WIDTH, save
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from workloads import header, machine, markdown

from vecgym.data import TokenWindows
from vecgym.data.text import encode_text, standard_library_text
from vecgym.meta import Curve, Exchanges, Learned, Report, learn
from vecgym.meta.learning import ESTIMATORS, Learner, LearnOptions
from vecgym.meta.rivals import RIVALS, constants, rivals_of
from vecgym.models import GPT
from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy, FedAvgStrategy

STARTS = {"mlp": (0.01, 12), "gpt": (0.003, 25)}  # inner rate, steps between exchanges
SETTINGS: dict[str, dict[str, Any]] = {
    "mlp": {"num_nodes": 4, "batch_size": 16, "max_steps": 96, "runs_per_step": 16},
    "gpt": {"num_nodes": 8, "batch_size": 4, "max_steps": 300, "runs_per_step": 4, "segments": 20},
}
QUICK = {"max_steps": 24, "runs_per_step": 2, "segments": None}


def mlp(seed: int) -> tuple[nn.Module, Any]:
    """Return a run: a network, and data of a teacher, inputs of each node around a centre of its own."""
    g = torch.Generator().manual_seed(seed)
    first, last = torch.randn(10, 24, generator=g) * 2 / math.sqrt(10), torch.randn(24, 4, generator=g)
    centres = torch.randn(64, 10, generator=g)

    def data(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        own = torch.Generator().manual_seed(100 * seed + 2 * rank + train)
        size = 16 * 96 * 3 if train else 256 // num_nodes
        x = torch.randn(size, 10, generator=own) + centres[rank]
        y = (torch.tanh(x @ first) @ last).argmax(-1)
        wrong = torch.rand(size, generator=own) < 0.1 * train
        return TensorDataset(x, torch.where(wrong, torch.randint(0, 4, (size,), generator=own), y))

    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4)), data


def classify(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(net(batch[0]), batch[1])


class Text:
    """Runs on a part of one text, from a place that the seed chooses."""

    def __init__(self, size: int = 20_000) -> None:
        self.tokens, vocabulary = encode_text(standard_library_text(2_000_000))
        self.num_tokens, self.size = len(vocabulary), size

    def __call__(self, seed: int) -> tuple[nn.Module, Any, Any]:
        g = torch.Generator().manual_seed(seed)
        start = int(torch.randint(len(self.tokens) - self.size, (), generator=g))
        part = self.tokens[start : start + self.size]
        cut = self.size * 9 // 10
        model = GPT(self.num_tokens, context=32, num_layers=2, num_heads=4, width=64)
        return model, TokenWindows(part[:cut], 32), TokenWindows(part[cut:], 32)


def strategy_of(n: Any) -> DiLoCoStrategy:
    """Return DiLoCo with these numbers."""
    outer = OptimSpec("sgd", lr=n.outer_lr, momentum=n.momentum, nesterov=True)
    return DiLoCoStrategy("adamw", outer, lr=n.inner_lr, H=n.when)


def learned_in(case: str, args: argparse.Namespace, seed: int) -> Learned:
    """Learn for as many steps as the seconds allow, by the time of the processor for the second and third step."""
    rate, every = STARTS[case]
    numbers = {
        "inner_lr": Curve(rate), "outer_lr": Curve(0.7), "momentum": Curve(0.6, within=(0, 1)),
        "when": Exchanges(every=12 if args.quick else every),
    }  # fmt: skip
    settings = {**SETTINGS[case], **(QUICK if args.quick else {})}
    settings |= {"runs": mlp if case == "mlp" else Text(), "loss_fn": classify if case == "mlp" else None}
    settings |= {"seed": seed, "device": "cpu", "estimator": args.estimator}
    ends = [time.process_time()]
    for steps in (1, 3):
        learn(strategy_of, numbers, **settings, steps=steps)
        ends.append(time.process_time())
    per_step = (ends[2] - ends[1]) / 3
    return learn(strategy_of, numbers, **settings, steps=1 if args.quick else max(1, round(args.seconds / per_step)))


def report_of(result: Learned, args: argparse.Namespace, case: str) -> Report:
    """Compare with all rivals, and with those that may change one number only."""
    numbers = result.options.numbers
    still = constants(numbers)
    only = {f"only {name}": {**still, name: numbers[name]} for name in numbers}
    rivals = {**rivals_of(numbers, ["constants"] if args.quick else args.rivals), **(only if args.parts else {})}
    only_alike = case == "gpt"  # whose longer runs, and those of more nodes, take an hour of a core
    longer, more = None if only_alike else 3, None if only_alike or args.quick else 2
    return result.report(2 if args.quick else args.runs, rivals, longer=longer, more=more)


def estimators(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the estimators of the gradient by the rate and the times of exchanges, at three rates."""
    rows = []
    for rate in (0.1, 1.0, 3.0):
        settings = {**SETTINGS["mlp"], **(QUICK if args.quick else {}), "runs": mlp, "loss_fn": classify}
        options = LearnOptions(
            lambda n: FedAvgStrategy("sgd", lr=n.lr, H=n.when), {"lr": Curve(rate), "when": Exchanges(every=12)},
            **settings, steps=1, device="cpu",
        )  # fmt: skip
        learner = Learner(options)
        seeds = learner.tasks.seeds("estimators", count=options.runs_per_step)
        drawn = learner.tasks.draw(seeds, options.lengths[0], options.num_nodes)
        row: dict[str, Any] = {"rate": rate}
        for name, estimator in ESTIMATORS.items():
            for _ in range(2):  # the first has to load much
                begin = time.process_time()
                estimate = estimator(learner.tasks, learner.progress.z, drawn, 0)
                seconds = time.process_time() - begin
            row[name] = {"variance": estimate.variance, "seconds": seconds}
        rows.append(row)
    lines = [[f"{row['rate']}", *(f"{row[n]['variance']:.2g} x {row[n]['seconds']:.2f} s" for n in ESTIMATORS)]
             for row in rows]  # fmt: skip
    print(markdown(["rate", *ESTIMATORS], lines), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*SETTINGS, "estimators"], default=["mlp"])
    parser.add_argument("--seconds", type=float, default=60, help="of learning, and of tuning each rival")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="everything is learned anew with each")
    parser.add_argument("--runs", type=int, default=64, help="unseen runs of each kind")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--parts", action="store_true", help="rivals that may change one number, too")
    parser.add_argument("--estimator", choices=["auto", "gradient", "es"], default="gradient")
    parser.add_argument("--figure", type=Path, help="of what was learned with the last seed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header())
    rows = estimators(args) if "estimators" in args.cases else []
    for case in filter(SETTINGS.__contains__, args.cases):
        for seed in args.seeds[: 1 if args.quick else None]:
            result = learned_in(case, args, seed)
            report = report_of(result, args, case)
            print(f"\n{case}, seed {seed}: {result!r}\n", flush=True)
            lines = [[gain.rival, str(gain.num_steps), str(gain.num_nodes), f"{gain.rival_loss:.4f}",
                      f"{gain.loss:.4f}", str(gain)] for gain in report.gains]  # fmt: skip
            print(markdown(["rival", "T", "K", "its loss", "loss learned", "gain (95 %)"], lines), flush=True)
            knots = {name: [round(float(x), 4) for x in result.coordinates.split(4)[i].flatten()]
                     for i, name in enumerate(result.family.numbers)}  # fmt: skip
            print(f"knots: {knots}")
            own = [{**gain._asdict(), "gain": gain.gain._asdict()} for gain in report.gains]
            rows.append({"case": case, "seed": seed, "steps": len(result.rows), "gains": own, "knots": knots})
            if args.figure is not None:
                save(args.figure, [(result.plot(), (WIDTH, 230))])
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
