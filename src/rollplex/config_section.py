"""What every section of the configuration tree has in common. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

SWITCH_WORDS = {"on": True, "yes": True, "off": False, "no": False}


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, and no type is turned into another ("5", 5.0 and true are
    not the whole number 5). Only a list serves as a tuple, and on/off as a switch."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _from_yaml(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list):
            return tuple(value)
        if isinstance(value, str) and cls.model_fields[str(info.field_name)].annotation is bool:
            return SWITCH_WORDS.get(value, value)
        return value
