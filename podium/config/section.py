"""What sections of the settings are made of: their base class, and numbers with a range."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the tree: no unknown keys, no silent conversions, no change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
