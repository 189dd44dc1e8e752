"""From a recipe's name or path, and the user's changes, to a Recipe; every mistake is one line.

A line says where (the file, or the --set that brought the key), which key, what is wrong, and the
nearest valid key where one was misspelt.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fortyfold.spec.errors import UserError
from fortyfold.spec.plugin import nearest
from fortyfold.spec.recipe import Recipe, Section

BUILT_IN = files("fortyfold.recipes")
AnySection = TypeVar("AnySection", bound=Section)


def built_in_names() -> list[str]:
    """The recipes that ship with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in BUILT_IN.iterdir() if entry.name.endswith(".toml"))


def read_text(recipe: str) -> tuple[str, str]:
    """(name, TOML text) of a built-in recipe or of a file."""
    if recipe in built_in_names():
        return recipe, BUILT_IN.joinpath(f"{recipe}.toml").read_text(encoding="utf-8")
    path = Path(recipe)
    if path.suffix != ".toml" and not path.is_file():
        hint = nearest(recipe, built_in_names())
        raise UserError(
            f"no recipe {recipe!r}{hint or '; `fortyfold recipes` lists them, a path to a .toml works too'}"
        )
    try:
        return path.stem, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe {recipe}: {_reason(error)}") from None


def load_recipe(
    recipe: str, changes: Mapping[str, Any] | None = None, options: Mapping[str, str] | None = None
) -> Recipe:
    """The Recipe behind `recipe` (a built-in name or a path) with `changes` (dotted key → value) applied.

    `options` names, for errors, the option that brought a change; the others came by --set.
    """
    name, text = read_text(recipe)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{recipe}: not valid TOML: {error}") from None
    raw.setdefault("name", name)
    for key, value in (changes or {}).items():
        set_key(raw, key, value)
    origins = {key: (options or {}).get(key, f"--set {key}") for key in changes or ()}
    return parse_recipe(raw, source=recipe, origins=origins)


def parse_recipe(raw: Mapping[str, Any], *, source: str, origins: Mapping[str, str] | None = None) -> Recipe:
    """Validate a recipe's plain data; `origins` (by key) and else `source` say in an error where it came from."""
    return parse_section(Recipe, raw, source=source, origins=origins)


def parse_section(
    section: type[AnySection], raw: Mapping[str, Any], *, source: str, origins: Mapping[str, str] | None = None
) -> AnySection:
    """The same of any section by itself."""
    try:
        # JSON and not Python input: strict about types, yet a list may fill a tuple.
        return section.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        raise UserError(_one_line(section, error.errors(), raw, source, origins or {})) from None


def parse_changes(assignments: Sequence[str]) -> dict[str, Any]:
    """`["optim.lr=0.4"]` → `{"optim.lr": 0.4}`: the value is TOML, or else a plain string."""
    changes = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {assignment}: write it as KEY=VALUE, for example --set optim.lr=0.4")
        changes[key.strip()] = _toml_value(text.strip())
    return changes


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` at the dotted `key`; a number in the key counts into a list."""
    *parents, last = key.split(".")
    here: Any = raw
    for part in parents:
        if isinstance(here, dict) and part.isdecimal():
            raise UserError(f"--set {key}: the recipe has no {key.partition(f'.{part}')[0]} to count into")
        here = here[_list_index(here, part, key)] if isinstance(here, list) else here.setdefault(part, {})
        if not isinstance(here, dict | list):
            raise UserError(f"--set {key}: {part} is a value, it has no keys below it")
    if isinstance(here, list):
        here[_list_index(here, last, key)] = value
    else:
        here[last] = value


def flatten(section: BaseModel) -> dict[str, Any]:
    """Every leaf of a recipe by its dotted key, as plain JSON data."""
    return dict(_leaves(section.model_dump(mode="json"), ""))


def _leaves(value: Any, key: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}.{number}")
    else:
        yield key, value


def settable_keys() -> list[str]:
    """Every key that --set may change, by its place in the Recipe; those of phases are counted from 0."""
    keys = _all_keys(Recipe, "")
    return [key.replace("phases.", "phases.0.") for key in keys if not any(k.startswith(f"{key}.") for k in keys)]


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _list_index(items: list[Any], part: str, key: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise UserError(f"--set {key}: {part!r} is not one of its {len(items)} entries (the first is 0)")
    return int(part)


def _one_line(
    section: type[Section],
    errors: list[ErrorDetails],
    raw: Mapping[str, Any],
    source: str,
    origins: Mapping[str, str],
) -> str:
    """The first wrong key, with all that is wrong about it, and how many more keys are."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        by_key.setdefault(_known_part(error["loc"], raw), []).append(error)
    # What is not known may be what is missing, misspelt.
    key, details = min(by_key.items(), key=lambda item: item[1][0]["type"] != "extra_forbidden")
    more = f" (and {len(by_key) - 1} more)" if len(by_key) > 1 else ""
    where = next((origin for set_, origin in origins.items() if f"{key}.".startswith(f"{set_}.")), source)
    if details[0]["type"] == "extra_forbidden":
        return f"{where}: unknown key {key}{_nearest_key(section, key)}{more}"
    if details[0]["type"] == "missing":
        keys = [".".join(map(str, error["loc"])) for error in errors if error["type"] == "missing"]
        lacking = f"{', '.join(keys[:-1])} and {keys[-1]} are" if len(keys) > 1 else f"{keys[0]} is"
        more = f" (and {len(by_key) - 1} more)" if len(by_key) > 1 else ""
        return f"{where}: {lacking} missing{more}"
    messages = " or ".join(dict.fromkeys(_message(error) for error in details))
    return f"{where}: {key}: {messages}{more}" if key else f"{where}: {messages}{more}"


def _known_part(location: tuple[int | str, ...], raw: Any) -> str:
    """The dotted key without pydantic's names for the branches of a union."""
    parts: list[str] = []
    for part in location:
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            break
        parts.append(str(part))
    return ".".join(parts)


def _message(error: ErrorDetails) -> str:
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    given = json.dumps(error["input"], default=str)
    text = error["msg"].removeprefix("Input ")
    return f"{text}, got {given if len(given) < 60 else given[:57] + '…'}"


def _nearest_key(section: type[Section], key: str) -> str:
    parent, _, leaf = key.rpartition(".")
    prefix = "".join(f"{part}." for part in parent.split(".") if part and not part.isdecimal())
    valid = _all_keys(section, "")
    siblings = [k for k in valid if k.startswith(prefix) and "." not in k[len(prefix) :]]
    hint = nearest(prefix + leaf, siblings)
    if hint:
        return hint
    elsewhere = [k for k in valid if k.rpartition(".")[2] == leaf]
    return f"; did you mean {elsewhere[0]}?" if elsewhere else f"; valid here: {', '.join(siblings)}"


def _all_keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for inner in _section_types(field.annotation):
            keys += _all_keys(inner, f"{prefix}{name}.")
    return keys


def _section_types(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in getattr(annotation, "__args__", ()) for section in _section_types(inner)]


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
