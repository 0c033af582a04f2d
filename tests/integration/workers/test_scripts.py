"""W93: scripts. What a routine of `__main__` uses of its script is sent once, and W03 holds all the same.

Everything runs as a real script. It counts what is sent and loaded (`counting`), in its own process and on its workers;
no test looks at a clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

HEAD = '''
import asyncio, contextvars, enum, json, os, sys, threading, typing
from dataclasses import dataclass, field
import headgate
from tests.integration.workers import counting

class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2

class Place(typing.NamedTuple):
    row: int
    name: str = "here"

@dataclass
class Order:
    number: int
    kind: Kind = Kind.SMALL
    notes: list[str] = field(default_factory=list)
    rate: typing.ClassVar[int] = 1
    def total(self): return self.number * Order.rate * FACTOR
    def next(self): return Order(self.number + 1)

class Rush(Order):
    pass

class Refused(Exception):
    def __init__(self, order, *, why):
        super().__init__(why)
        self.order, self.why = order, why

FACTOR = 1

def kind_of(order):
    return Kind.LARGE if order.number > 10 else Kind.SMALL

@headgate.routine
async def counted():
    return counting.here()

async def all_counts():
    """Of this process and of both workers."""
    found = await asyncio.gather(*(counted() for _ in range(8)))
    return {"here": counting.here(), **{str(one["pid"]): one for one in found}}

async def sends_nothing_new(make):
    """Call twice so that everybody knows everything, then tell whether a third time sends or loads anything."""
    for _ in range(3):
        await make()
    await all_counts()
    before = await all_counts()
    await make()
    return before == await all_counts()
'''

TAIL = """
async def run():
    async with headgate.WorkerPool(spawn=2):
        await main()

def tell(**found):
    print(json.dumps(found))

asyncio.run(run())
"""


def run(body: str, tmp_path: Path) -> dict[str, Any]:
    """Run a script; returns what it tells."""
    file = tmp_path / "script.py"
    file.write_text(HEAD + body + TAIL)
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run(
        [sys.executable, str(file)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


RECURSION = """
@headgate.routine
async def fib(n):
    if n < 2:
        return n
    a, b = await asyncio.gather(fib(n - 1), fib(n - 2))
    return a + b

@headgate.routine
async def even(n):
    return True if n == 0 else await odd(n - 1)

@headgate.routine
async def odd(n):
    return False if n == 0 else await even(n - 1)

@headgate.routine
async def tree(order, depth):
    if depth == 0:
        return [order]
    left, right = await asyncio.gather(tree(order.next(), depth - 1), tree(order, depth - 1))
    assert all(type(one) is Order for one in left + right)
    return left + right

async def numbers(n):
    for i in range(n):
        yield i

@headgate.routine
async def orders(n):
    async for i in numbers(n):
        yield Order(i, kind_of(Order(i)))

async def main():
    made = await tree(Order(1), 5)
    tell(
        fib=await sends_nothing_new(lambda: fib(9)),
        mutual=await sends_nothing_new(lambda: even(21)),
        right=[await fib(9), await even(9), await odd(9)],
        tree=await sends_nothing_new(lambda: tree(Order(1), 5)),
        numbers=sorted(one.number for one in made),
        types=all(type(one) is Order for one in made),
        streamed=[one.kind is kind_of(one) and type(one) is Order async for one in orders(12)],
    )
"""


def test_w93_recursion_sends_a_script_once_to_every_worker(tmp_path: Path) -> None:
    found = run(RECURSION, tmp_path)
    assert found["right"] == [34, False, True]
    assert (found["fib"], found["mutual"], found["tree"]) == (True, True, True), "definitions, pickles and loads"
    assert len(found["numbers"]) == 32
    assert (found["types"], found["streamed"]) == (True, [True] * 12)


OBJECTS = """
@headgate.routine
async def takes(order):
    return isinstance(order, Order) and type(order) is Order, order.total()

@headgate.routine
async def rushes(order):
    return isinstance(order, Order), type(order) is Rush, type(order).__mro__[1] is Order

@headgate.routine
async def sized(order):
    return order.kind is kind_of(order)

