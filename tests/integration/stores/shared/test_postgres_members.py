"""Members of a PostgresStore that die, are stopped, or go: who is gone, and when."""

from __future__ import annotations

import signal
import time

import pytest

from headgate import PostgresStore
from headgate.sharing.states import Outcome
from tests.integration.stores.shared.postgres_support import PATIENCE, Child, Heard, ask, children, eventually, gone
from tests.integration.stores.shared.postgres_support import who_am_i as who
from tests.postgres_server import ask as query

pytestmark = pytest.mark.integration

LEASE = 2.0


@pytest.mark.soak
def test_g20_a_member_that_was_killed_is_gone_after_its_lease(postgres_dsn: str) -> None:
    child = Child("stays", postgres_dsn, LEASE)
    with PostgresStore(postgres_dsn) as store, children(child):
        member = child.line()
        heard = Heard()
        store.listen("key", heard)
        assert ask(store, gone(member)) is False
        child.process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        wakes = heard.wakes
        # The others are told when it is gone: nobody needs to ask.
        eventually(lambda: query(postgres_dsn, "SELECT count(*) FROM headgate.members") == 1, "its row is deleted")
        took = time.monotonic() - killed
        assert took < LEASE + 1.0 + 4.0, f"lease + 1 s, and some more on a busy machine: {took}"
        assert ask(store, gone(member)) is True
        eventually(lambda: heard.wakes > wakes, "everybody looks")


def test_g20_a_member_that_was_stopped_longer_than_its_lease_has_lost_it(postgres_dsn: str) -> None:
    child = Child("stays", postgres_dsn, LEASE)
    with PostgresStore(postgres_dsn) as store, children(child):
        member = child.line()
        child.process.send_signal(signal.SIGSTOP)
        eventually(lambda: ask(store, gone(member)), "it is gone")
        assert ask(store, gone(member)) is True
        child.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE
        while True:
            child.say("how are you")
            before, passed, now, after = child.line().split()
            assert int(before) <= int(after) <= 1, "it is told once"
            if int(before) == 0:
                assert passed == "True", "its deadline had passed when it went on"
            if int(after) == 1:
                break
            assert time.monotonic() < deadline
        assert now != member
        assert ask(store, gone(member)) is True, "once gone, always gone"
        assert ask(store, gone(now)) is False


def test_g20_a_lease_that_is_over_is_never_renewed(postgres_dsn: str) -> None:
    """The clock of the database jumps forward: the same to a member as leases that end early."""
    with PostgresStore(postgres_dsn, lease=1.0) as store:
        heard = Heard()
        store.listen("key", heard)
        me = ask(store, who)
        query(postgres_dsn, "UPDATE headgate.members SET lease_until = clock_timestamp() - interval '1 ms'")
        eventually(lambda: heard.losses == 1, "it is told")
        assert ask(store, who) != me
        assert ask(store, gone(me)) is True
        query(postgres_dsn, "DELETE FROM headgate.members")
        eventually(lambda: heard.losses == 2, "a row that is gone is a lease that is lost")
        assert ask(store, who) != me


def test_g20_a_member_that_is_gone_changes_nothing_any_more(postgres_dsn: str) -> None:
    """Its row vanishes between reading and writing: the step is run again, under another id."""
    members: list[str] = []
    with PostgresStore(postgres_dsn) as store:
        me = ask(store, who)

        def step(text: str | None, seen: object) -> Outcome:
            member = getattr(seen, "member", "")
            members.append(member)
            if len(members) == 1:
                import threading

                thread = threading.Thread(target=query, args=(postgres_dsn, "DELETE FROM headgate.members"))
                thread.start()
                thread.join()
            return Outcome(member, member)

        found = ask(store, step)
        assert members[0] == me
        assert found == members[-1] != me
        assert ask(store, lambda text, _: Outcome(None, text)) == found, "what it wrote before was not committed"


def test_g20_a_member_that_closes_frees_what_it_holds_at_once(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        heard = Heard()
        store.listen("key", heard)
        with PostgresStore(postgres_dsn) as other:
            member = ask(other, who)
            assert ask(store, gone(member)) is False
            wakes = heard.wakes
        eventually(lambda: heard.wakes > wakes, "everybody looks")
        assert ask(store, gone(member)) is True


def test_g20_the_deadline_is_never_later_than_the_lease_in_the_database(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn, lease=3.0) as store:
        store.connect(PATIENCE)
        for _ in range(20):
            left = query(
                postgres_dsn,
                "SELECT extract(epoch FROM max(lease_until) - clock_timestamp())::float8 FROM headgate.members",
            )
            # Read afterwards: time passed since, so what is left by our clock must be less. A renewal may come between.
            ours = store.deadline - time.monotonic()
            if ours <= left:
                return
        pytest.fail("the deadline of the member is later than its lease")
