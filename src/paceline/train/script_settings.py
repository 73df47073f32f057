"""What the script decides itself, so that a setting of the run does not apply: reported once."""

from __future__ import annotations

from collections.abc import Callable

from paceline.events import Event, SetByScript

_MOST_VALUES = 4  # of one setting; a value that changes in every step is reported as such


class ScriptSettings:
    """Emits an event for every new value that a script uses instead of a setting."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._known: dict[str, list[object]] = {}

    def note(self, step: int, setting: str, value: object, how: str) -> None:
        """Report a value the first time it is used; `how` says by what.

        >>> shown = []
        >>> settings = ScriptSettings(lambda event: shown.append(event.value))
        >>> for value in (1.0, 1.0, 5.0, 6.0, 7.0, 8.0, 9.0):
        ...     settings.note(1, "clip_norm", value, "clip= of run.update")
        >>> shown
        ['1.0 by clip= of run.update', '5.0 by clip= of run.update', '6.0 by clip= of run.update', 'other values by clip= of run.update']
        """
        known = self._known.setdefault(setting, [])
        if value in known or len(known) == _MOST_VALUES:
            return
        known.append(value)
        shown = "other values" if len(known) == _MOST_VALUES else value
        self._emit(SetByScript(step, setting, f"{shown} by {how}"))