@headgate.routine
async def gives(number):
    return Order(number, Kind.LARGE), Place(number), {Kind.SMALL: Rush(1)}

@headgate.routine
async def nested(order):
    return await gives(order.number), await takes(order.next())

@headgate.routine
async def blind(value):
    return value

current = headgate.ContextVar("current", default=None)

@headgate.routine
async def reads():
    order = current.get()
    current.set(order.next())
    return type(order) is Order, order.number

@headgate.routine
async def local():
    class Here:
        n = 3
    @headgate.routine
    async def makes(): return Here()
    return type(await makes()) is Here

@headgate.routine
def refuses(order):
    raise Refused(order, why=f"number {order.number}")

async def refused():
    try:
        await refuses(Order(4))
    except Refused as error:
        return type(error) is Refused, type(error.order) is Order, error.order.number, error.why

async def length(make):
    for _ in range(3):
        await make()
    return counting.lengths[-1]

async def main():
    order, place, held = await gives(3)
    (inner, _, _), taken = await nested(Order(6))
    current.set(Order(5))
    read = [*await reads(), type(current.get()) is Order, current.get().number]
    current.set(None)  # an object would be pickled with each call, and so would its class
    back = await blind([Order(1), Place(2), Kind.LARGE])
    tell(
        takes=await takes(Order(7)),
        rushes=await rushes(Rush(1)),
        sized=[await sized(Order(1)), await sized(Order(11, Kind.LARGE))],
        gives=[type(order) is Order, order.kind is Kind.LARGE, type(held[Kind.SMALL]) is Rush],
        place=[type(place) is Place, place.name],
        nested=[type(inner) is Order, inner.number, taken],
        blind=[type(one) is kind for one, kind in zip(back, (Order, Place, Kind))] + [back[2] is Kind.LARGE],
        refused=await refused(),
        context=read,
        local=await local(),
        again=[
            await sends_nothing_new(lambda: takes(Order(1))),
            await sends_nothing_new(lambda: gives(1)),
            await sends_nothing_new(lambda: nested(Order(1))),
            await sends_nothing_new(lambda: blind(Order(1))),
            await sends_nothing_new(refused),
        ],
        lengths=[await length(lambda: takes(Order(1))), await length(lambda: blind([Order(i) for i in range(40)]))],
    )
"""


def test_w93_objects_name_their_classes_which_stay_what_they_are(tmp_path: Path) -> None:
    found = run(OBJECTS, tmp_path)
    assert found["takes"] == [True, 7]
    assert found["rushes"] == [True, True, True]
    assert found["sized"] == [True, True], "an Enum has its members once on a worker"
    assert (found["gives"], found["place"]) == ([True, True, True], [True, "here"])
    assert found["nested"] == [True, 6, [True, 7]]
    assert found["blind"] == [True] * 4, "also of a routine that does not know the class"
    assert found["refused"] == [True, True, 4, "number 4"]
    assert found["context"] == [True, 5, True, 6], "values of context variables are of the same classes"
    assert found["local"], "classes that only a worker has"
    assert found["again"] == [True] * 5, "definitions, pickles and loads"
    one, many = found["lengths"]
    assert one < 300, "an instance, without its class"
    assert many < 2_000


CHANGES = """
@headgate.routine
async def total(order):
    return order.total()

@headgate.routine
async def makes(number):
    return Order(number).total()

@headgate.routine
async def changes(number):
    Order.rate = number
    await asyncio.sleep(0)
    return Order.rate, Order(1).total()

@headgate.routine
async def marks(order, mark):
    order.mark = mark
    await asyncio.sleep(0)
    return order

@headgate.routine
async def changes_what_it_is_given(kind, value):
    kind.rate = value
    await asyncio.sleep(0)
    return kind.rate

@headgate.routine
async def is_order(value):
    return isinstance(value, Order)

