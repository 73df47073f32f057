"""What a reader cannot see or read on a page, measured in a real browser, wide and narrow, light and dark."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.browser import Browser

LOOKS = ((1300, False), (1300, True), (390, True), (390, False))
"""Widths, and whether the colour scheme is dark: one thing changes at a time."""
_STILL = """(() => {
  const style = document.createElementNS('http://www.w3.org/1999/xhtml', 'style');
  style.textContent = '* { transition: none !important; animation: none !important }';
  document.documentElement.append(style);
})()"""
"""Lets colours change at once."""
_WITHOUT_SCRIPT = "document.body.setAttribute('data-md-color-scheme', '{}')"
_ANSWERED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""The page has noticed its new width and scheme."""
_CHECKS = Path(__file__).with_name("page_checks.js").read_text(encoding="utf-8")
_DARK, _LIGHT = 70, 185
"""The brightest paper of a dark page, and the darkest of a light one, of 255."""


def faults(
    browser: Browser,
    place: Path | str,
    looks: Iterable[tuple[int, bool]] = LOOKS,
    *,
    pictures: bool = False,
    script: bool = True,
) -> Iterator[str]:
    """Open a page once, and yield what is wrong with it at every look; `pictures`: also with its screenshots.

    Without its script, a page of the site opens three times as fast; the scheme is then set as the script would.
    """
    browser.show(place, width=LOOKS[0][0], script=script)
    browser.value(_STILL)
    for width, dark in looks:
        browser.look(width=width, dark=dark)
        scheme = "slate" if dark else "default"
        browser.value(_ANSWERED if script else _WITHOUT_SCRIPT.format(scheme))
        found = browser.value(f"({_CHECKS})({str(width > 600).lower()})")
        if pictures:
            found += picture_faults(browser.screenshot(), dark=dark)
        for one in found:
            yield f"{str(place)[-60:]}, {width} px, {'dark' if dark else 'light'}: {one}"


def picture_faults(png: bytes, *, dark: bool) -> list[str]:
    """Return what is wrong with a screenshot: a paper of the other scheme, or hardly anything on it."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("L")
    counts = picture.histogram()
    paper = counts.index(max(counts))
    if (paper > _DARK) if dark else (paper < _LIGHT):
        return [f"its paper has the brightness {paper} of 255"]
    ink = sum(count for tone, count in enumerate(counts) if abs(tone - paper) > 60) / sum(counts)
    return [] if 0.005 < ink < 0.6 else [f"{ink:.1%} of it is not paper"]
