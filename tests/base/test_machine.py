"""Machines are told apart though they have one hostname, and people are shown as little of that as will do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hetu_fx.base import machine
from hetu_fx.base.machine import memory_name, network_name, node_name, short_names

needs_namespaces = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")


def test_the_name_of_a_node_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_FX_NODE", "rack7")
    assert node_name() == "rack7"


def test_what_a_machine_keeps_has_its_name_over_boots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_FX_NODE", "rack7")
    assert memory_name() == "rack7"
    monkeypatch.delenv("HETU_FX_NODE")
    monkeypatch.setattr(machine, "_BOOT", tmp_path / "another")
    assert memory_name() == socket.gethostname()


def test_a_node_is_named_by_its_hostname_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETU_FX_NODE", raising=False)
    assert node_name().startswith(f"{socket.gethostname()}@")
    assert short_names([node_name()]) == [socket.gethostname()]


def test_two_boots_of_one_hostname_are_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETU_FX_NODE", raising=False)
    names = []
    for boot in ("f81d4fae\n", "7dec11d0\n"):
        (tmp_path / "boot_id").write_text(boot)
        monkeypatch.setattr(machine, "_BOOT", tmp_path / "boot_id")
        names.append((node_name(), network_name()))
    assert len(set(names[0] + names[1])) == 4


def named(*namespaces: str) -> str:
    """Return the name of a node, as a process in new namespaces has it."""
    words = "import runpy, sys; print(runpy.run_path(sys.argv[1])['node_name']())"
    command = ["unshare", "--fork", *namespaces, sys.executable, "-c", words, machine.__file__]
    environment = {name: value for name, value in os.environ.items() if name != "HETU_FX_NODE"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    return ended.stdout.strip()


@needs_namespaces
def test_containers_of_one_hostname_are_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETU_FX_NODE", raising=False)
    here, there = node_name(), named("--pid", "--mount-proc")
    assert named("--net") == here  # the same processes are seen there
    assert here != there
    assert short_names([here, there, "rack7"]) == [here, there, "rack7"]


def test_people_are_shown_what_tells_nodes_apart() -> None:
    one, other = "vm@0123456789ab", "vm@ba9876543210"
    assert short_names([one, one, "node7@0123456789ab"]) == ["vm", "vm", "node7"]
    assert short_names([one, other, "node7@0123456789ab"]) == [one, other, "node7"]
    assert short_names(["vm", one, "a@b"]) == ["vm", one, "a@b"]
