"""W34: the thread places of a worker, alone."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from headgate.workers.server.thread_places import Places


def test_w34_places_are_given_in_order_of_asking() -> None:
    async def main() -> None:
        said: list[bool] = []
        places = Places(1, said.append)
        assert await places.take()
        first, second = asyncio.ensure_future(places.take()), asyncio.ensure_future(places.take())
        await asyncio.sleep(0)
        places.give_back()
        assert await first
        assert not second.done()
        places.give_back()
        assert await second
        assert said == []

    asyncio.run(main())


def test_w34_who_stands_in_line_is_refused_when_every_place_is_held() -> None:
    async def main() -> None:
        said: list[bool] = []
        places = Places(2, said.append)
        assert await places.take()
        assert await places.take()
        waits = asyncio.ensure_future(places.take())
        await asyncio.sleep(0)
        places.abandon()
        await asyncio.sleep(0)
        assert not waits.done(), "the other one is waited for, and will end"
        places.abandon()
        assert await waits is False
        assert await places.take() is False
        assert places.are_held
        places.give_back(abandoned=True)
        assert await places.take()
        assert said == [False, True]

    asyncio.run(main())


def test_w34_who_goes_away_leaves_its_turn_to_the_next() -> None:
    async def main() -> None:
        places = Places(1, lambda free: None)
        assert await places.take()
        first, second = asyncio.ensure_future(places.take()), asyncio.ensure_future(places.take())
        await asyncio.sleep(0)
        places.give_back()
        first.cancel()  # it was its turn
        assert await second
        with pytest.raises(asyncio.CancelledError):
            await first
        places.give_back()
        assert await places.take()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_w34_no_place_is_lost_nor_made_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    total = 3

    async def main() -> None:
        told = [True]
        places = Places(total, told.append)
        waiting: list[asyncio.Future[bool]] = []
        held: list[bool] = []  # abandoned?
        for _ in range(2000):
            what = chance.random()
            if what < 0.4:
                waiting.append(asyncio.ensure_future(places.take()))
            elif what < 0.5 and waiting:
                chance.choice(waiting).cancel()
            elif what < 0.7 and False in held:
                held[held.index(False)] = True
                places.abandon()
            elif held:
                places.give_back(abandoned=held.pop(chance.randrange(len(held))))
            for _ in range(chance.choice([0, 3])):
                await asyncio.sleep(0)
            for turn in [turn for turn in waiting if turn.done()]:
                waiting.remove(turn)
                if not turn.cancelled() and turn.result():
                    held.append(False)
            await asyncio.sleep(0)
            assert len(held) <= total
            assert places.are_held == (held.count(True) == total)
        while held:
            places.give_back(abandoned=held.pop())
        for _ in range(5):
            await asyncio.sleep(0)
        places_taken = sum(not turn.cancelled() and turn.result() for turn in waiting if turn.done())
        for _ in range(places_taken):
            places.give_back()
        for turn in waiting:
            turn.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [await places.take() for _ in range(total)] == [True] * total
        assert all(one != other for one, other in itertools.pairwise(told)), "said when it changes"

    asyncio.run(main())
