"""How a tree of settings is written as YAML, of which we need so little that no library is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Value = str | int | bool | Mapping[str, "Value"] | Sequence["Value"]


def as_yaml(value: Mapping[str, Value]) -> str:
    """Return a tree as YAML; every string is quoted, so none is taken for a number, a truth or a command of YAML.

    >>> print(as_yaml({"A": {"B": "no", "C": 1}, "D": [{"E": True, "F": ["x: y"]}]}), end="")
    A:
      B: "no"
      C: 1
    D:
      - E: true
        F:
          - "x: y"
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Value) -> list[str]:
    if isinstance(value, str | int):
        return [_scalar(value)]
    if isinstance(value, Mapping):
        return [line for key, inner in value.items() for line in _entry(key, inner)]
    return [
        f"{'  ' if number else '- '}{line}"
        for inner in value
        for number, line in enumerate(_lines(inner))
    ]


def _entry(key: str, inner: Value) -> list[str]:
    lines = _lines(inner)
    return (
        [f"{key}: {lines[0]}"]
        if isinstance(inner, str | int)
        else [f"{key}:", *(f"  {line}" for line in lines)]
    )


def _scalar(value: str | int) -> str:
    r"""Return a word of YAML. Characters that it may not hold, or would fold, are written as their numbers.

    >>> _scalar('a "b"'), _scalar("é"), _scalar(True), _scalar(7)
    ('"a \\"b\\""', '"\\U000000e9"', 'true', '7')
    """
    if isinstance(value, str):
        return f'"{"".join(_escaped(char) for char in value)}"'
    return str(value).lower()


def _escaped(char: str) -> str:
    if char in {'"', "\\"}:
        return f"\\{char}"
    return char if " " <= char <= "~" else f"\\U{ord(char):08x}"
