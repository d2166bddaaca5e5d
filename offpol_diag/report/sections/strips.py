"""The worst responses token by token, and the token ids that carry the mismatch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from offpol_diag.numerals import say
from offpol_diag.summary import Number, Summary, WorstSequence

STEPS = (1.1, 2.0, 10.0, 1000.0)
"""Factors between the policies at which the colour of a token changes."""


@dataclass(frozen=True)
class Token:
    """A token: its text or id, its colour (n1 to n4: less likely under the trainer; p1 to p4), a remark."""

    text: str
    look: str
    remark: str


@dataclass(frozen=True)
class Response:
    """A response as a strip of tokens."""

    name: str
    facts: str
    tokens: tuple[Token, ...]


def responses(summary: Summary) -> tuple[Response, ...]:
    """Return the worst responses, those that have a strip."""
    return tuple(_response(one, summary.charts.token_texts) for one in summary.worst.sequences if one.strip)


def typical(summary: Summary) -> Response | None:
    """Return an ordinary response, for comparison."""
    one = summary.worst.typical
    return _response(one, summary.charts.token_texts) if one and one.strip else None


def title(summary: Summary) -> str:
    """Return a finding on the worst responses: their step and reward."""
    worst = [one for one in summary.worst.sequences if one.strip]
    many = f"The {len(worst)} worst responses"
    steps = [one.step for one in worst if one.step is not None]
    usual = max(set(steps), key=steps.count) if steps else None
    several = "step" in summary.by and len(summary.by["step"].places) > 1
    parts = [f"{steps.count(usual)} come from step {usual}"] if usual is not None and several else []
    rewards = {one.reward for one in worst}
    if len(rewards) == 1 and None not in rewards and len(worst) > 1:
        parts.append(f"all scored {say(Number(value=rewards.pop()))}")
    return f"{many}: {', and '.join(parts)}" if parts else many


def types(summary: Summary) -> str:
    """Return a finding on the token ids that carry K3."""
    found = summary.charts.token_types
    if found is None or not found.half:
        return ""
    return f"{found.half} of {found.distinct} token ids carry half of K3"


def _response(one: WorstSequence, texts: Mapping[str, str]) -> Response:
    assert one.strip is not None
    strip = one.strip
    facts = [f"step {one.step}"] if one.step is not None else []
    facts += [f"lag {one.policy_lag}"] if one.policy_lag is not None else []
    facts += [f"{one.length} tokens", f"mean K3 {say(Number(value=one.k3_mean))}"]
    facts += [f"reward {say(Number(value=one.reward))}"] if one.reward is not None else []
    facts += [f"from token {strip.first}"] if strip.first else []
    ids = [str(one) for one in strip.token_ids or strip.positions]
    if strip.token_ids:
        ids = [texts.get(one, one) for one in ids]
    tokens: list[Token] = []
    for place, delta in enumerate(strip.log_ratios):
        if place and strip.positions[place] != strip.positions[place - 1] + 1:
            gap = strip.positions[place] - strip.positions[place - 1] - 1
            tokens.append(Token(f"[{gap} masked]", "mk", ""))
        probs = (math.exp(strip.rollout_log_probs[place]), math.exp(min(strip.train_log_probs[place], 700)))
        look = shade(delta)
        said = f"position {strip.positions[place]}: Δ {delta:+.3g}, "
        said += f"π_rollout {probs[0]:.3g}, π_train {probs[1]:.3g}"
        tokens.append(Token(ids[place], look, said if look[1:] in ("3", "4") else ""))
    return Response(one.sequence_id, " · ".join(facts), tuple(tokens))


def shade(delta: float) -> str:
    """Return the colour of a token by its log-ratio; empty if both policies agree within a factor of 1.1."""
    strength = sum(abs(delta) >= math.log(step) for step in STEPS)
    return f"{'n' if delta < 0 else 'p'}{strength}" if strength else ""
