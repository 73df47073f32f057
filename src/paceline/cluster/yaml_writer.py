"""Write nested settings as YAML; the subset needed here is small enough to do without a library.

Its own file, although only `parallelcluster` imports it: it knows nothing of clusters, and its
tests compare it with a YAML parser for arbitrary values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Value = str | int | bool | Mapping[str, "Value"] | Sequence["Value"]


def as_yaml(value: Mapping[str, Value]) -> str:
    """Return a mapping as YAML; every string is quoted, so none is read as a number or boolean.

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
    lines = []
    if isinstance(value, Mapping):
        for key, inner in value.items():
            lines += _entry(key, inner)
    else:
        for inner in value:
            for number, line in enumerate(_lines(inner)):
                lines.append(f"  {line}" if number else f"- {line}")
    return lines


def _entry(key: str, inner: Value) -> list[str]:
    lines = _lines(inner)
    if isinstance(inner, str | int):
        return [f"{key}: {lines[0]}"]
    return [f"{key}:", *(f"  {line}" for line in lines)]


def _scalar(value: str | int) -> str:
    r"""Return a YAML scalar; characters outside printable ASCII are escaped by code point.

    >>> _scalar('a "b"'), _scalar("é"), _scalar(True), _scalar(7)
    ('"a \\"b\\""', '"\\U000000e9"', 'true', '7')
    """
    if isinstance(value, str):
        return f'"{"".join(map(_escape, value))}"'
    return str(value).lower()


def _escape(char: str) -> str:
    if char in {'"', "\\"}:
        return f"\\{char}"
    return char if " " <= char <= "~" else f"\\U{ord(char):08x}"
