"""How one worker of a pack begins and what it says: `python -m paceline.data.pack.worker PARENT`, told what to do on its input."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from paceline.data.pack.plan import storage_error
from paceline.data.pack.pool import PackTask
from paceline.data.pack.shard_writer import ShardJob
from paceline.data.pack.tokens import CharacterTask, TokenTask
from paceline.errors import PacelineError
from paceline.world.parent_death import die_with_parent


def main() -> None:
    """Do pieces of a job until there are no more."""
    die_with_parent()
    if sys.argv[1:] != [str(os.getppid())]:
        return  # it died before the kernel was asked
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    job = job_from(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        answers.write(json.dumps(_done(job, int(line))) + "\n")
        answers.flush()


def job_from(tree: dict[str, Any]) -> PackTask:
    """Return the job that its `tree` speaks of."""
    kinds: dict[str, Any] = {"shards": ShardJob, "letters": CharacterTask, "tokens": TokenTask}
    job: PackTask = kinds[tree.pop("job")].from_tree(tree)
    return job


def _done(job: PackTask, number: int) -> dict[str, Any]:
    try:
        return {"number": number, "done": job.run(number)}
    except (PacelineError, OSError) as error:
        told = storage_error(error, "the set") if isinstance(error, OSError) else error
        return {
            "number": number,
            "error": type(told).__name__,
            "problem": told.problem,
            "fix": told.fix,
        }


if __name__ == "__main__":
    main()
