"""What the metadata of a dump says of its engine, and what K3 is published for such an engine."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

QUANTISED = {
    "W4A4": ("w4a4",),
    "W4A16": ("w4a", "int4", "nf4", "mxfp4", "awq", "gptq"),
    "NVFP4": ("fp4",),
    "fp8": ("fp8", "float8", "e4m3", "e5m2", "f8e"),
    "int8": ("int8", "w8a"),
    "": ("uint", "mxfp", "nvfp", "bitsandbytes", "quantized", "quantised", "quantize"),
}
PLAIN = {
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
    "fp32": ("fp32", "float32"),
}
"""Number format of an engine → words by which metadata say it, in the order in which they are looked for."""
FOUR_BITS = ("W4A4", "W4A16", "NVFP4")
_QUANTISED, _PLAIN = (
    re.compile(f"(?<![a-z0-9])(?<!no )(?<!not )({'|'.join(sum(words.values(), ()))})")
    for words in (QUANTISED, PLAIN)
)
_EXPERTS = re.compile(
    r"moe(?![a-z])|mixtral|experts?|rout(er|ing)[ _-]?replay|gpt-oss|deepseek-(v[23]|r1)|b-a[0-9.]+b"
)
_TRAINER = re.compile(r"^(train|actor|learner|old|optim)")
_ENGINE = re.compile("rollout|engine|infer|generat|sampl|vllm|sglang|quanti")
_DTYPE = re.compile("dtype|precision|quanti|engine|rollout")
"""Words of an engine's number format or of experts; and, in keys, of a trainer, an engine and a format."""


class Recorded(NamedTuple):
    """What metadata says of an engine, as `key: value` or empty: few bits, another number format, experts."""

    quantised: str = ""
    plain: str = ""
    experts: str = ""

    @property
    def precision(self) -> str:
        """The number format of the engine, one of `QUANTISED` or `PLAIN`, or empty."""
        said, formats = (self.quantised or self.plain).lower(), QUANTISED if self.quantised else PLAIN
        return next((name for name, words in formats.items() if any(word in said for word in words)), "")


def recorded(provenance: Mapping[str, object]) -> Recorded:
    """Find number formats and experts in the metadata; what is said of the trainer alone is left out."""
    quantised = plain = experts = ""
    for path, value in _leaves(provenance):
        said = f"{path[-1]}: {value}"
        name = " ".join(path).lower().replace("actor_rollout_ref", "")
        text = name if value is True else value.lower() if isinstance(value, str) else ""
        many = isinstance(value, int) and value > 1 and "expert" in path[-1].lower()
        if not experts and (many or _EXPERTS.search(text)):
            experts = said
        if any(_TRAINER.match(part.lower()) for part in path) and not _ENGINE.search(name):
            continue
        if not quantised and _QUANTISED.search(text):
            quantised = said
        elif not plain and _DTYPE.search(name) and _PLAIN.search(text):
            plain = said
    return Recorded(quantised, "" if quantised else plain, experts)


def _leaves(value: object, path: tuple[str, ...] = ("",)) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else (("", one) for one in value)
        for key, one in pairs:
            yield from _leaves(one, (*path, str(key)) if key else path)
    else:
        yield path, value


# ---------------------------------------------------------------- what is published

TIMES, MOST_EXCUSED = 10.0, 0.3
"""Times what is published of a number format, and nats of any format, above which it excuses no K3 at lag 0:
a usual token is then off by a factor of two, which no format is published to do."""


class Floor(NamedTuple):
    """K3 from `low` to `high`, nats per token, of what the metadata of a dump must say.

    That is a number format, with experts or without, and some words in lower case: a trainer, an engine, a
    size. `regime` says what it was measured on, `source` who published it.
    """

    low: float
    high: float
    regime: str
    source: str
    precision: str
    experts: bool = False
    says: Sequence[str] = ()

    def of(self, said: Recorded) -> bool:
        """Return whether it is of a number format, with experts or without."""
        return self.precision == said.precision and self.experts == bool(said.experts)


_TEXT = files("offpol_diag").joinpath("data", "floors.toml").read_text(encoding="utf-8")
FLOORS = tuple(Floor(**row) for row in tomllib.loads(_TEXT)["floor"])


def observed() -> list[tuple[str, str, str, str, str]]:
    """Return the rows as those of `metrics.REGIMES`: number, band, range, regime and source."""
    return [("k3", "–", f"{one.low:g} to {one.high:g}", one.regime, one.source) for one in FLOORS]


def ceiling(said: Recorded) -> float:
    """Return the K3 at lag 0, nats, above which what the metadata say excuses nothing."""
    return min([MOST_EXCUSED, *(TIMES * one.high for one in FLOORS if one.of(said) and not one.says)])
