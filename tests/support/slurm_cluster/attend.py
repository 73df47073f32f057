"""Run a user's command inside a host, with its signals and exit status passed on."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import sys
from pathlib import Path

from support.slurm_cluster import linux
from support.slurm_cluster.commands import pid_of
from support.slurm_cluster.place import Place

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def attend(place: Place, host: str, words: list[str], user: str | None = None) -> int:
    """Run a command inside a host and return its exit status."""
    folder, env = Path.cwd(), outside_of_jobs()
    linux.enter_namespaces(pid_of(place, host))
    child = os.fork()  # only children are in the host's namespace of process ids
    if child == 0:
        _become(words, folder, env, user)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def outside_of_jobs() -> dict[str, str]:
    """Return the environment without the variables of an enclosing Slurm job."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}


def _become(words: list[str], folder: Path, env: dict[str, str], user: str | None) -> None:
    try:
        os.chdir("/")
        with contextlib.suppress(OSError):  # the host may not have it
            os.chdir(folder)
        if user:
            env |= _become_user(user)
        linux.die_with_parent()
        os.execvpe(words[0], words, env)
    except (OSError, KeyError) as error:  # no such command, no such user
        print(f"{words[0]}: {getattr(error, 'strerror', error)}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _become_user(name: str) -> dict[str, str]:
    user = pwd.getpwnam(name)
    os.initgroups(name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    return {"USER": name, "LOGNAME": name, "HOME": user.pw_dir}
