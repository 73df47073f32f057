"""Boot a host: process 1 in its own namespaces, which outlives the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from support.slurm_cluster import linux, mounts
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import Place

Tell = Callable[[], None]
"""Called by a detached process when it is ready."""
_SHUT_DOWN_WITHIN_S = 1
_MOST_FILES = 4096


def boot(place: Place, host: str) -> None:
    """Start a host; return once its mounts are done."""
    detach(
        lambda tell: _be_host(place, host, tell),
        place.log / f"init-{host}.log",
        linux.leave_all_namespaces,
    )


def detach(
    main: Callable[[Tell], None], log: Path, prepare: Callable[[], None] = lambda: None
) -> None:
    """Run a function in a detached process; return once it reports that it is ready."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        _run_detached(main, log, prepare, tell)
    os.close(tell)
    os.waitpid(child, 0)
    with os.fdopen(ready) as pipe:
        if pipe.readline() != "ready\n":
            raise ClusterError(f"{log.stem} did not start: {log.read_text()[-2000:]}")


def _run_detached(
    main: Callable[[Tell], None], log: Path, prepare: Callable[[], None], tell: int
) -> None:
    try:
        os.setsid()
        _redirect(log, keep=tell)
        prepare()
        if os.fork():
            os._exit(0)
        main(lambda: _tell_ready(tell))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _redirect(log: Path, keep: int) -> None:
    """Close all files, locks and pipes inherited from the parent."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.closerange(3, keep)
    os.closerange(keep + 1, _MOST_FILES)


def _tell_ready(pipe: int) -> None:
    os.write(pipe, b"ready\n")
    os.close(pipe)


def _be_host(place: Place, host: str, tell_ready: Tell) -> None:
    """Run as process 1 of a host: mount its file systems, then reap orphans until the end."""
    # Until it is mounted over, /proc is the machine's, so this link has the pid by which the machine knows us.
    place.write_pid(host, int(os.readlink("/proc/self")))
    linux.set_host_name(host)
    mounts.build(place, host, place.settings)
    linux.set_process_name(f"init-{host}")
    os.chdir("/")
    signal.signal(signal.SIGTERM, _shut_down)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    tell_ready()
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.05)


def _shut_down(*_: object) -> None:
    """Ask all processes to exit, then exit; the kernel kills the rest of the namespace."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGTERM)
    limit = time.monotonic() + _SHUT_DOWN_WITHIN_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < limit:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
    os._exit(0)
