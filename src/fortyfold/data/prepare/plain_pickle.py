"""Reads the pickles of CIFAR-10 without unpickling: a small machine that can only build plain values.

It knows dicts, lists, tuples, bytes, text, integers and NumPy's byte arrays, as Python 2 wrote them. Whatever
else a pickle asks for, above all any function, is refused by name, and nothing is imported or called.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

_ARRAY, _DTYPE = "numpy.core.multiarray _reconstruct", "numpy dtype"
_KNOWN = {_ARRAY, _DTYPE, "numpy ndarray"}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "UNICODE", "BINUNICODE"}
_BYTES = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # Python 2's str
_FIXED_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


class PickleRefused(ValueError):
    """A pickle that is damaged, or asks for more than plain values; says what for."""


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass
class ByteArray:
    """A NumPy array of unsigned bytes, in C order."""

    shape: tuple[int, ...] = ()
    data: bytes = b""


def load_plain(pickled: bytes) -> Any:
    """The value of a pickle; bytes for Python 2's str."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            machine.take(opcode.name, argument)
        return machine.pop()
    except PickleRefused:
        raise
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise PickleRefused(f"it is damaged ({error})") from None


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self.stack.pop()

    def take(self, name: str, argument: Any) -> None:
        """One instruction."""
        if name in _LITERALS or name in _CONSTANTS:
            self.stack.append(_CONSTANTS.get(name, argument))
        elif name in _BYTES:
            self.stack.append(argument.encode("latin-1"))
        elif name in _PUTS:
            self.memo[argument] = self.stack[-1]
        elif name in _GETS:
            self.stack.append(self.memo[argument])
        elif name in _FIXED_TUPLES:
            self.stack.append(tuple(self._last(_FIXED_TUPLES[name])))
        else:
            self._take_compound(name, argument)

    def _take_compound(self, name: str, argument: Any) -> None:
        match name:
            case "PROTO" | "STOP":
                pass
            case "MARK":
                self.marks.append(len(self.stack))
            case "EMPTY_DICT":
                self.stack.append({})
            case "EMPTY_LIST":
                self.stack.append([])
            case "DICT":
                self.stack.append(_pairs(self._since_mark()))
            case "LIST":
                self.stack.append(self._since_mark())
            case "TUPLE":
                self.stack.append(tuple(self._since_mark()))
            case "APPEND" | "APPENDS":
                items = self._since_mark() if name == "APPENDS" else self._last(1)
                _of_type(list, self.stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._since_mark() if name == "SETITEMS" else self._last(2)
                _of_type(dict, self.stack[-1]).update(_pairs(items))
            case "GLOBAL":
                if argument not in _KNOWN:
                    raise PickleRefused(f"it asks for {argument.replace(' ', '.')!r}")
                self.stack.append(_Global(argument))
            case "REDUCE":
                self._reduce(*self._last(2))
            case "BUILD":
                self._build(self.pop())
            case _:
                raise PickleRefused(f"it uses the instruction {name}")

    def _reduce(self, function: Any, arguments: Any) -> None:
        if function == _Global(_ARRAY):
            self.stack.append(ByteArray())
        elif function == _Global(_DTYPE) and arguments[0] in (b"u1", "u1"):
            self.stack.append(_Global("u1"))
        else:
            raise PickleRefused("it calls something other than an array of bytes")

    def _build(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, ByteArray):
            _, shape, dtype, is_fortran, data = state
            if dtype != _Global("u1") or is_fortran or not isinstance(data, bytes):
                raise PickleRefused("it has an array that is not of bytes in C order")
            target.shape, target.data = tuple(map(int, shape)), data
        elif target != _Global("u1"):
            raise PickleRefused("it gives a state to something other than an array")

    def _since_mark(self) -> list[Any]:
        return self._last(len(self.stack) - self.marks.pop())

    def _last(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self.stack):
            raise PickleRefused("it is damaged (too few values)")
        first = len(self.stack) - count
        items, self.stack[first:] = self.stack[first:], []
        return items


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise PickleRefused(f"it is damaged (no {kind.__name__} where one belongs)")
    return value
