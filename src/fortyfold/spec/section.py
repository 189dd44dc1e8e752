"""What every section of a recipe is made of: kinds of numbers, and a base that is frozen and strict."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Pixels = Annotated[int, Field(ge=8, le=4096)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


def _refuse_none(value: Any) -> Any:
    if value is None:
        raise ValueError("None cannot be written in TOML; leave out the key that has it")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        _refuse_none(item)
    return value


Arguments = Annotated[dict[str, Any], AfterValidator(_refuse_none)]
"""Whatever somebody else's function takes."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def refuse_idle(self, works: bool, purpose: str, *keys: str) -> None:
        """Unless the keys work, none may differ from its default: who sets one expects something of it."""
        for key in keys:
            if not works and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for {purpose}, and does nothing here; leave it out")
