"""What the parts of a result are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63), WithJsonSchema({"type": "integer"})]
"""A whole number of 64 bits: a larger one is no count of anything, and cannot become a float."""


class Model(BaseModel):
    """A part of the result; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


class Points(Model):
    """A part with lists of equal length, an entry for each point; of `edges`, one more.

    Attributes:
        PARALLEL: names of the lists; those with a default may be empty.
    """

    PARALLEL: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _of_equal_length(self) -> Self:
        required = {name for name, field in type(self).model_fields.items() if field.is_required()}
        sizes = {name: len(getattr(self, name)) for name in self.PARALLEL}
        sizes = {name: size for name, size in sizes.items() if size or name in required}
        edges = {"edges less one": sizes.pop("edges") - 1} if "edges" in sizes else {}
        equal(edges | sizes)
        return self


def equal(sizes: Mapping[str, int]) -> None:
    """Refuse lists of different lengths that describe the same points."""
    if len(set(sizes.values())) > 1:
        raise ValueError(f"lists differ in length: {', '.join(f'{n} {size}' for n, size in sizes.items())}")
