"""Every example runs as a user would run it, and prints what it promises; ``...`` stands for what differs each time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SCALE
from tests.warm_start import Template, run_program

EXAMPLES = Path(__file__).parents[3] / "examples"

# Parts of other programs.
NOT_ALONE = {"pretend_httpx", "small_upstream"}

# Kept short enough to be read at once and copied.
MOST_LINES = 60
LONGER = {"four_processes": 105}  # what one process does, and what the others do

PRINTS = {
    "quickstart": """\
key-3 says: hello, world
<ResourcePool 'resources-1' 1 healthy, 1 cooling ...s, 1 disabled | 0 in flight>
""",
    "rate_limited_keys": """\
{'status': 'OK', 'served_with': 'sk-ccc', 'echo': {'prompt': 'hi'}}
key-1: cooling_down, ... s left
key-2: disabled, 0 s left
key-3: healthy, 0 s left
""",
    "keys_proxy": """\
with the token:  {"data": ["small-model", "large-model"]}
without it:      401 invalid_token
another path:    404 path_not_allowed
state:           {'OLD_KEY': 'disabled', 'NEW_KEY': 'healthy'}
exit code:       0
""",
    "deadline_and_request_id": """\
req-abc: ok
sk-bbb
req-def: exhausted
no_eligible: no eligible resource in pool... [HEADGATE-RES-001]
""",
    "paid_then_free": """\
healthy: ['paid-primary', 'paid-primary', 'paid-primary']
limited: free-fallback
cooling: ['free-fallback', 'free-fallback', 'free-fallback']
later:   ['paid-primary', 'paid-primary', 'paid-primary']
""",
    "regions_with_limits": """\
8 at once: {'region-us': 8}
16 at once: {'region-us': 8, 'region-eu': 8}
20 at once: {'region-us': 8, 'region-eu': 8, 'region-asia': 4}
""",
    "cooldown_table": """\
key-1 cools down for 10 s, 1 in a row
key-1 cools down for 30 s, 2 in a row
key-1 cools down for 60 s, 3 in a row
key-1 cools down for 120 s, 4 in a row
key-1 cools down for 120 s, 5 in a row
200
key-1 cools down for 10 s, 1 in a row
200
""",
    "operation_shapes": """\
200
helped two
blocked on three
awaited
operation must return an Awaitable, got int. ... [HEADGATE-ARG-002]
""",
    "inside_the_operation": """\
wrong: the caller got the 429, and key-1 is healthy
right: /things with the second key and key-1 is cooling_down
""",
    "resource_kinds": """\
keys: 20 calls, at most 20 at once
proxies: 20 calls, at most 10 at once
browsers: 20 calls, at most 1 at once
gpus: 20 calls, at most 1 at once
""",
    "waiting_instead_of_failing": """\
at once:
  job 2 has no GPU: no_eligible
  job 3 has no GPU: no_eligible
  job 4 has no GPU: no_eligible
  job 5 has no GPU: no_eligible
  job 0 on gpu-0
  job 1 on gpu-1
waiting, first come first served:
  job 0 on gpu-0
  job 1 on gpu-1
  job 2 on gpu-0
  job 3 on gpu-1
  job 4 on gpu-0
  job 5 on gpu-1
waiting, but not for long:
  job 2 has no GPU: deadline
  job 3 has no GPU: deadline
  job 4 has no GPU: deadline
  job 5 has no GPU: deadline
  job 0 on gpu-0
  job 1 on gpu-1
""",
    "streaming_with_failover": """\
key-2:keys
key-2:come
key-2:and
key-2:go
key-3:keys
key-3:come
broke off: 429 in the middle
{'key-1': 'cooling_down', 'key-2': 'healthy', 'key-3': 'cooling_down'}
""",
    "lease_a_browser": """\
not this time: session is gone
('browser-2', ['page /login', 'page /cart'])
('browser-2', ['page /login', 'page /cart'])
<ResourcePool 'resources-1' 1 healthy, 0 cooling, 1 disabled | 0 in flight>
""",
    "watching_a_pool": """\
resources.usage: resource_acquired key-1
resources.health: resource_cooled key-1
resources.usage: resource_released key-1 cooldown
resources.usage: resource_acquired key-2
resources.usage: resource_released key-2 retry
resources.usage: resource_acquired key-2
resources.usage: resource_released key-2 ok
resources.run: run_finished req-1 ok
found
resources.health: resource_recovered key-1
resources.usage: resource_acquired key-1
resources.usage: resource_released key-1 ok
resources.run: run_finished req-2 ok
found
{"status": "healthy", "in_flight": 0, "max_in_flight": null, "consecutive_cooldown": 0, ...}
4 attempts, 2 calls, 1 cooldown, 1 retry
key-2 has served 1
""",
    "rotating_keys_live": """\
before: {'key-1': 'healthy', 'key-2': 'cooling_down'}
after:  {'key-1': 'healthy', 'key-2': 'cooling_down', 'key-3': 'healthy'}
in flight meanwhile: sk-old
from now on: ['sk-ccc', 'sk-new']
by hand: {'key-1': 'disabled', 'key-2': 'healthy'}
""",
    "review_pull_requests": """\