async def main():
    global FACTOR, Order
    seen = {"first": [await total(Order(2)), await makes(2)]}
    FACTOR = 10
    seen["global"] = [await total(Order(2)), await makes(2)]
    Order.rate = 3
    seen["attribute"] = [await total(Order(2)), await makes(2)]
    Order.total = lambda self: "patched"
    seen["method"] = [await total(Order(2)), await makes(2)]
    del Order.total
    Order.total = lambda self: self.number
    Order.rate = 1
    changed = await asyncio.gather(*(changes(number) for number in range(2, 10)))
    seen["own"] = changed == [(number, 1) for number in range(2, 10)]
    seen["given"] = await asyncio.gather(*(changes_what_it_is_given(Order, number) for number in range(2, 10)))
    seen["later"] = [await changes(5), await makes(7), Order.rate]
    marked = await asyncio.gather(*(marks(Order(i), i) for i in range(20)))
    seen["marked"] = all(type(one) is Order and one.mark == one.number for one in marked)
    seen["again"] = await sends_nothing_new(lambda: marks(Order(1), 1))
    seen["changed again"] = await sends_nothing_new(lambda: makes(1))
    old = Order(3)
    exec("@dataclass\\nclass Order:\\n    number: int\\n    def total(self): return -self.number", globals())
    seen["redefined"] = [await total(Order(2)), await makes(2), await total(old)]
    seen["old and new"] = [await is_order(old), await is_order(Order(1))]
    tell(**seen)
"""


def test_w93_w03_changes_are_seen_and_those_of_a_call_by_no_other(tmp_path: Path) -> None:
    found = run(CHANGES, tmp_path)
    assert found["first"] == [2, 2]
    assert found["global"] == [20, 20]
    assert found["attribute"] == [60, 60]
    assert found["method"] == ["patched", "patched"]
    assert found["own"], "calls that run at the same time do not see each other's changes"
    assert found["given"] == list(range(2, 10)), "nor changes of a class that they were given"
    assert found["later"] == [[5, 1], 7, 1]
    assert found["marked"], "attributes of arguments are set"
    assert (found["again"], found["changed again"]) == (True, True)
    assert found["redefined"] == [-2, -2, 3], "a cell that was run again"
    assert found["old and new"] == [False, True]


ERRORS = """
class Locked:
    lock = threading.Lock()

class Holding:
    def __init__(self):
        self.lock = threading.Lock()

class Varied:
    var = contextvars.ContextVar("var")

class Listed:
    seen = []
    def add(self):
        self.seen.append(1)
        return len(self.seen)

@headgate.routine
async def locks():
    return Locked.lock

@headgate.routine
async def varies():
    return Varied.var

@headgate.routine
async def blind(value):
    return value

@headgate.routine
async def lists(value):
    return value.add(), Listed().add()

@headgate.routine
async def returns_lock():
    return threading.Lock()

async def said(call):
    try:
        await call
    except headgate.HeadgateError as error:
        return [type(error).__name__, str(error)]

async def main():
    class Meta(type):
        pass
    class Odd(metaclass=Meta):
        pass
    tell(
        lock=await said(locks()),
        var=await said(varies()),
        holding=await said(blind(Holding())),
        of_locked=await said(blind(Locked())),
        returned=await said(returns_lock()),
        fine=await blind(Order(1)) == Order(1),
        listed=[await lists(Listed()) for _ in range(3)],
        odd=type(await blind(Odd())) is Odd,
    )
"""


def test_w93_w42_what_cannot_travel_is_named_as_ever(tmp_path: Path) -> None:
    found = run(ERRORS, tmp_path)
    kind, text = found["lock"]
    assert kind == "InvalidType"
    assert "__main__.locks" in text
    assert "cannot be pickled with what it refers to" in text
    assert "_thread.lock" in text
    assert found["var"][0] == "InvalidType"
    assert "headgate.ContextVar goes along with calls" in found["var"][1]
    assert found["holding"][0] == "InvalidType"
    assert "argument 'value' of __main__.blind" in found["holding"][1]
    assert found["of_locked"][0] == "InvalidType", "its class cannot be sent either"
    assert found["returned"][0] == "RemoteError"
    assert found["fine"], "nothing of the failures is left"
    assert found["listed"] == [[1, 2]] * 3, "a list of a class is not settled: each call has its own"
    assert found["odd"]
