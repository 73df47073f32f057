"""What the tests on emulated hosts share: a cluster of their own each, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.private_cluster import PrivateCluster, cluster_or_skip, wanted


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[PrivateCluster]:
    """A cluster with Slurm. The marker says which, `slurm(nodes=2, cgroup=True)`; a parameter has the last word."""
    options = request.node.get_closest_marker("slurm").kwargs | getattr(request, "param", {})
    with cluster_or_skip(wanted(**options)) as cluster:
        yield cluster


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[PrivateCluster]:
    """Hosts and a network without Slurm, as the marker `namespaces(nodes=2, delay_ms=1)` says."""
    with cluster_or_skip(
        wanted(slurm=False, **request.node.get_closest_marker("namespaces").kwargs)
    ) as cluster:
        yield cluster
