"""Traces: the spans of a task, across processes, with the SDK's exporter that keeps them in memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from headgate import CooldownResource, InvalidArgument, InvalidType, Resource, ResourcePool, TaskPool, WorkerPool
from headgate.observe import opentelemetry
from headgate.tasks.runtime.executor import START_HOOKS
from headgate.testing import virtual
from headgate.workers import hooks
from tests.system.observe import trace_jobs
from tests.system.observe.support import SECRET

pytestmark = pytest.mark.integration


class Traces:
    def __init__(self, provider: TracerProvider) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = provider
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("tests")

    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: (span.start_time, span.end_time))

    def names(self) -> list[str]:
        return [span.name for span in self.spans()]

    def one(self, name: str) -> ReadableSpan:
        [found] = [span for span in self.spans() if span.name == name]
        return found

    def parent(self, span: ReadableSpan) -> str:
        assert span.parent is not None
        return next(one.name for one in self.spans() if one.context.span_id == span.parent.span_id)

    def text(self) -> str:
        return "".join(span.to_json() for span in self.spans())


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces(TracerProvider())
    uninstall = opentelemetry.install(traces.provider)
    yield traces
    uninstall()
    assert (START_HOOKS, hooks.CALLING, hooks.RUNNING) == ([], [], [])


def test_o31_a_task_has_spans_from_submit_to_run_and_its_own_below(traces: Traces) -> None:
    async def work(key: Resource[str], tries: list[int]) -> None:
        tries.append(1)
        with traces.tracer.start_as_current_span("inside"):
            await asyncio.sleep(0)
        if len(tries) == 1:
            raise CooldownResource(60, f"slow {key.value}")
        raise ValueError(f"failed with {key.value}")

    async def main() -> None:
        keys = ResourcePool([Resource("key-1", SECRET), Resource("key-2", SECRET[::-1])], name="o31-keys")
        async with TaskPool("o31", resources=keys, queue="fair_round_robin") as pool:
            with traces.tracer.start_as_current_span("request"):
                handle = await pool.submit(work, [], key="ann", labels={"gen_ai.request.model": "m-1", "x": object()})
            with pytest.raises(ValueError, match="failed with"):
                await handle

    asyncio.run(main())
    run = "run o31"
    first = ["submit o31", "queue o31", "lease key-1", run, "inside"]
    assert sorted(traces.names()) == sorted(["request", *first, *first[1:2], "lease key-2", *first[3:]])
    assert traces.parent(traces.one("submit o31")) == "request"
    assert {span.context.trace_id for span in traces.spans()} == {traces.one("request").context.trace_id}
    assert [traces.parent(span) for span in traces.spans() if span.name == "inside"] == [run, run]
    assert [traces.parent(span) for span in traces.spans() if span.name == run] == ["lease key-1", "lease key-2"]
    again, failed = [span for span in traces.spans() if span.name == run]
    assert (again.attributes or {})["headgate.task.status"] == "requeued"
    assert (again.attributes or {})["headgate.reason"] == "key-1: slow <key-1> (CooldownResource)"
    assert dict(failed.attributes or {}) == {
        "messaging.system": "headgate",
        "messaging.operation.name": "run",
        "messaging.operation.type": "process",
        "messaging.destination.name": "o31",
        "messaging.message.id": (traces.one("submit o31").attributes or {})["messaging.message.id"],
        "headgate.tenant": "ann",
        "headgate.attempt": 2,
        "gen_ai.request.model": "m-1",
        "headgate.task.status": "failed",
        "error.type": "ValueError",
    }
    assert failed.status.description == "ValueError: failed with <key-2>"
    assert SECRET not in traces.text()
    assert SECRET[::-1] not in traces.text()


def test_o31_spans_of_a_worker_join_the_trace(traces: Traces) -> None:
    ids: list[str] = []

    async def main() -> list[dict[str, Any]]:
        keys = ResourcePool([Resource("key-1", SECRET)], name="o31-far")
        async with WorkerPool(spawn=1, setup=trace_jobs.trace_here) as workers:
            async with TaskPool("o31-far", resources=keys, workers=workers) as pool:
                handle = await pool.submit(trace_jobs.work, 3, key="ann")
                assert await handle == 3
                with pytest.raises(ValueError, match="negative"):
                    await pool.run(trace_jobs.work, -1)
                ids.append(handle.id)
            with traces.tracer.start_as_current_span("direct"):
                assert await trace_jobs.double(4) == 8
            return await trace_jobs.spans_here()

    far = asyncio.run(main())
    runs = [span for span in far if span["name"].startswith("run tests.system.observe.trace_jobs.work")]
    dispatches = [span for span in traces.spans() if span.name == "dispatch o31-far"]
    assert [run["parent"] for run in runs] == [span.context.span_id for span in dispatches]
    assert [run["trace"] for run in runs] == [span.context.trace_id for span in dispatches]
    [doubled] = [span for span in far if "double" in str(span["name"])]
    called = traces.one(doubled["name"].replace("run", "dispatch"))
    assert doubled["parent"] == called.context.span_id
    assert traces.parent(called) == "direct"
    assert SECRET not in traces.text() + str(far)
    assert all((span.attributes or {}).get("headgate.worker.id") for span in dispatches)
    done, failed = runs
    assert [run["attributes"]["messaging.message.id"] for run in runs] == [
        (span.attributes or {})["messaging.message.id"] for span in dispatches
    ]
    assert (done["attributes"]["messaging.message.id"], done["status"]) == (ids[0], ("UNSET", None))
    assert "error.type" not in done["attributes"]
    assert failed["attributes"]["error.type"] == (dispatches[1].attributes or {})["error.type"] == "ValueError"
    assert failed["status"] == ("ERROR", "ValueError: negative with <key-1>")
    assert dispatches[1].status.description == failed["status"][1], "as the program's own span"
    assert not doubled["attributes"]["messaging.message.id"].startswith("pool-"), "it is no task's"


def test_o31_routines_that_a_task_calls_are_in_its_trace_each_below_its_dispatch(traces: Traces) -> None:
    async def main() -> tuple[str, str, list[dict[str, Any]]]:
        async with WorkerPool(spawn=2, setup=trace_jobs.trace_here) as workers:
            async with TaskPool("o31-here") as here, TaskPool("o31-there", workers=workers) as there:
                first = await here.submit(trace_jobs.quadruple, 1, key="ann")
                second = await there.submit(trace_jobs.quadruple, 1, key="bob")
                assert (await first, await second) == (4, 4)
            by_worker = await workers.broadcast(trace_jobs.spans_here)
            return first.id, second.id, [span for spans in by_worker.values() for span in spans]

    here, there, far = asyncio.run(main())
    far += [trace_jobs.told_of(span) for span in traces.spans()]
    by_id = {span["id"]: span for span in far}
    for task_id, tenant, top in ((here, "ann", "run o31-here"), (there, "bob", "dispatch o31-there")):
        inner = [span for span in far if span["name"].startswith("run tests.system.observe.trace_jobs.double")]
        span: dict[str, Any] | None
        [span] = [span for span in inner if span["attributes"]["messaging.message.id"] == task_id]
        chain = []
        while span is not None:
            assert span["attributes"].get("messaging.message.id", task_id) == task_id
            assert span["attributes"].get("headgate.tenant", tenant) == tenant
            chain.append(
                span["name"].rpartition(":")[0].replace("tests.system.observe.trace_jobs.", "") or span["name"]
            )
            span = by_id.get(span["parent"])
        middle = ["run double", "dispatch double", "run quadruple"]
        middle = middle if top.startswith("dispatch") else [*middle, "dispatch quadruple"]
        assert chain == [*middle, top, top.replace("run", "submit").replace("dispatch", "submit")]


def test_o31_a_call_that_is_run_again_after_a_loss_has_one_dispatch(traces: Traces, tmp_path: Path) -> None:
    async def main() -> list[dict[str, Any]]:
        async with WorkerPool(spawn=1, setup=trace_jobs.trace_here):
            await trace_jobs.dies_once(str(tmp_path / "died"))
            return await trace_jobs.spans_here()

    [far] = asyncio.run(main())
    once, asked = traces.spans()
    assert (once.parent, far["parent"]) == (None, once.context.span_id)
    assert (once.attributes or {})["headgate.worker.id"] == (asked.attributes or {})["headgate.worker.id"], "the last"


def test_o31_calls_of_a_task_that_is_not_sampled_have_no_span_anywhere() -> None:
    traces = Traces(TracerProvider())
    uninstall = opentelemetry.install(traces.provider, sample=0.0)

    async def main() -> list[dict[str, Any]]:
        async with WorkerPool(spawn=1, setup=trace_jobs.trace_here), TaskPool("o31-none") as pool:
            assert await pool.run(trace_jobs.quadruple, 1) == 4
            return await trace_jobs.spans_here()

    assert asyncio.run(main()) == []
    uninstall()
    assert [name.partition(":")[0] for name in traces.names()] == [
        "dispatch tests.system.observe.trace_jobs.spans_here"
    ]


def test_o31_an_attempt_that_is_made_again_says_why_and_where(traces: Traces) -> None:
    async def main() -> None:
        keys = ResourcePool([Resource("key-1", SECRET), Resource("key-2", SECRET[::-1])], name="o31-again")
        async with (
            WorkerPool(spawn=1) as workers,
            TaskPool("o31-again", resources=keys, workers=workers) as pool,
        ):
            assert await pool.run(trace_jobs.limited) == "key-2"
            with pytest.raises(ValueError, match="negative"):
                await pool.run(trace_jobs.work, -1, retries=1)

    asyncio.run(main())
    limited, _, retried, last = [dict(span.attributes or {}) for span in traces.spans() if "dispatch" in span.name]
    assert (limited["headgate.task.status"], limited["headgate.reason"]) == (
        "requeued",
        "key-1: 429 for <key-1> (CooldownResource)",
    )
    assert retried["headgate.reason"] == "ValueError: negative with <key-2>"
    assert limited["headgate.worker.id"] == retried["headgate.worker.id"] == last["headgate.worker.id"]
    assert "headgate.reason" not in last
    assert SECRET not in traces.text()
    assert SECRET[::-1] not in traces.text()


def test_o31_what_is_not_sampled_is_not_sampled_inside_either() -> None:
    traces = Traces(TracerProvider(sampler=ParentBased(ALWAYS_OFF)))
    uninstall = opentelemetry.install(traces.provider)

    async def work() -> None:
        with traces.tracer.start_as_current_span("inside"):
            await asyncio.sleep(0)

    async def main() -> None:
        async with TaskPool("o31-off") as pool:
            await pool.run(work)
        await ResourcePool(["k"], name="o31-off").run(lambda _: work())

    asyncio.run(main())
    uninstall()
    assert traces.names() == []


@pytest.mark.parametrize("sample", [0.0, 0.05, pytest.param(1.0, marks=pytest.mark.soak)])
def test_o31_a_share_of_the_tasks_is_traced_each_as_a_whole(sample: float) -> None:
    traces = Traces(TracerProvider())
    uninstall = opentelemetry.install(traces.provider, sample=sample)

    async def work() -> None:
        with traces.tracer.start_as_current_span("inside"):
            await asyncio.sleep(0)

    @virtual
    async def main() -> None:
        async with TaskPool("o31-share", max_concurrent=10) as pool:
            for _ in range(1000):
                await pool.submit(work)
            await pool.drain()
            inside = traces.names().count("inside")
            with traces.tracer.start_as_current_span("request"):
                await pool.run(work)
            assert traces.names().count("inside") == inside + 1, "a task follows the span in which it was submitted"

    main()
    uninstall()
    counts = Counter(traces.names())
    assert counts["inside"] == counts["submit o31-share"] == counts["queue o31-share"] == counts["run o31-share"]
    assert abs(counts["inside"] - 1 - 1000 * sample) <= (30 if 0 < sample < 1 else 0)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), "all"])
def test_o31_a_share_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="sample must be"):
        opentelemetry.install(sample=wrong)


def test_o31_a_call_without_a_task_has_its_lease(traces: Traces) -> None:
    async def work(key: Resource[str]) -> None:
        assert trace.get_current_span().get_span_context().is_valid

    async def main() -> None:
        with traces.tracer.start_as_current_span("request"):
            await ResourcePool([Resource("key-9", SECRET)], name="o31-alone").run(work)

    asyncio.run(main())
    lease = traces.one("lease key-9")
    assert traces.parent(lease) == "request"
    assert (lease.attributes or {})["headgate.outcome"] == "ok"


def test_o31_a_second_install_replaces_the_first(traces: Traces) -> None:
    other = Traces(TracerProvider())
    uninstall = opentelemetry.install(other.provider)

    async def main() -> None:
        async with TaskPool("o31-twice") as pool:
            await pool.run(asyncio.sleep, 0)

    asyncio.run(main())
    uninstall()
    assert traces.names() == []
    assert other.names() == ["submit o31-twice", "queue o31-twice", "run o31-twice"]


def test_o31_nothing_is_imported_when_not_used_and_the_error_names_the_extra() -> None:
    code = "import headgate, sys; headgate.TaskPool('x'); print([m for m in sys.modules if 'opentelemetry' in m])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import headgate.observe.opentelemetry as o, headgate\n"
        "try: o.install()\n"
        "except headgate.HeadgateError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'headgate[otel]'" in ran.stdout
