"""What the metadata of a dump says of its engine, and up to which K3 that excuses a mismatch."""

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
PLAIN = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half"), "fp32": ("fp32", "float32")}
"""Number format of an engine → words that name it in metadata, in the order in which they are looked for."""
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


class Metadata(NamedTuple):
    """What metadata says of the engine.

    Attributes:
        quantised: the entry that names a quantised number format, as `key: value`, or empty.
        plain: the entry that names another number format, or empty.
        experts: the entry that names a mixture of experts, or empty.
    """

    quantised: str = ""
    plain: str = ""
    experts: str = ""

    @classmethod
    def of(cls, provenance: Mapping[str, object]) -> Metadata:
        """Find number formats and experts; entries about the trainer alone say no number format."""
        quantised = plain = experts = ""
        for path, value in _leaves(provenance):
            entry = f"{path[-1]}: {value}"
            keys = " ".join(path).lower().replace("actor_rollout_ref", "")
            text = keys if value is True else value.lower() if isinstance(value, str) else ""
            several = isinstance(value, int) and value > 1 and "expert" in path[-1].lower()
            if not experts and (several or _EXPERTS.search(text)):
                experts = entry
            if any(_TRAINER.match(key.lower()) for key in path) and not _ENGINE.search(keys):
                continue
            if not quantised and _QUANTISED.search(text):
                quantised = entry
            elif not plain and _DTYPE.search(keys) and _PLAIN.search(text):
                plain = entry
        return cls(quantised, "" if quantised else plain, experts)

    @property
    def precision(self) -> str:
        """The number format of the engine, one of `QUANTISED` or `PLAIN`, or empty."""
        entry, formats = (self.quantised or self.plain).lower(), QUANTISED if self.quantised else PLAIN
        return next((name for name, words in formats.items() if any(word in entry for word in words)), "")

    @property
    def ceiling(self) -> float:
        """K3 at lag 0, nats, above which the number format excuses nothing."""
        own = self.precision, bool(self.experts)
        highest = [one.high for one in FLOORS if (one.precision, one.experts) == own and not one.says]
        return min([MOST_EXCUSED, *(TIMES * high for high in highest)])


def _leaves(value: object, path: tuple[str, ...] = ("",)) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield each plain value of nested mappings and lists, with the keys that lead to it."""
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else (("", one) for one in value)
        for key, one in pairs:
            yield from _leaves(one, (*path, str(key)) if key else path)
    else:
        yield path, value


# ---------------------------------------------------------------- what is published

TIMES, MOST_EXCUSED = 10.0, 0.3
"""Times what is published of a number format, and nats of any format, above which it excuses no K3 at lag 0:
a usual token is then off by a factor of two, more than is published of any format."""


class Floor(NamedTuple):
    """Published K3 of runs without a known fault, from `low` to `high` nats per token.

    `regime` says what it was measured on, `source` who published it, `precision` and `experts` which number
    format it is of, and whether of a mixture of experts. A row with `says`, words of a trainer, an engine or
    a size, is of a single run, and bounds nothing.
    """

    low: float
    high: float
    regime: str
    source: str
    precision: str
    experts: bool = False
    says: Sequence[str] = ()


_TEXT = files("offpol_diag").joinpath("data", "floors.toml").read_text(encoding="utf-8")
FLOORS = tuple(Floor(**row) for row in tomllib.loads(_TEXT)["floor"])


def observed() -> list[tuple[str, str, str, str, str]]:
    """Return the rows as number, band, range, regime and source."""
    return [("k3", "–", f"{one.low:g} to {one.high:g}", one.regime, one.source) for one in FLOORS]
