"""A recipe as TOML text, the inverse of reading it: what `recipes show` prints can be trained as it is."""

import json
import textwrap
from typing import Any

from pydantic import BaseModel


def to_toml(section: BaseModel, *, explain: bool = False) -> str:
    """TOML for `section`; with `explain`, each key's documentation stands above it as a comment."""
    return "\n".join(_lines(section, "", explain)).strip() + "\n"


def _lines(section: BaseModel, prefix: str, explain: bool) -> list[str]:
    plain: list[str] = []
    tables: list[str] = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if value is None:
            continue
        if isinstance(value, BaseModel):
            tables += ["", f"[{prefix}{key}]", *_lines(value, f"{prefix}{key}.", explain)]
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for item in value:
                tables += ["", f"[[{prefix}{key}]]", *_lines(item, f"{prefix}{key}.", explain)]
        else:
            if explain and field.description:
                plain += textwrap.wrap(field.description, 100, initial_indent="# ", subsequent_indent="# ")
            plain.append(f"{key} = {_value(value)}")
    return plain + tables


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(pairs) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
