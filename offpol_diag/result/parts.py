"""What the parts of a result are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63), WithJsonSchema({"type": "integer"})]
"""A whole number of 64 bits: a larger one is no count of anything, and cannot become a float."""


class Model(BaseModel):
    """A part of the result; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


class Points(Model):
    """A part whose lists are of equal length, an entry for each point; those with a default may be empty.

    Of `edges`, there is one more.
    """

    @model_validator(mode="after")
    def _of_equal_length(self) -> Self:
        fields, lists = type(self).model_fields, {name: x for name, x in self if isinstance(x, list)}
        sizes = {name: len(x) for name, x in lists.items() if x or fields[name].is_required()}
        edges = {"edges less one": sizes.pop("edges") - 1} if "edges" in sizes else {}
        equal(edges | sizes)
        return self


def equal(sizes: Mapping[str, int]) -> None:
    """Refuse lists of different lengths that describe the same points."""
    if len(set(sizes.values())) > 1:
        raise ValueError(f"lists differ in length: {', '.join(f'{n} {size}' for n, size in sizes.items())}")