running in pr-review
completed - done: review this PR (be kind)
done: review this PR (be kind)
""",
    "queue_strategies": """\
fifo:             a1 a2 a3 b1 b2 c1
lifo:             c1 b2 b1 a3 a2 a1
priority:         a3 b2 a1 a2 b1 c1
fair_round_robin: a1 b1 c1 a2 b2 a3
by name:          a1 a2 a3 b1 b2 c1
""",
    "full_queue": """\
block_submitter  completed completed completed SubmitTimeout SubmitTimeout
fail_submitter   completed completed completed QueueFull QueueFull
drop_oldest      completed rejected rejected completed completed
drop_newest      completed completed completed rejected rejected
drop_fair        completed completed rejected rejected completed
refuse_fair      completed completed completed QueueFull QueueFull
ring_buffer      completed rejected rejected completed completed
fail_fast        completed PoolBusy PoolBusy PoolBusy PoolBusy
""",
    "waiting_for_tasks": """\
completed a None
failed None ValueError('no b today')
cancelled None None
a
its own exception: no b today
TaskCancelled HEADGATE-TSK-003
""",
    "events_to_tasks": """\
refused: 'NoneType' object is not subscriptable
4 submitted: [('acme', 3), ('acme', 0), ('acme', 0), ('bolt', 0)]
reviewed a1
reviewed a2
reviewed b1
reviewed a3
""",
    "tenants_in_turn": """\
fifo: F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 ann1 ann2 ann3 bob1 bob2 bob3
  ann and bob are done after 18 of 18 tasks; Jain's index 0.57
fair_round_robin: F1 ann1 bob1 F2 ann2 bob2 F3 ann3 bob3 F4 F5 F6 F7 F8 F9 F10 F11 F12
  ann and bob are done after 9 of 18 tasks; Jain's index 1.00
""",
    "weights_and_caps": """\
tokens in the first 40 tasks: {'paying': 2700, 'free': 900, 'long': 1200}
at once, at most: 8
with a cap of 2 for each: {'paying': 2, 'free': 2, 'long': 2}
with a cap for one: 1
""",
    "nested_work": """\
55 after 177 tasks, at most 2 active at a time
failed at its timeout; 0 subtasks left
told: numbers#... would wait for numbers#..., which waits for numbers#...
numbers#... would wait for numbers#..., which waits for numbers#...
""",
    "pipeline_restart": """\
first run, in a process that dies
  fetching one
  {'page': 'one', 'size': (3, 4)}
  fetching two
second run
  one is completed
  two is stale
  {'page': 'one', 'size': (3, 4)}
  fetching two
  {'page': 'two', 'size': (3, 4)}
third run
  one is completed
  two is stale
  two is completed
  {'page': 'one', 'size': (3, 4)}
  {'page': 'two', 'size': (3, 4)}
""",
    "four_processes": """\
4 processes, 2 of 2 slots in use, 13 queued
12 tasks have run, at most 2 at a time
in turn: big small big small big small big small big big big big
another process has both slots for a minute: my task is queued
it found a key limited, which rests here too: <ResourcePool 'keys' 1 healthy, 1 cooling ...s, 0 disabled | 0 in flight>
that process is killed: ... s later my task is completed
""",
    "worker_quickstart": """\
3
""",
    "recursive_fib": """\
13
nested calls went to all workers: True
with do_dispatch(False) they stay here: True
""",
    "streamed_fib": """\
streamed: 0 1 1 2 3 5 8 13 21 34 55 89
nested:   0 1 1 2 3 5 8 13
all at once: [3, 8, 21]
called by None and then a chain of 4 tasks
on one worker: 21
""",
    "stream_tokens": """\
model: stopped after 8 tokens on the canal
whole: A gate at the head of a canal that lets in as much water as the fields below can take .
part: A river that was told where to go
said by two workers, and this process is neither: True
""",
    "killed_worker": """\
without retries: 10 results, 10 lost
each names its worker: True
with retries: 20 results, all right: True
""",
    "cpu_work": """\
primes below 2 million: {148933}
counted by 2 processes, and this one is none of them: True
meanwhile this one had its turns: True
""",
    "busy_workers": """\
four pages, on each worker: [2, 2]
six pages: 4 done, 2 refused by both
w-...: RESOURCE_EXHAUSTED: its backpressure hook refused the task
""",
    "map_with_progress": """\
in order: p1 p2 p3 p4 page 5 is gone p6 p7 p8
as they are done: p4 p3 p2 p1
got p1
got p2
got p3
got p4
stopped: page 5 is gone
""",
    "context_tenant": """\
door of unknown
key of acme, lock of acme: spent 11 on 2 workers
nut of bolt, screw of bolt: spent 12 on 2 workers
spent here: 4
page 1 of acme - spent so far: 5
page 2 of acme - spent so far: 6
page 3 of bolt - spent so far: 7
door of unknown
""",
    "context_strict": """\
