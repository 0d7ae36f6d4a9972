"""A rank is reached where it reaches the rendezvous from; at the loopback where all are on one network."""

from __future__ import annotations

import socket

import pytest

from hetu_fx.base.addresses import LOOPBACK, VARIABLE, Contact, rank_addresses, socket_family
from hetu_fx.errors import EnvironmentProblem


def test_ranks_of_one_network_meet_at_the_loopback() -> None:
    assert (
        rank_addresses([Contact("n", "10.0.0.1", "10.0.0.1"), Contact("n", "10.0.0.1", "10.0.0.1")]) == (LOOPBACK,) * 2
    )


def test_each_is_reached_where_it_comes_from() -> None:
    reaches = [
        Contact("n", "10.0.0.1", "10.0.0.1"),
        Contact("m", "10.0.0.2", "10.0.0.1"),
        Contact("o", "fd00::3", "fd00::1"),
    ]
    assert rank_addresses(reaches) == ("10.0.0.1", "10.0.0.2", "fd00::3")


def test_the_machine_of_the_rendezvous_is_reached_where_others_dial_it() -> None:
    debian = Contact("n", "127.0.0.1", "127.0.1.1")  # as /etc/hosts has it on that machine
    assert rank_addresses([debian, Contact("m", "10.0.0.2", "10.0.0.1"), debian]) == (
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.1",
    )


def test_a_machine_that_nobody_can_dial_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match=rf"rank 0 knows no address .* 127\.0\.0\.1.*\n.*{VARIABLE}"):
        rank_addresses([Contact("n", "127.0.0.1"), Contact("m", "10.0.0.2")])


def test_the_way_to_a_host_begins_at_an_address_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Contact.own("127.0.0.1") == Contact(Contact.own().network, "127.0.0.1", "127.0.0.1")
    with socket.create_server(
        (Contact.own("localhost").source, 0), family=socket_family(Contact.own("localhost").source)
    ):
        pass  # it can be bound


def test_an_interface_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "lo,eth9")
    assert Contact.own("127.0.0.1").source == "127.0.0.1"
    monkeypatch.setenv(VARIABLE, "eth9")
    with pytest.raises(EnvironmentProblem, match=rf"{VARIABLE} is 'eth9'.* it has .*lo"):
        Contact.own("127.0.0.1")


def test_a_host_without_an_address_matters_only_between_networks() -> None:
    lost = Contact.own("nowhere.invalid")
    assert rank_addresses([lost, lost]) == (LOOPBACK, LOOPBACK)
    with pytest.raises(EnvironmentProblem, match="rank 1 knows no address"):
        rank_addresses([Contact("another", "10.0.0.2"), lost])
