"""HTML and SVG elements in which text from outside is always text, never markup."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from paceline.terminal import plain

_EMPTY = {"circle", "input", "line", "meta", "path", "polyline", "rect"}


class Html(str):
    """Text that is markup already; a plain string is escaped when it is inserted."""

    __slots__ = ()


NOTHING = Html("")


def tag(name: str, /, *inside: str, **attributes: str | float | None) -> Html:
    """Return an element; `class_` and `for_` lose the last letter, other underscores become hyphens.

    >>> tag("p", "a < b", tag("b", "!"), class_="x", data_n=3)
    '<p class="x" data-n="3">a &lt; b<b>!</b></p>'
    >>> tag("a", "<script>", title='"><script>')
    '<a title="&quot;&gt;&lt;script&gt;">&lt;script&gt;</a>'
    """
    head = name
    for key, value in attributes.items():
        if value is not None:
            attribute = key.rstrip("_").replace("_", "-")
            head += f' {attribute}="{text(str(value))}"'
    if name in _EMPTY:
        return Html(f"<{head}/>")
    return Html(f"<{head}>{joined(*inside)}</{name}>")


def joined(*parts: str) -> Html:
    """Return parts in their order, escaped unless they are markup."""
    return Html("".join(part if isinstance(part, Html) else text(part) for part in parts))


def text(value: str) -> Html:
    """Return text from outside as markup that shows it."""
    return Html(html.escape(plain(value), quote=True))


def embedded(data: Any) -> Html:
    r"""Return JSON for a script element, which ends at the first `</script` wherever that stands.

    >>> embedded({"a": "</script><!--&"})
    '{"a":"\\u003c/script\\u003e\\u003c!--\\u0026"}'
    """
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        encoded = encoded.replace(letter, f"\\u{ord(letter):04x}")
    return Html(encoded)


def table(head: list[str], rows: list[Html], class_: str) -> Html:
    """Return a table that scrolls sideways if the page is too narrow for it."""
    names = tag("thead", tag("tr", *(tag("th", name) for name in head))) if head else NOTHING
    return tag("div", tag("table", names, tag("tbody", *rows), class_=class_), class_="scroll")


def radio_buttons(group: str, names: Sequence[str], label: str) -> Html:
    """Return a choice of one name, the first one chosen."""
    buttons = []
    for name in names:
        chosen: dict[str, str] = {"checked": ""} if name == names[0] else {}
        key = f"{group}-{name}"
        buttons.append(tag("input", type="radio", name=group, id=key, value=name, **chosen))
        buttons.append(tag("label", name, for_=key))
    return tag("div", *buttons, class_="themes", role="group", aria_label=label)
