"""Whom the routines of workers may call: the numbered lists of a pool."""

from __future__ import annotations

from dataclasses import replace

from headgate import WorkerMetadata
from headgate.workers.client.peers import Introductions
from headgate.workers.protocol.messages import Introduction, Peer

ONE, TWO = (WorkerMetadata(uid, f"127.0.0.1:{port}", 7, "1.0") for uid, port in (("w-1", 1), ("w-2", 2)))


def test_w04_each_change_makes_the_next_list_and_nothing_else_does() -> None:
    introductions = Introductions("pool")
    assert introductions.latest == Introduction("pool", [], 1), "0 would be one without a number"
    introductions.add(ONE, "w-1")
    first = introductions.latest
    assert first == ("pool", [Peer("w-1", "127.0.0.1:1")], 2)
    introductions.add(ONE, "w-1")
    introductions.remove("w-2")
    assert introductions.latest is first, "another loop uses it too"
    introductions.add(TWO, "")
    assert introductions.latest == ("pool", [Peer("w-1", "127.0.0.1:1"), Peer("w-2", "127.0.0.1:2")], 3)
    assert first.peers == [Peer("w-1", "127.0.0.1:1")], "what was sent stays as it was"
    introductions.add(replace(TWO, address="127.0.0.1:3"), "")
    assert introductions.latest == ("pool", [Peer("w-1", "127.0.0.1:1"), Peer("w-2", "127.0.0.1:3")], 4)
    introductions.remove("w-1")
    assert introductions.latest == ("pool", [Peer("w-2", "127.0.0.1:3")], 5)


def test_w04_the_name_by_which_a_worker_calls_itself_is_kept_while_its_next_session_is_not_open() -> None:
    introductions = Introductions("pool")
    listed = replace(ONE, uid="127.0.0.1:1")  # as a list of addresses tells of it
    introductions.add(listed, "w-1")
    named = introductions.latest
    introductions.add(listed, "")
    assert introductions.latest is named
    introductions.add(listed, "w-9")
    assert [peer.uid for peer in introductions.latest.peers] == ["w-9"], "another worker listens there now"
    introductions.remove("127.0.0.1:1")
    assert introductions.latest.peers == []
