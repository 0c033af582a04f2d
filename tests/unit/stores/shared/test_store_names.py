"""G02: stores by name, "sqlite:///..." and "postgresql://...", and HEADGATE_STORE."""

from __future__ import annotations

import gc
import os
import sys
import types
from pathlib import Path

import pytest

from headgate.errors import InvalidArgument
from headgate.stores import MemoryStore, SqliteStore
from headgate.stores.addresses import store_from_environment, store_of


def test_g02_a_name_gives_a_sqlite_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = store_of("sqlite:///data/shared.db")
    assert isinstance(relative, SqliteStore)
    assert relative.path == tmp_path / "data" / "shared.db"
    assert store_of(f"sqlite:///{tmp_path}/data/shared.db") is relative, "the same file: the same store"
    assert store_of("SQLITE:///./data/shared.db") is relative
    assert store_of("sqlite:///other.db") is not relative
    assert list(tmp_path.iterdir()) == []


def test_g02_a_closed_store_is_not_given_again(tmp_path: Path) -> None:
    name = f"sqlite:///{tmp_path}/shared.db"
    store = store_of(name)
    store.close()
    again = store_of(name)
    assert again is not store
    assert store_of(name) is again


def test_g02_a_store_that_nobody_holds_is_forgotten(tmp_path: Path) -> None:
    name = f"sqlite:///{tmp_path}/shared.db"
    first = id(store_of(name))
    gc.collect()
    keep = [object() for _ in range(10)]
    assert store_of(name) is not None
    assert first
    assert keep


def test_g02_other_objects_are_returned_as_they_are() -> None:
    memory = MemoryStore()
    for value in (memory, None, 3, Path("sqlite:///x")):
        assert store_of(value) is value


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_g02_a_name_of_postgres_is_passed_on(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class PostgresStore:
        def __init__(self, dsn: str) -> None:
            self.dsn = dsn

    module = types.ModuleType("headgate.stores.postgres")
    module.PostgresStore = PostgresStore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headgate.stores.postgres", module)
    dsn = f"{scheme}://user:secret@host/database?x=1"
    store = store_of(dsn)
    assert store.dsn == dsn
    assert store_of(dsn) is store


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "shared.db",
        "sqlite:",
        "sqlite://",
        "sqlite:///",
        "sqlite:////",
        "sqlite://shared.db",
        "sqlite://user:secret@host/x",
        "sqlite:///:memory:",
        "sqlite:///shared.db?password=secret",
        "postgresql://",
        "postgres:secret@host",
        "mysql://user:secret@host/database",
        "redis://:secret@host",
        "user:secret@host",
    ],
)
def test_g02_wrong_names_are_refused_without_showing_them(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument) as caught:
        store_of(wrong)
    assert "secret" not in str(caught.value)
    if "?" not in wrong:
        assert "sqlite:///" in str(caught.value)
        assert "postgresql://" in str(caught.value)
    if wrong:
        monkeypatch.setenv("HEADGATE_STORE", wrong)
        with pytest.raises(InvalidArgument, match="HEADGATE_STORE") as caught:
            store_from_environment()
        assert "secret" not in str(caught.value)


def test_g02_the_environment_may_name_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_STORE", raising=False)
    assert store_from_environment() is None
    monkeypatch.setenv("HEADGATE_STORE", " ")
    assert store_from_environment() is None
    monkeypatch.setenv("HEADGATE_STORE", f"sqlite:///{tmp_path}{os.sep}shared.db\n")
    store = store_from_environment()
    assert isinstance(store, SqliteStore)
    assert store is store_of(f"sqlite:///{tmp_path}/shared.db")
