"""The networks of a drill are removed when setup fails, and those of another run never."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from loadtest.drills import net
from loadtest.drills.net import Network, wired_cluster

OTHERS = {"kvbr0", "kvbr0-n1", "kvbr2"}


class Machine:
    """The names of bridges and namespaces, as `ip` keeps them. Commands with the argument `broken` fail."""

    def __init__(self, broken: str = "") -> None:
        self.names, self._broken = set(OTHERS), broken

    def run(self, *command: str, check: bool = True) -> None:
        match command:
            case _ if self._broken in command:
                raise subprocess.CalledProcessError(1, command, stderr=b"RTNETLINK answers: Operation not permitted\n")
            case ("ip", "netns", "add", name) | ("ip", "link", "add", name, *_, "bridge"):
                if name in self.names:
                    raise subprocess.CalledProcessError(2, command, stderr=b"RTNETLINK answers: File exists\n")
                self.names.add(name)
            case ("ip", "netns" | "link", "del", name):
                assert not check, "it may be gone"
                self.names.discard(name)


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(net, "_run", machine.run)
    return machine


def test_network_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = on(Machine(), monkeypatch)
    first, second = Network(["n1"]), Network(["n1"])
    for each in (first, second):
        each.make()
    assert machine.names - OTHERS == {"kvbr1", "kvbr1-n1", "kvbr3", "kvbr3-n1"}
    assert (first.ip("n1"), second.ip("n1")) == ("10.213.1.2", "10.213.3.2")
    second.close()
    assert machine.names - OTHERS == {"kvbr1", "kvbr1-n1"}


@pytest.mark.parametrize("broken", ["veth", "neigh"])
def test_nothing_stays_of_a_network_that_cannot_be_made(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on(Machine(broken), monkeypatch)
    with pytest.raises(subprocess.CalledProcessError), wired_cluster(tmp_path):
        raise AssertionError("there is no network for it")
    assert machine.names == OTHERS


def test_missing_permission_for_networks_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    on(Machine("bridge"), monkeypatch)
    with pytest.raises(subprocess.CalledProcessError):
        Network(["n1"])


def test_hidden_member_loses_only_the_address_it_listens_at(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: dict[tuple[str, str], bool] = {}

    def run(*command: str, check: bool = True) -> None:
        del check
        if "neigh" in command:
            source = command[3] if command[1] == "netns" else net.CLIENTS
            lost[source, command[command.index("replace") + 1]] = net._NOBODY in command

    monkeypatch.setattr(net, "_run", run)
    network = Network(["n1", "n2"])
    network.cut([], hidden=["n1"])
    assert {where for where, is_lost in lost.items() if is_lost} == {
        (net.CLIENTS, "10.213.0.2"),
        ("kvbr0-n2", "10.213.0.2"),
    }
    assert lost["kvbr0-n2", "10.213.0.102"] is False
    network.cut([])
    assert not any(lost.values())
