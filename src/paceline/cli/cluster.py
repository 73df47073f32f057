"""`paceline cluster list` and `paceline cluster show`: the profiles for `paceline submit`."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass

from paceline.cluster.profile import load_profile, profile_folder, profile_names, profile_text
from paceline.config.arguments import positional


@dataclass(frozen=True, kw_only=True)
class ListArguments:
    """`paceline submit --cluster NAME` uses a profile."""

    json: bool = False
    """Print the list as JSON."""


def list_profiles(arguments: ListArguments) -> int:
    """List the profiles, and the folder of the user's own."""
    folder = profile_folder(os.environ)
    own = {name: (folder / f"{name}.toml").is_file() for name in profile_names(folder)}
    if arguments.json:
        profiles = [{"name": name, "own": is_own} for name, is_own in own.items()]
        print(json.dumps({"folder": str(folder), "profiles": profiles}, indent=2))
        return 0
    for name, is_own in own.items():
        print(f"{name}{'  (your own)' if is_own else ''}")
    print(f'\nYour own profiles are TOML files in {folder}; start one with like = "generic"')
    return 0


@dataclass(frozen=True, kw_only=True)
class ShowArguments:
    """The output is TOML, and a good start for a profile of your own."""

    name: str = positional(metavar="NAME")
    """Name of the profile, from `paceline cluster list`."""
    json: bool = False
    """Print the profile as JSON."""


def show_profile(arguments: ShowArguments) -> int:
    """Print a profile with all its fields."""
    text = profile_text(load_profile(arguments.name, profile_folder(os.environ)))
    print(json.dumps(tomllib.loads(text), indent=2) if arguments.json else text.rstrip("\n"))
    return 0
