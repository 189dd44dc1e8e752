"""A recipe as TOML text, the inverse of reading it: what `recipes show` prints can be trained as it is."""

import json
import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def to_toml(section: BaseModel, *, explain: bool = False) -> str:
    """TOML for `section`; with `explain`, each key has its documentation above it, and those not set are comments.

    Of several entries (phases) the first is explained.
    """
    return "\n".join(_lines(section, "", explain)).strip() + "\n"


def _lines(section: BaseModel, prefix: str, explain: bool) -> list[str]:
    plain: list[str] = []
    tables: list[str] = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            tables += ["", f"[{prefix}{key}]", *_lines(value, f"{prefix}{key}.", explain)]
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for number, item in enumerate(value):
                tables += ["", f"[[{prefix}{key}]]", *_lines(item, f"{prefix}{key}.", explain and number == 0)]
        else:
            plain += _explanation(field) if explain else []
            if value is not None:
                plain.append(f"{key} = {_value(value)}")
            elif explain:
                plain.append(f"# {key} is not set")
    return plain + tables


def _explanation(field: FieldInfo) -> list[str]:
    return textwrap.wrap(field.description or "", 100, initial_indent="# ", subsequent_indent="# ")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{_value(key)} = {_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(pairs) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
