"""Every command of the guides does what the page says; support/typed_pages.py has the rules."""

from pathlib import Path

import pytest

from support.private_cluster import cluster_or_skip, wanted
from support.typed_pages import (
    ROOT,
    Page,
    environment,
    furnish,
    look_at,
    page_of,
    skip_what_is_not_here,
    type_here,
)

PAGES = [
    page_of(path)
    for path in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")])
]
ONCE = (
    "srun",
    "torchrun",
    "mpirun",
    "python digits.py",
    "paceline chaos",
    "paceline train mnist",
)  # no later command needs their results
TYPED = {
    command.words for turn in page_of(ROOT / "README.md").turns for command in turn
}  # by test_readme
MOST_READ = {"quickstart", "own-loop", "checkpoints", "slurm", "it-hangs"}
"""The pages that `make test` types; `make test-all` types every page."""


def turns(*, on_a_cluster: bool):
    """Return the commands of all pages that need, or do not need, a cluster; expensive ones without lasting effect once."""
    found, typed = [], set(TYPED)
    for page, turn in (  # noqa: B020
        (page, turn)
        for page in PAGES
        for turn in page.turns
        if turn[0].on_a_cluster == on_a_cluster
    ):
        if not (turn[0].words.startswith(ONCE) and turn[0].words in typed):
            marks = [] if Path(page.name).stem in MOST_READ else [pytest.mark.heavy]
            found.append(pytest.param(page, turn, id=f"{page.name}:{turn[0].words}", marks=marks))
        typed.add(turn[0].words)
    return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Return the folder in which a page is run, and the digests that it has shown so far."""
    desks = {}

    def of(page: Page):
        if page.name not in desks:
            desks[page.name] = furnish(tmp_path_factory.mktemp("page"), page), {}
        return desks[page.name]

    return of


@pytest.fixture(scope="module")
def cluster():
    with cluster_or_skip(wanted(nodes=2, cpus=4, gpus=2)) as slurm:
        yield slurm


@pytest.mark.slow
@pytest.mark.parametrize(("page", "turn"), turns(on_a_cluster=False))
def test_a_command_does_what_its_page_says(page, turn, desk, tmp_path):
    skip_what_is_not_here(turn[0])
    folder, bits = desk(page)
    where = furnish(tmp_path / "hosts", page) if turn[0].host else folder
    look_at(type_here(turn, where), turn[-1].shown, bits)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize(("page", "turn"), turns(on_a_cluster=True))
def test_a_command_does_what_its_page_says_on_a_cluster(page, turn, desk, cluster):
    folder, bits = desk(page)
    command = turn[0]
    done = cluster.run(command.words.split(), folder=folder, env=environment(folder), timeout_s=120)
    command.check_end(done)
    look_at(done, command.shown, bits)


def test_every_guide_has_commands_that_are_typed_and_the_most_read_pages_exist():
    assert {Path(page.name).stem for page in PAGES} > MOST_READ
    guides = [page for page in PAGES if page.name.startswith("docs/guides/")]
    assert [page.name for page in guides if not (page.turns or page.scripts)] == []
