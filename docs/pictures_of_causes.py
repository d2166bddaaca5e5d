"""Draw what causes look like, from dumps with a planted fault: `python -m docs.pictures_of_causes`.

The pictures are written to docs/pictures/causes; `docs/causes.md` shows those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.faults import (
    Policy,
    capped,
    changed,
    colder,
    log_softmax,
    nucleus,
    penalised,
    responses,
)

FOLDER = Path(__file__).parent / "pictures" / "causes"
WIDTH, HEIGHT, LEFT, BELOW, EDGE = 420, 250, 52, 40, 12
DOTS, STEPS = 700, 9
Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Sequence[npt.NDArray[np.float32]]]
LOW = -6.0
"""Smallest log-prob of the axes, nats."""


# ---------------------------------------------------------------- drawing


def picture(
    x: Floats, y: Floats, ends: tuple[float, float, float, float], names: tuple[str, str], line: bool
) -> str:
    """Return a chart as SVG: points (x, y), or a line through them, within `ends` (x, x, y, y)."""
    left, right, low, high = ends
    across = LEFT + (np.clip(x, left, right) - left) / (right - left) * (WIDTH - LEFT - EDGE)
    down = EDGE + (high - np.clip(y, low, high)) / (high - low) * (HEIGHT - BELOW - EDGE)
    places = [f"{a:.0f} {d:.0f}" for a, d in zip(across, down, strict=True)]
    path = "M" + (" L".join(places) if line else "h0M".join(dict.fromkeys(places)) + "h0")
    foot, side = HEIGHT - BELOW, WIDTH - EDGE
    style = 'stroke-width="2"' if line else 'stroke-width="3" stroke-linecap="round" stroke-opacity="0.45"'
    agree = "" if line else f'<path d="M{LEFT} {foot}L{side} {EDGE}" stroke="#999" stroke-dasharray="4 3"/>'
    text = '<text x="{}" y="{}" text-anchor="{}" font-size="12" fill="#444" stroke="none">{}</text>'
    texts = (
        text.format((LEFT + side) / 2, HEIGHT - 8, "middle", names[0]),
        text.format(LEFT, foot + 15, "middle", f"{left:g}"),
        text.format(side, foot + 15, "end", f"{right:g}"),
        text.format(LEFT - 6, foot, "end", f"{low:g}"),
        text.format(LEFT - 6, EDGE + 8, "end", f"{high:.2g}"),
        f'<g transform="rotate(-90 14 {(foot + EDGE) / 2})">'
        + text.format(14, (foot + EDGE) / 2 + 4, "middle", names[1])
        + "</g>",
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" fill="none">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>'
        f'<path d="M{LEFT} {EDGE}V{foot}H{side}" stroke="#999"/>{agree}'
        f'<path d="{path}" stroke="#2563b0" {style}/>{"".join(texts)}</svg>\n'
    )


def scattered(columns: Columns) -> str:
    """Draw the train log-prob of tokens over their rollout log-prob; dashed: equal."""
    q, p = (np.concatenate(list(columns[name])) for name in ("rollout_log_probs", "old_log_probs"))
    some = np.random.default_rng(0).permutation(np.flatnonzero((q > LOW) | (q < -99)))[:DOTS]
    axes = ("log π_rollout of the sampled token", "log π_train")
    return picture(np.maximum(q[some], LOW), p[some], (LOW, 0.0, LOW, 0.0), axes, False)


def by_position(columns: Columns) -> str:
    """Draw the mean |Δ| by the place in the response."""
    many = 40
    rows = [
        np.abs(p - q)[:many]
        for q, p in zip(columns["rollout_log_probs"], columns["old_log_probs"], strict=True)
        if len(q) >= many
    ]
    level = np.mean(rows, axis=0)
    axes = ("token of the response", "mean |Δ|, nats")
    return picture(np.arange(1.0, many + 1), level, (1.0, many, 0.0, float(level.max())), axes, True)


def by_step(level: Sequence[float]) -> str:
    """Draw K3 by training step."""
    axes = ("training step", "K3, nats")
    found = np.array(level)
    return picture(np.arange(len(level)) * 1.0, found, (0, len(level) - 1, 0, float(found.max())), axes, True)


# ---------------------------------------------------------------- dumps


def k3(columns: Columns) -> float:
    """Return the mean of e^Δ − 1 − Δ."""
    q, p = (np.concatenate(list(columns[name])) for name in ("rollout_log_probs", "old_log_probs"))
    return float(np.mean(np.expm1(p - q) - (p - q)))


def sampled(engine: Policy, trainer: Policy, logged: Policy | None = None) -> Columns:
    """Return a dump of an engine and a trainer."""
    found: Columns = responses(lambda t: engine, trainer, logged=logged)
    return found


def rewritten(change: Callable[[Floats], Floats], name: str = "rollout_log_probs") -> Columns:
    """Return a dump of one policy whose column is changed."""
    columns = sampled(Policy(), Policy().moved(0.02))
    return {**columns, name: [change(row.astype(float)) for row in columns[name]]}


def steps(behind: Sequence[int]) -> list[float]:
    """Return K3 of steps at which the engine is so many updates behind."""
    return [k3(sampled(Policy(), Policy().moved(0.08 * lag + 0.005))) for lag in behind]


def grown(engine: Callable[[int], Policy]) -> Columns:
    """Return a dump whose engine changes along the response."""
    found: Columns = responses(engine, Policy(), lengths=(40, 60))
    return found


def other_prompt() -> Policy:
    """Return a policy that is given other prompts."""
    policy = Policy().moved(0.0)
    policy.begin = Policy().begin[::-1]
    return policy


def missing(row: Floats) -> Floats:
    """Return log-probs of which some are 0."""
    return np.where(np.random.default_rng(len(row)).random(len(row)) < 0.1, 0.0, row)


def first(row: Floats) -> Floats:
    """Return log-probs whose first one is wrong."""
    return np.concatenate([[row[0] - 1.5], row[1:]])


def main() -> None:
    """Draw every picture."""
    one, cut = (
        Policy(),
        changed(Policy(), lambda logits, seen: np.maximum(nucleus(log_softmax(logits), 0.85), -30.0)),
    )
    drawn = {
        "numerics": scattered(sampled(one, one.moved(0.02))),
        "quantized_rollout": scattered(sampled(one.moved(0.1), one)),
        "off_by_one": scattered(rewritten(lambda row: np.roll(row, 1), "old_log_probs")),
        "sentinel": scattered(rewritten(missing)),
        "low_precision_storage": scattered(rewritten(lambda row: np.round(row * 4) / 4)),
        "log_base": scattered(rewritten(lambda row: row / np.log(2), "old_log_probs")),
        "rollout_raw_logprobs": scattered(sampled(colder(0.6, one), colder(0.6, one), one)),
        "trainer_temperature": scattered(sampled(colder(0.6, one), one)),
        "truncated_sampling": scattered(sampled(cut, one)),
        "repetition_penalty": scattered(sampled(penalised(one), one)),
        "softcap": scattered(sampled(one, capped(one, 3.0))),
        "model_differs": scattered(sampled(one, one.moved(0.5))),
        "boundary": by_position(rewritten(first, "old_log_probs")),
        "wrong_context": by_position(sampled(other_prompt(), one)),
        "long_context": by_position(grown(lambda t: one.moved(0.4 if t >= 24 else 0.02))),
        "stale": by_step(steps([0, 1, 2, 1, 0, 1, 2, 1, 0])),
        "sync_stopped": by_step(steps([0, 0, 0, *range(1, STEPS - 2)])),
        "sync_period": by_step(steps([step % 4 for step in range(STEPS)])),
        "sync_corrupts": by_step(steps([0, *[4] * (STEPS - 1)])),
    }
    for name, text in drawn.items():
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
