"""T60c, T14: results as dataclasses and the like, and results that cannot be kept, in pools with a store."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import IdempotencyConflict, InvalidArgument, InvalidType, TaskFailed, TaskPool
from headgate.stores import JsonLinesStore, MemoryStore, PostgresStore, SqliteStore, read_journal
from tests.support.tasks import result_samples
from tests.support.tasks.result_samples import RUNS, Answer, Handle, answer, opaque

HOME = result_samples.__name__


@pytest.fixture(autouse=True)
def _forgetful() -> None:
    RUNS.clear()


@pytest.fixture(params=["jsonl", "memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Makes the store of each run."""
    if request.param == "postgres":
        with PostgresStore(request.getfixturevalue("postgres_dsn")) as server:
            yield lambda: server
        return
    kept = MemoryStore()
    kinds: dict[str, Callable[[], Any]] = {
        "jsonl": lambda: JsonLinesStore(tmp_path / "journals"),
        "memory": lambda: kept,
        "sqlite": lambda: SqliteStore(tmp_path / "store.db"),
    }
    yield kinds[request.param]


def durable(store: Any, **options: Any) -> TaskPool:
    return TaskPool("work", scope="pipeline", pipeline_id="p", store=store, **options)


def once(store: Any, fn: Any, *args: Any, pool_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """One run of a program: submit one task with the key "k", and await it."""

    async def program() -> Any:
        async with durable(store, **(pool_options or {})) as pool:
            return await (await pool.submit(fn, *args, idempotency_key="k", **options))

    return asyncio.run(program())


def test_t60c_a_result_comes_back_as_its_type_after_a_restart(store: Callable[[], Any]) -> None:
    first = once(store(), answer, "hi")
    assert once(store(), answer, "hi") == first == Answer("hi", 2)
    assert RUNS == ["hi"]


def test_t60c_without_its_module_a_result_is_a_mapping_and_the_pool_says_so_once(
    store: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    once(store(), answer, "hi")
    monkeypatch.delitem(sys.modules, HOME)
    assert once(store(), answer, "hi") == {"text": "hi", "tokens": 2}
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"stored results of the type {HOME}:Answer come back as mappings" in said
    assert "result_types" in said
    assert once(store(), answer, "hi", pool_options={"result_types": [Answer]}) == Answer("hi", 2)
    assert HOME not in sys.modules


def test_t60c_a_result_that_cannot_be_kept_is_warned_of_in_the_first_run(
    store: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def program() -> None:
        async with durable(store()) as pool:
            for number in range(3):
                assert type(await (await pool.submit(opaque, number))) is Handle

    asyncio.run(program())
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"a result of type {HOME}.Handle is not kept: {HOME}.Handle has no form in JSON" in said
    assert "dataclasses" in said
    assert "on_opaque=" in said


def test_t60c_held_a_lost_result_keeps_its_key(store: Callable[[], Any]) -> None:
    once(store(), opaque, 1)
    with pytest.raises(TaskFailed, match=r"result_samples\.Handle, which could not be kept.*on_opaque='rerun'"):
        once(store(), opaque, 1)
    assert RUNS == [1]


def test_t14_t60c_with_rerun_a_lost_result_leaves_its_key(store: Callable[[], Any]) -> None:
    rerun = {"pool_options": {"on_opaque": "rerun"}}
    once(store(), opaque, 1, **rerun)
    assert type(once(store(), opaque, 1, **rerun)) is Handle
    assert RUNS == [1, 1]
    assert once(store(), answer, "other", **rerun) == Answer("other", 5)  # other work is no conflict: it was free
    assert once(store(), answer, "other", **rerun) == Answer("other", 5)
    assert RUNS == [1, 1, "other"]


def test_t60c_with_rerun_what_an_earlier_run_lost_is_run_again(store: Callable[[], Any]) -> None:
    once(store(), opaque, 1)
    assert type(once(store(), opaque, 1, pool_options={"on_opaque": "rerun"})) is Handle
    assert RUNS == [1, 1]


def test_t60c_with_rerun_the_key_is_free_in_the_same_run_too(store: Callable[[], Any]) -> None:
    async def program() -> None:
        async with durable(store(), on_opaque="rerun") as pool:
            first = await pool.submit(opaque, 1, idempotency_key="k")
            assert await pool.submit(opaque, 1, idempotency_key="k") is first  # while it is active
            await first
            second = await pool.submit(opaque, 1, idempotency_key="k")
            assert second is not first
            await second

    asyncio.run(program())
    assert RUNS == [1, 1]


@pytest.mark.parametrize("window", ["until_success", "forever", 60.0])
def test_t60c_with_rerun_the_journal_says_that_the_key_is_free(tmp_path: Path, window: Any) -> None:
    store = JsonLinesStore(tmp_path / "one.jsonl")
    for _ in range(30):
        once(store, opaque, 1, window=window, pool_options={"on_opaque": "rerun", "keep": 2})
    tasks = read_journal(store.path)
    assert {task["about"]["window"] for task in tasks} == {"while_active"}
    found = store.open(_pool_id(store), {}, keep=2)
    assert len(found.tasks) <= 3  # not one for each run: nothing holds a key
    found.close()


def _pool_id(store: JsonLinesStore) -> str:
    import json

    return str(json.loads(store.path.read_text().splitlines()[0])["pool_id"])


def test_t60c_with_fail_the_task_fails_in_the_first_run(store: Callable[[], Any]) -> None:
    with pytest.raises(TaskFailed, match=r"work#1 returned a .*Handle, which cannot be kept: .*no form in JSON"):
        once(store(), opaque, 1, retries=3, pool_options={"on_opaque": "fail"})
    assert RUNS == [1]  # another attempt would return the same
    assert once(store(), answer, "hi", pool_options={"on_opaque": "fail"}) == Answer("hi", 2)  # a failure frees the key


def test_t60c_with_the_pickle_codec_nothing_is_lost(tmp_path: Path) -> None:
    def store() -> JsonLinesStore:
        return JsonLinesStore(tmp_path, codec="pickle")

    assert type(once(store(), opaque, 1, pool_options={"on_opaque": "fail"})) is Handle
    assert type(once(store(), opaque, 1)) is Handle
    assert RUNS == [1]


def test_t60c_a_store_that_cannot_tell_keeps_everything() -> None:
    class Plain:
        """A store of somebody else, as the port asks for it."""

        shared = False

        def __init__(self) -> None:
            self._store = MemoryStore()

        def open(self, *args: Any) -> Any:
            journal = self._store.open(*args)

            class Journal:
                tasks = list(journal.tasks)
                append, flush, close = journal.append, journal.flush, journal.close

            return Journal()

    store = Plain()
    assert type(once(store, opaque, 1, pool_options={"on_opaque": "fail"})) is Handle
    with pytest.raises(TaskFailed):
        once(store, opaque, 1)


@pytest.mark.parametrize("options", [{"on_opaque": "again"}, {"on_opaque": None}, {"on_opaque": True}])
def test_t60c_on_opaque_is_one_of_three(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="on_opaque must be 'hold', 'rerun' or 'fail'"):
        durable(MemoryStore(), **options)


@pytest.mark.parametrize("options", [{"on_opaque": "rerun"}, {"result_types": [Answer]}])
def test_t60c_a_pool_that_stores_nothing_has_no_such_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="the scope is 'session'"):
        TaskPool("plain", **options)


def test_t60c_result_types_are_checked_by_the_pool() -> None:
    with pytest.raises(InvalidType, match="result_types"):
        durable(MemoryStore(), result_types=[int])


def test_t60c_shared_stores_refuse_pickles(tmp_path: Path) -> None:
    for make in (
        lambda: SqliteStore(tmp_path / "x.db", codec="pickle"),  # type: ignore[arg-type]
        lambda: PostgresStore("postgresql://localhost/x", codec="pickle"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match=r"codec must be 'json'.*runs code"):
            make()
    assert list(tmp_path.iterdir()) == []
    SqliteStore(tmp_path / "x.db", codec="json").close()


# -- T19 across restarts -----------------------------------------------------------------------------------------------


async def renamed(text: str) -> Answer:
    return await answer(text)


def test_t19_a_renamed_function_keeps_its_results_if_keys_are_trusted(store: Callable[[], Any]) -> None:
    once(store(), answer, "hi")
    with pytest.raises(IdempotencyConflict, match=r"it was .*:answer and is now .*:renamed, with the same arguments"):
        once(store(), renamed, "hi")
    assert once(store(), renamed, "hi", pool_options={"on_conflict": "trust_key"}) == Answer("hi", 2)
    assert RUNS == ["hi"]


def test_t19_a_payload_id_holds_across_restarts(store: Callable[[], Any]) -> None:
    once(store(), answer, "hi", payload_id="prompt-7")
    assert once(store(), renamed, "hi!", payload_id="prompt-7") == Answer("hi", 2)
    with pytest.raises(IdempotencyConflict, match="it was payload_id='prompt-7' and is now payload_id='prompt-8'"):
        once(store(), answer, "hi", payload_id="prompt-8")
    with pytest.raises(IdempotencyConflict, match=r"it was payload_id='prompt-7' and is now .*:answer"):
        once(store(), answer, "hi")
    assert RUNS == ["hi"]
