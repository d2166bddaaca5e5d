"""The task: sums in words, with a calculator for products and an answer that can be checked."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

PROMPT = 24  # characters; shorter prompts are filled with spaces on the left
END = "\n"
CHARACTERS = END + " 0123456789abcdefghijklmnopqrstuvwxyz+*=.,:#[]?"
CALL = re.compile(r"\[(\d{1,4})\*(\d{1,2})\]$")

OPENINGS = ("", "", "ok. ", "let me see. ", "start with {a}. ", "we work from left to right. ")
SUMS = (
    "{a}+{b}={c}. ",
    "{a}+{b}={c}. ",
    "then {a}+{b}={c}. ",
    "add {b} to {a}: {c}. ",
    "next we take {a} and add {b}, which gives {c}. ",
    "now {a} plus {b} is {c}. ",
)
PRODUCTS = ("[{a}*{b}]", "we need [{a}*{b}]", "use the tool: [{a}*{b}]")
CHECKS = ("", "", "", "", "check: {a}+{b}={c}. ", "wait, {a}+{b} is {c}, yes. ")
ENDINGS = ("", "", "so ", "the answer is ", "all done, so it is ")


class Problem(NamedTuple):
    """A sum: a start and steps such as ("+", 7), worked from left to right."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def prompt(self) -> str:
        """The question, `PROMPT` characters wide."""
        return f"{self.start} {' '.join(f'{sign}{b}' for sign, b in self.steps)}?".rjust(PROMPT)

    @property
    def answer(self) -> int:
        """The result."""
        total = self.start
        for sign, b in self.steps:
            total = total * b if sign == "*" else total + b
        return total


def problem(chance: random.Random) -> Problem:
    """Draw a problem with one to seven steps; products only while numbers are small."""
    start = total = chance.randint(1, 9)
    steps = []
    for _ in range(chance.randint(1, 7)):
        multiply = total <= 12 and chance.random() < 0.4
        sign, b = ("*", chance.randint(2, 4)) if multiply else ("+", chance.randint(1, 9))
        total = total * b if multiply else total + b
        steps.append((sign, b))
    return Problem(start, tuple(steps))


def solution(given: Problem, chance: random.Random) -> str:
    """Draw one of many right ways to work it out, as text that ends in `#answer`."""
    total = given.start
    text = chance.choice(OPENINGS).format(a=total)
    for sign, b in given.steps:
        text += step(total, sign, b, chance)
        total = total * b if sign == "*" else total + b
    return f"{text}{chance.choice(ENDINGS)}#{total}{END}"


def step(a: int, sign: str, b: int, chance: random.Random) -> str:
    """Write one step in words; the calculator's answer is part of the text, as it is of the context."""
    if sign == "*":
        return chance.choice(PRODUCTS).format(a=a, b=b) + f"={a * b}. "
    return (chance.choice(SUMS) + chance.choice(CHECKS)).format(a=a, b=b, c=a + b)


def tool(text: str) -> str:
    """Return what the calculator inserts after `text`: a product, or an error after a botched call."""
    call = CALL.search(text)
    return f"={int(call[1]) * int(call[2])}. " if call else "=?. "


def reward(given: Problem, response: str) -> float:
    """Return 1 if the response, up to its first `END`, closes with the right answer; else 0."""
    said, ended, _ = response.partition(END)
    return float(bool(ended) and said.endswith(f"#{given.answer}"))


def encode(text: str) -> list[int]:
    """Convert characters to token ids; the id of `END` is 0."""
    return [CHARACTERS.index(c) for c in text]


def decode(tokens: list[int]) -> str:
    """Convert token ids to characters."""
    return "".join(CHARACTERS[t] for t in tokens)
