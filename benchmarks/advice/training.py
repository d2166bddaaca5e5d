"""Whole training runs: the return that each method reaches, and that `recommend` reaches.

    python benchmarks/advice/training.py [--quick] [--write]

A policy is trained for a few hundred steps of Adam, one batch each. At every step the rollout differs from
it in one way. `recommend` sees a dump of what the trainer itself has sampled, chooses at the start and again
every `AGAIN` steps. Returns are exact.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.advice import draws, page, policies, rollouts, truth, worlds
from benchmarks.advice.dumps import Seen, joined, seen
from benchmarks.advice.rollouts import Rollout
from benchmarks.advice.worlds import Array, Generator, Reward, World, log_softmax

BATCH, STEPS, SEEDS, AGAIN, FIRST = 64, 200, 4, 50, 2048
METHODS = (
    "none",
    "token_tis_2.0",
    "token_icepop_0.5_5.0",
    "seq_tis_2.0",
    "geo_rs_0.1%",
)
Behind = Callable[[list[Array], Generator], Rollout]
"""The policies so far, the last in training → who samples."""


def stale(steps: int) -> Behind:
    """The policy of so many steps ago."""
    return lambda path, rng: rollouts.Fixed((log_softmax(path[max(len(path) - 1 - steps, 0)]),))


def replay(every: int, many: int) -> Behind:
    """Policies of several earlier steps."""
    return lambda path, rng: rollouts.Fixed(
        tuple(log_softmax(path[max(len(path) - 1 - every * k, 0)]) for k in range(many))
    )


def noisy(sigma: float, freedom: float | None = None, corrupted: float = 0.0) -> Behind:
    """The same policy with noise, and rare tokens from elsewhere."""
    return lambda path, rng: rollouts.Noisy(path[-1], sigma, freedom, corrupted, 3.0)


def quantised(size: float) -> Behind:
    """Logits off by amounts that change whenever the weights do."""
    return lambda path, rng: rollouts.Fixed((log_softmax(path[-1] + size * rng.normal(size=path[-1].shape)),))


def temperature(at: float) -> Behind:
    """Sampled at another temperature."""
    return lambda path, rng: rollouts.Fixed((log_softmax(path[-1] / at),))


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    behind: Behind
    reward: Reward
    longest: int


SETTINGS = (
    Setting("t₂ noise 0.15", noisy(0.15, 2.0), "found", 32),
    Setting("quantised 0.3", quantised(0.3), "dense", 16),
    Setting("8 steps old", stale(8), "found", 32),
    Setting("replay of 32 steps", replay(8, 5), "dense", 16),
    Setting("temperature 0.8", temperature(0.8), "found", 32),
    Setting("temperature 1.25", temperature(1.25), "ladder", 32),
    Setting("1 in 100 corrupted", noisy(0.02, None, 0.01), "found", 64),
)


@dataclass
class Adam:
    """The optimiser."""

    size: float = 0.05
    mean: Array | float = 0.0
    square: Array | float = 0.0
    steps: int = 0

    def __call__(self, gradient: Array) -> Array:
        """What is added to the parameters."""
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        return self.size * mean / (np.sqrt(square) + 1e-8)


@dataclass
class Fixed:
    """One method throughout."""

    method: str

    def __call__(self, drawn: draws.Draw, step: int) -> str:
        """It."""
        return self.method


@dataclass
class Chosen:
    """What a policy chooses, from what the trainer has sampled lately."""

    policy: policies.Policy
    method: str = "none"
    kept: list[Seen] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __call__(self, drawn: draws.Draw, step: int) -> str:
        """The method that is in force."""
        self.kept.append(seen(drawn))
        if step % AGAIN == 0:
            self.method = self.policy(joined(self.kept), BATCH)
            self.names.append(self.method)
            self.kept.clear()
        return self.method


def run(setting: Setting, choose: Fixed | Chosen, seed: int, steps: int) -> tuple[float, float]:
    """Mean return over the run, and at its end."""
    world = worlds.make(setting.longest, setting.reward, 900 + seed)
    rng, path, step, returns = np.random.default_rng(seed), [world.theta], Adam(), []
    if isinstance(choose, Chosen):  # what a trainer dumps before it decides
        choose.kept.append(
            seen(draws.draw(world, setting.behind(path, rng), FIRST, np.random.default_rng(seed)))
        )
    for at in range(steps):
        world = world.at(path[-1])
        drawn = draws.draw(world, setting.behind(path, rng), BATCH, rng, at * BATCH)
        method = choose(drawn, at)
        gradient = draws.gradients(world, drawn, {method: drawn.weights()[method]})[method].mean(0)
        path.append(path[-1] + step(gradient).reshape(world.theta.shape))
        if at % 10 == 9:
            returns.append(_return(world.at(path[-1])))
    return float(np.mean(returns)), returns[-1]


def _return(world: World) -> float:
    return float(truth.backward(world, np.exp(log_softmax(world.theta))).start.mean())


def measured(seeds: int, steps: int, settings: tuple[Setting, ...]) -> list[dict[str, object]]:
    """A row for each setting: by method, returns of each seed; and what was chosen."""
    rows = []
    for setting in settings:
        makers = {name: [Fixed(name) for _ in range(seeds)] for name in METHODS}
        makers |= {name: [Chosen(one) for _ in range(seeds)] for name, one in policies.CHOOSING.items()}
        found = {
            name: [run(setting, choose, seed, steps) for seed, choose in enumerate(some)]
            for name, some in makers.items()
        }
        rows.append(
            {
                "name": setting.name,
                "reward": setting.reward,
                "longest": setting.longest,
                "means": {name: [round(one[0], 4) for one in some] for name, some in found.items()},
                "ends": {name: [round(one[1], 4) for one in some] for name, some in found.items()},
                "chosen": {name: [one.names for one in makers[name]] for name in policies.CHOOSING},
            }
        )
        print(
            setting.name,
            {k: round(float(np.mean(v)), 3) for k, v in rows[-1]["ends"].items()},
            file=sys.stderr,
        )
    return rows


def main() -> None:
    """Train, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two short runs; nothing is kept")
    parser.add_argument("--write", action="store_true", help="keep the results and write the page")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(2, 20, SETTINGS[:1]) if given.quick else measured(SEEDS, STEPS, SETTINGS)
    rows = {"batch": BATCH, "steps": STEPS, "seeds": SEEDS, "again": AGAIN, "first": FIRST, "rows": found}
    if given.write and not given.quick:
        page.keep("training", rows)
        page.write()


if __name__ == "__main__":
    main()