lenient: 42 and no trace
recorded: 42 and the value of the context variable '__main__:trace' cannot be read: LookupError: no such span here
strict: the value of the context variable '__main__:trace' cannot be read: LookupError: no such span here
strict on the worker: the value of the context variable '__main__:trace' cannot be read: LookupError: no such span here
""",
    "llm_batch": f"""\
{" ".join(f"A{number}" for number in range(30))}
free: 3 answers, now cooling_down
old: 0 answers, now disabled
paid: 27 answers, now healthy
""",
    "openai_batch": """\
92 answers, the last one: Answer to Another one
bolt did not wait for acme: True
key-2: disabled
refused by the provider, with: 401 429
""",
    "anthropic_stream": """\
keys|slots|workers
keys|slots|workers
asked with key-1 key-2 key-3 key-2 key-3
{'key-1': 'cooling_down', 'key-2': 'healthy', 'key-3': 'healthy'}
""",
    "fastapi_service": """\
greedy: {200: ..., 503: ...}
ann and bob: 6x7? 42. 6x7? 42.
{'code': 'HEADGATE-...', 'detail': 'There is no capacity for this now. Try again in ... s.'} Retry-After: ...
without a tenant: 400
""",
    "polite_scraping": """\
answers: {200: 21, 404: 3}
one: cooling_down, rests for [], served []
two: healthy, rests for ['shop.example.com'], served ['maps.example.com', 'news.example.com']
three: healthy, rests for [], served ['shop.example.com']
""",
    "gpu_per_worker": """\
running: 2 - queued for a GPU: 2
primes: {'job-1': 168, 'job-2': 303, 'job-3': 430, 'job-4': 550}
on both workers: True
jobs on one GPU at a time: at most 1
job-5 1.00, job-5 0.50, job-5 0.33, job-5 0.25
""",
    "tenants_with_weights": """\
['expired', 'expired']
of the first 24 turns: {'acme': 12, 'bolt': 8, 'corp': 4}
an answer to the hard one
questions#63 (acme), pool-.../63: completed after ... s, 3 attempts
  ...  submitted
  ...  attempt 1 begins with key-1
  ...  attempt 1 ends: key-1: 429 (CooldownResource); queued again
  ...  attempt 2 begins with key-2
  ...  attempt 2 ends: key-2: 429 (CooldownResource); queued again
  ...  waits: no resource of keys is free: 2 cooling down, 0 disabled, 0 in full use, the first for ... s more
  ...  attempt 3 begins with key-1
  ...  completed
""",
}


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - NOT_ALONE == PRINTS.keys()


FLAGS = ["-X", "dev", "-W", "error"]
LOADED = ["asyncio", "ctypes", "ssl", "headgate.resources.pool", "headgate.tasks.pool", "headgate.workers.pool"]
"""Without gRPC, which does not work in a fork of a process that has loaded it."""


@pytest.fixture(scope="module")
def template() -> Iterator[Template | None]:
    """An interpreter with headgate loaded, of which examples are forks; at full length each has one of its own."""
    if SCALE >= 1 or sys.platform != "linux":
        yield None
        return
    template = Template(FLAGS, LOADED)
    yield template
    template.close()


SLOW = {"anthropic_stream", "context_strict", "fastapi_service", "four_processes", "streamed_fib"}
"""They use what others use too, and take a second or more: run in `make soak`."""


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in SLOW else ()) for name in PRINTS]
)
def test_an_example_prints_what_it_promises(name: str, tmp_path: Path, template: Template | None) -> None:
    command = [sys.executable, *FLAGS, str(EXAMPLES / f"{name}.py")]
    if template is not None and template.makes(command, os.environ):
        code, out, err = run_program(template, command, tmp_path, timeout=60)
    else:
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=60)
        code, out, err = ran.returncode, ran.stdout, ran.stderr
    assert (code, out) == (0, Alike(PRINTS[name])), err
    # What Python says of a lost coroutine, task or file, and what must never be logged.
    for bad in ("Traceback", "Exception ignored", "never awaited", "never retrieved", "sk-"):
        assert bad not in quiet(err)


def quiet(stderr: str) -> str:
    """Without what asyncio's debug mode says of a step that took long: of a busy machine, or of importing gRPC."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("Executing <"))


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_can_be_read_at_once(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text("utf-8")
    assert text.startswith('"""')
    assert len(text.splitlines()) < LONGER.get(name, MOST_LINES)
    hosts = re.findall(r"https?://([\w.-]+)", text)
    assert all(host.endswith("example.com") for host in hosts)


class Alike(str):
    """Equal to a text in which any ``...`` is filled in."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        pattern = re.escape(str(self)).replace(re.escape("..."), "[^\n]*")
        return isinstance(other, str) and re.fullmatch(pattern, other) is not None

    def __ne__(self, other: object) -> bool:
        return not self == other


def test_dots_fill_one_line_only() -> None:
    assert Alike("a ... c\n") == "a b c\n"
    assert Alike("a ... c\n") != "a b\n c\n"
    assert Alike("a") != "b"
