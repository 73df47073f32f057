"""Run a test on N real processes that have met. Torch is imported once, in a server that forks; so processes are cheap."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline import handover

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "paceline.train.trainer", "paceline.recipes.mnist", "torch._dynamo", "torch.distributed.fsdp",
        "paceline.cli.run", "paceline.cli.watch", "paceline.cli.hang",
    ]
)  # fmt: skip
_TIMEOUT_S = 120


def on_processes(
    count: int, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on `count` ranks, each with its `world` (and `config`, if it asks); settings go into the config."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(tmp_path: Path, **given: Any) -> None:
            run_on_processes(test, count, tmp_path, settings, given)

        own = {"world", "config", "tmp_path"}
        names = [name for name in inspect.signature(test).parameters if name not in own]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        keep = [inspect.Parameter(name, kind) for name in ["tmp_path", *names]]
        run.__signature__ = inspect.Signature(keep)  # type: ignore[attr-defined]
        return run

    return decorate


def run_on_processes(
    test: Callable[..., Any],
    count: int,
    folder: Path,
    settings: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call a function of a test module on every rank; return what each returned, or fail with what each raised."""
    source = (inspect.getsourcefile(inspect.unwrap(test)), test.__qualname__)
    meeting = folder / f"meeting-{os.urandom(4).hex()}"
    meeting.mkdir(mode=0o700)
    ranks = []
    for rank in range(count):
        mine, theirs = CONTEXT.Pipe()
        words = (source, rank, count, meeting, dict(settings), dict(given or {}), theirs)
        process = CONTEXT.Process(target=_child, args=words, daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, mine))
    answers = [_answer(rank, *pair) for rank, pair in enumerate(ranks)]
    failed = "\n".join(text for good, text in answers if not good)
    assert not failed, failed
    return [value for _, value in answers]


def in_worlds(
    test: Callable[..., Any],
    folder: Path,
    settings: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
    worlds: Iterable[int] = (1, 3),
) -> Any:
    """Call a function on every rank of several worlds, each with runs of its own; return the one answer that all give."""
    answers = []
    for size in worlds:
        own = {**settings, "runs": str(folder / f"world-{size}")}
        answers += run_on_processes(test, size, folder, own, given)
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def _answer(rank: int, process: Any, pipe: Connection) -> tuple[bool, Any]:
    try:
        came = pipe.poll(_TIMEOUT_S)
        answer = pipe.recv() if came else (False, f"rank {rank} did not answer in {_TIMEOUT_S} s")
    except EOFError:
        answer = (False, f"rank {rank} ended without an answer")
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
    pipe.close()
    return answer


def _child(
    source: tuple[str, str],
    rank: int,
    count: int,
    meeting: Path,
    settings: dict[str, Any],
    given: dict[str, Any],
    pipe: Connection,
) -> None:
    # Everything a test leaves in this process ends with it.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    os.environ[handover.MEETING] = str(meeting / "meeting")
    os.chdir(meeting)
    sys.path[:0] = [str(Path(__file__).parents[1])]
    try:
        pipe.send((True, _call(source, settings, given)))
    except BaseException:
        pipe.send((False, f"rank {rank} of {count}:\n{traceback.format_exc()}"))


def _call(source: tuple[str, str], settings: dict[str, Any], given: dict[str, Any]) -> Any:
    from paceline.config import RunConfig
    from paceline.config.values import with_settings
    from paceline.world.process_group import join

    test = inspect.unwrap(_find(*source))
    asked = inspect.signature(test).parameters
    hint = asked["config"].annotation if "config" in asked else None
    kind = hint if inspect.isclass(hint) and issubclass(hint, RunConfig) else RunConfig
    config = with_settings(kind(), settings)
    given |= {"config": config} if "config" in asked else {}
    if "world" not in asked:
        return test(**given)
    with join(config) as world:
        return test(world=world, **given)


def _find(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return functools.reduce(getattr, name.split("."), module)
