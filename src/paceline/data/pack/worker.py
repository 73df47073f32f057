"""Worker process of a pack: reads tasks from stdin, writes results to stdout as JSON lines."""

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
    """Run tasks until stdin ends."""
    die_with_parent()
    if sys.argv[1:] != [str(os.getppid())]:
        return  # the parent died before the kernel was asked to watch it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills its workers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    job = job_from(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        answers.write(json.dumps(_answer(job, int(line))) + "\n")
        answers.flush()


def job_from(tree: dict[str, Any]) -> PackTask:
    """Rebuild a job from the dict of its `tree`."""
    kinds: dict[str, Any] = {"shards": ShardJob, "letters": CharacterTask, "tokens": TokenTask}
    job: PackTask = kinds[tree.pop("job")].from_tree(tree)
    return job


def _answer(job: PackTask, number: int) -> dict[str, Any]:
    try:
        return {"number": number, "done": job.run(number)}
    except (PacelineError, OSError) as error:
        failure = storage_error(error, "the dataset") if isinstance(error, OSError) else error
        return {
            "number": number,
            "error": type(failure).__name__,
            "problem": failure.problem,
            "fix": failure.fix,
        }


if __name__ == "__main__":
    main()
