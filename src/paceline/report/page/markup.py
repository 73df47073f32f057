"""How a page is written so that a foreign text in it is only ever text."""

from __future__ import annotations

import html
import json
from typing import Any

from paceline.report.sanitize import harmless

_EMPTY = {"input", "meta", "path"}


class Html(str):
    """Text that is markup already. All other text is escaped on its way in."""

    __slots__ = ()


def tag(name: str, /, *inside: str, **attributes: str | float | None) -> Html:
    """Return an element; `class_` and `for_` lose their last letter, other underscores become hyphens.

    >>> tag("p", "a < b", tag("b", "!"), class_="x", data_n=3)
    '<p class="x" data-n="3">a &lt; b<b>!</b></p>'
    >>> tag("a", "<script>", title='"><script>')
    '<a title="&quot;&gt;&lt;script&gt;">&lt;script&gt;</a>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(
        f"<{name}{given}/>" if name in _EMPTY else f"<{name}{given}>{joined(*inside)}</{name}>"
    )


def joined(*parts: str) -> Html:
    """Return parts one after the other, escaped unless they are markup."""
    return Html("".join(part if isinstance(part, Html) else text(part) for part in parts))


def text(value: str) -> Html:
    """Return a foreign text as markup that shows it."""
    return Html(html.escape(harmless(value), quote=True))


def embedded(data: Any) -> Html:
    r"""Return JSON that can stand within a script element, which ends at the first `</script` whatever is around it.

    >>> embedded({"a": "</script><!--&"})
    '{"a":"\\u003c/script\\u003e\\u003c!--\\u0026"}'
    """
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        plain = plain.replace(letter, f"\\u{ord(letter):04x}")
    return Html(plain)
