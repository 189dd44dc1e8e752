"""What the keys of a site may hold.

What ends up in a scheduler's directive is a `Word`: it has no blanks, quotes or line breaks, so that it is one word to
every parser. Paths and commands may hold anything; they are quoted where they are written (launch/script.py).
"""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from fortyfold.spec.nodes import parse_gpus, parse_memory, parse_seconds

_WORD = re.compile(r"[\w.,:;&|()\[\]*!@/+=~%{}^-]+", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"--[a-z][\w-]*(=\S+)?|-[A-Za-z]( ?\S+)?", re.ASCII)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|NETRC", re.IGNORECASE)


def _check_word(text: str) -> str:
    if not _WORD.fullmatch(text) or text.startswith("-"):
        raise ValueError(f"{text!r} is not one plain word (no blanks, quotes, # or leading -)")
    return text


def _check_line(text: str) -> str:
    """An option of the scheduler's own, in one of its directives."""
    if not _OPTION.fullmatch(text) or not text.isprintable() or any(mark in text for mark in "#'\"\\`$"):
        raise ValueError(
            f"{text!r} is not one option, such as --reservation=maintenance (one each, no blanks, quotes, # or $)"
        )
    return text


def _check_printable(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("must be printable text without line breaks")
    return text


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
    return names


def _check_variables(variables: dict[str, str]) -> dict[str, str]:
    _check_names(tuple(variables))
    for name, value in variables.items():
        if "\0" in value:
            raise ValueError(f"{name} holds a null character")
        if _SECRET.search(name):
            raise ValueError(f"{name} looks like a secret, and variables are written to files; name it in secrets")
    return variables


def _check_text(example: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(f'{value!r} is not text such as "{example}"')
        return value

    return check


def _check_ports(ports: tuple[int, int]) -> tuple[int, int]:
    if ports[0] >= ports[1]:
        raise ValueError(f"[{ports[0]}, {ports[1]}] are not two ports or more; the first comes first")
    return ports


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    if not hosts:
        raise ValueError("there must be one at least")
    if len(set(hosts)) < len(hosts):
        raise ValueError("each may stand there once; procs says how many processes it runs")
    return hosts


def _readable_by(parse: Callable[[Any], object]) -> Callable[[Any], Any]:
    def check(text: Any) -> Any:
        parse(text)
        return text

    return check


Word = Annotated[str, AfterValidator(_check_word)]
Line = Annotated[str, AfterValidator(_check_line)]
Text = Annotated[str, AfterValidator(_check_printable)]
GpuText = Annotated[int | str, AfterValidator(_readable_by(parse_gpus))]
Memory = Annotated[str, BeforeValidator(_check_text("64gb")), AfterValidator(_readable_by(parse_memory))]
Duration = Annotated[str, BeforeValidator(_check_text("1:00:00")), AfterValidator(_readable_by(parse_seconds))]
Port = Annotated[int, Field(ge=1024, le=65535)]
Ports = Annotated[tuple[Port, Port], AfterValidator(_check_ports)]
Hosts = Annotated[tuple[Word, ...], AfterValidator(_check_hosts)]
Variables = Annotated[dict[str, str], AfterValidator(_check_variables)]
Names = Annotated[tuple[str, ...], AfterValidator(_check_names)]
