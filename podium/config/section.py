"""The base class of config sections, and number types with a range."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
SMALLEST, LARGEST = 1e-6, 1e6
"""Smallest and largest temperature and penalty, and smallest top_p: dividing by a smaller number overflows float32."""
Divisor = Annotated[float, Field(ge=SMALLEST, le=LARGEST, allow_inf_nan=False)]
"""A temperature or a penalty, by which logits are divided."""


class Section(BaseModel):
    """A section of the settings: rejects unknown keys, converts nothing silently, and is immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
