"""The frame of every HTML file: it has its style and script inside, loads nothing, and works without the script."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from paceline.plot.line import DARK, LIGHT, css_colors
from paceline.plot.markup import NOTHING, Html, embedded, joined, radio_buttons, tag
from paceline.plot.page import Charts

_THEMES = ("auto", "light", "dark")


def document(title: str, charts: Charts, *parts: Html) -> bytes:
    """Return parts as one HTML file with a heading and a choice of colors."""
    body = joined(_header(title), tag("main", *parts))
    return _document(title, body, embedded(charts.as_dict())).encode()


def section(title: str, *parts: str, above: Html = NOTHING) -> Html:
    """Return a part of the page with its heading, or nothing if it is empty."""
    inside = joined(*parts)
    if not inside:
        return NOTHING
    name = title.split(maxsplit=1)[0].lower()
    return tag("section", tag("h2", title), above, tag("div", inside, class_=f"grid {name}"))


def wide(part: Html) -> Html:
    """Return a part over all columns of its section."""
    return tag("div", part, class_="wide") if part else NOTHING


def _header(title: str) -> Html:
    themes = radio_buttons("theme", _THEMES, "colors")
    return tag("header", tag("h1", title), themes, class_="top")


def _document(title: str, body: Html, data: Html) -> str:
    script = _resource("page.js")
    style = _resource("page.css")
    style = style.replace("/* light palette */", css_colors(LIGHT))
    style = style.replace("/* dark palette */", css_colors(DARK))
    # Should some text be taken for markup after all: nothing is loaded, and no other script runs.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} - Paceline"),
        tag("style", Html(style)),
    )
    known = tag("script", data, type="application/json", id="data")
    page = tag("html", head, tag("body", body, known, tag("script", Html(script))), lang="en")
    return f"<!doctype html>\n{page}\n"


def _resource(name: str) -> str:
    return files("paceline.plot").joinpath(name).read_text(encoding="utf-8")
