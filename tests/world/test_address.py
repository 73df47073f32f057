"""Which address and which interface are chosen, whatever names stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import EnvironmentUnfit
from paceline.world import address, network
from paceline.world.address import (
    address_on,
    choose_address,
    free_port,
    interface_of,
    listen_at,
    own_addresses,
    refuse_loopback_name,
    source_towards,
)
from paceline.world.network import choose_interface
from paceline.world.world import World

OWN = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.1.0.1"), ("ib0", "fd00::1")]
NAMES = {
    "n1": ["10.0.0.1"],
    "n1-ib": ["10.1.0.1"],
    "debian": ["127.0.1.1"],
    "both": ["127.0.1.1", "10.0.0.1"],
    "elsewhere": ["192.168.9.9"],
    "127.0.0.1": ["127.0.0.1"],
    "localhost": ["127.0.0.1"],
}
ROUTES = {"n2": "10.0.0.1", "n2-ib": "10.1.0.1", "lost": "", "itself": "127.0.0.1"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two networks, and what names stand for there."""
    for module in (address, network):
        monkeypatch.setattr(module, "source_towards", lambda host: ROUTES.get(host, "10.0.0.1"))
    monkeypatch.setattr(address, "own_addresses", lambda: OWN)
    monkeypatch.setattr(address, "resolve", lambda host: NAMES.get(host, []))


@pytest.mark.parametrize(
    ("host", "peers", "interface", "chosen"),
    [
        ("n1", ("n2",), "", "10.0.0.1"),
        ("n1-ib", ("n2-ib",), "", "10.1.0.1"),
        ("n1", ("n2",), "ib0", "10.1.0.1"),
        ("debian", ("n2",), "", "10.0.0.1"),
        ("debian", ("lost", "n2-ib"), "", "10.1.0.1"),
        ("both", ("lost",), "", "10.0.0.1"),
        ("nobody", ("n2-ib",), "", "10.1.0.1"),
        ("elsewhere", ("n2",), "", "10.0.0.1"),
        ("127.0.0.1", (), "", "127.0.0.1"),
        ("elsewhere", (), "", "192.168.9.9"),
        ("", (), "", "10.0.0.1"),
    ],
)
def test_the_address_is_one_that_others_can_reach(machine, host, peers, interface, chosen) -> None:
    assert choose_address(host, peers, interface) == chosen


@pytest.mark.parametrize(
    ("host", "peers", "interface", "words"),
    [
        ("debian", ("lost",), "", "127.0.1.1.* lost\n.*PACELINE_INTERFACE.*lo, eth0, ib0"),
        ("debian", ("itself",), "", "PACELINE_INTERFACE"),
        ("nobody", ("lost",), "", "nobody"),
        ("n1", ("n2",), "ib1", "'ib1'(.|\n)*lo, eth0, ib0"),
    ],
)
def test_where_there_is_none_the_way_out_is_named(machine, host, peers, interface, words) -> None:
    with pytest.raises(EnvironmentUnfit, match=words):
        choose_address(host, peers, interface)


def test_a_name_that_stands_for_loopback_is_no_place_to_meet(machine) -> None:
    for host in ("n1", "both", "127.0.0.1", "localhost", "nobody"):
        refuse_loopback_name(host)
    with pytest.raises(EnvironmentUnfit, match="127.0.1.1(.|\n)*MASTER_ADDR .here: 10.0.0.1"):
        refuse_loopback_name("debian")


@pytest.mark.parametrize(
    ("given", "own", "everyone", "chosen"),
    [
        ("", "10.1.0.1", ["10.1.0.1", "10.1.0.2"], "ib0"),
        ("", "fd00::1", ["fd00::1", "fd00::2"], "ib0"),
        ("", "127.0.0.1", ["127.0.0.1", "10.0.0.2"], "eth0"),
        ("", "127.0.0.1", ["127.0.0.1", "127.0.0.1"], "lo"),
        ("", "10.9.9.9", ["10.9.9.9", "10.0.0.2"], ""),
        ("ib0", "10.0.0.1", ["10.0.0.1", "10.0.0.2"], "ib0"),
    ],
)
def test_the_interface_is_the_one_that_leads_to_the_peers(
    machine, given, own, everyone, chosen
) -> None:
    assert choose_interface(World(interface=given), own, everyone) == chosen


def test_this_machine_has_a_loopback() -> None:
    assert ("lo", "127.0.0.1") in own_addresses()
    assert (interface_of("127.0.0.1"), address_on("lo")) == ("lo", "127.0.0.1")
    assert source_towards("127.0.0.1") == "127.0.0.1"
    assert source_towards("no-such-host.invalid") == ""


def test_a_free_port_is_none_that_somebody_has_or_that_the_system_gives_to_whoever_connects(
    monkeypatch,
) -> None:
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    taken = free_port("127.0.0.1")
    assert 1024 <= taken < first_given
    with listen_at("127.0.0.1", taken):
        other = free_port("127.0.0.1")
        numbers = iter([taken, taken, other])
        monkeypatch.setattr(address.secrets, "randbelow", lambda _: next(numbers) - 10_000)
        assert free_port("127.0.0.1") == other


def test_no_port_is_free_at_the_address_of_another_machine() -> None:
    with pytest.raises(EnvironmentUnfit, match=r"cannot listen on 192\.0\.2\.1"):
        free_port("192.0.2.1")
