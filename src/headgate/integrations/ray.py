"""`RayPlacement`: the workers of a pool on the nodes of a Ray cluster (extra `ray`).

One actor of Ray for each worker. The actor only keeps a host beside it (`workers/processes/worker_host.py`), which
starts our worker as a process of its own: a routine that holds the interpreter's lock never blocks Ray, and nothing
outlives the actor. Ray places the actors and restarts them; calls and reports do not go through it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from headgate.core.checks import checked_optional_count, named_options
from headgate.core.redaction import redact
from headgate.core.threads import Threads
from headgate.errors import InvalidArgument, InvalidType, WorkerStartFailed
from headgate.workers.processes.engine_placement import ORPHAN_TIMEOUT, EnginePlacement

if TYPE_CHECKING:
    from headgate.workers.processes.engine_keepers import OnPlace, OnTrouble

T = TypeVar("T")

_log = logging.getLogger("headgate.workers")
_IMPATIENT = 1.0  # seconds after which we look why an actor does not start, and between two such looks
_PAUSE, _LONGEST = 0.2, 5.0  # seconds before an actor that failed is asked again
_PATIENCE = 10.0  # for a cluster that may be gone, when a placement closes


class RayPlacement(EnginePlacement):
    """Starts the workers of a pool on a Ray cluster: ``WorkerPool(placement=RayPlacement(num_workers=4))``.

    `num_cpus`, `num_gpus` and `resources` are what Ray reserves for each worker, and `runtime_env` is its environment.
    `address` is that of the cluster. None: what `ray.init()` finds; a program that has called it uses that connection.
    When this program is killed, its workers end at once with their actors, or at the latest after `orphan_timeout`.
    """

    @named_options
    def __init__(
        self,
        num_workers: int = 1,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        address: str | None = None,
        orphan_timeout: float = ORPHAN_TIMEOUT,
    ) -> None:
        checked_optional_count("num_workers", num_workers, 1)
        if num_workers is None:
            raise InvalidType("num_workers must be a whole number, got NoneType")
        asked = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
        for name, amount in asked.items():
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0:
                raise InvalidArgument(f"a worker must ask for a number >= 0 of {name}, got {amount!r}")
        options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": dict(resources or {}),
            "runtime_env": None if runtime_env is None else dict(runtime_env),
        }
        super().__init__(_Ray(address, options, asked), num_workers, orphan_timeout)


class _Ray:
    """A Ray cluster as an engine: each actor is a place."""

    module_remedy = (
        "Add it to the image of Ray's nodes, or pass RayPlacement(runtime_env={'pip': [...]}) or, for your own files, "
        "{'working_dir': ...}; or send a module by value: cloudpickle.register_pickle_by_value(module)."
    )
    keeps_places = True

    def __init__(self, address: str | None, options: dict[str, Any], asked: Mapping[str, float]) -> None:
        self._address = address
        self._options = options
        self._asked = {name: amount for name, amount in asked.items() if amount}
        self._settings = b""
        self._actors: dict[str, Any] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Future[None]] = set()
        self._number = 0
        self._owns = False  # did we connect to the cluster?
        self._on_place: OnPlace
        self._on_trouble: OnTrouble
        self._threads = Threads("headgate asks Ray")  # nobody waits for them at the end: Ray may not answer any more

    async def open(self, settings: bytes, on_place: OnPlace, on_trouble: OnTrouble) -> int:
        """Connect to the cluster, in a thread because that blocks."""
        self._settings, self._on_place, self._on_trouble = settings, on_place, on_trouble
        try:
            await self._in_thread(self._connect)
        except ImportError as error:
            raise ImportError("RayPlacement needs the package ray: pip install 'headgate[ray]'") from error
        except Exception as error:
            where = "a Ray cluster" if self._address is None else f"the Ray cluster at {self._address}"
            raise WorkerStartFailed(
                f"{where} could not be reached: {type(error).__name__}: {error}",
                remedy="Start one with `ray start --head`, or pass the address of one: RayPlacement(address=...).",
            ) from error
        return 1

    def _connect(self) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(address=self._address)
            self._owns = True

    def want(self, workers: int) -> Collection[str]:
        """Have so many actors, at least."""
        while len(self._watching) < workers:
            self._number += 1
            key = f"actor-{self._number}"
            self._watch(key)
        return list(self._watching)

    def look(self, key: str) -> None:
        """Ask the actor where its host is now. Ray may be restarting it."""
        if key in self._watching and self._watching[key].done():
            self._watch(key)

    def _watch(self, key: str) -> None:
        self._watching[key] = asyncio.get_running_loop().create_task(self._find(key))

    async def _find(self, key: str) -> None:
        """Ask an actor until it says where its host listens."""
        pause = _PAUSE
        while True:
            try:
                if key not in self._actors:
                    self._actors[key] = await self._in_thread(self._make)
                self._on_place(key, await self._asked_where(self._actors[key]))
                return
            except Exception as error:
                self._on_trouble(_reason(error))
                if _is_over(error):
                    self._actors.pop(key, None)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST)

    def _make(self) -> Any:
        import ray

        from headgate.integrations.ray_actor import HostActor

        actor = ray.remote(HostActor).options(
            max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD", **self._options
        )
        return actor.remote(self._settings)

    async def _asked_where(self, actor: Any) -> str:
        asking: asyncio.Future[str] = asyncio.ensure_future(_awaited(actor.where.remote()))
        try:
            # An actor for which no node has room waits without a word, so we look why.
            while not (await asyncio.wait((asking,), timeout=_IMPATIENT))[0]:
                if reason := await self._in_thread(self._why_waiting):
                    self._on_trouble(reason)
            return asking.result()
        finally:
            asking.cancel()

    def _why_waiting(self) -> str:
        """Say which resource keeps actors from being placed; "": none does."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        asked = ", ".join(f"{name}: {amount:g}" for name, amount in self._asked.items())
        has = "; ".join(_described(node) for node in nodes) or "nothing"
        missing = [n for n, amount in self._asked.items() if all(node.get(n, 0.0) < amount for node in nodes)]
        if missing:
            return f"no node of the Ray cluster has enough {' and '.join(missing)} for a worker ({asked}); nodes: {has}"
        if not any(all(node.get(n, 0.0) >= amount for n, amount in self._asked.items()) for node in nodes):
            return f"no node of the Ray cluster has all that a worker asks for ({asked}); its nodes have {has}"
        free = ray.available_resources()
        used = [name for name, amount in self._asked.items() if free.get(name, 0.0) < amount]
        return f"all {' and '.join(used)} of the Ray cluster is in use; a worker asks for {asked}" if used else ""

    def drop(self, key: str) -> None:
        """End an actor."""
        watching = self._watching.pop(key)
        watching.cancel()
        if (actor := self._actors.pop(key, None)) is not None:
            ending = asyncio.ensure_future(self._in_thread(_kill, actor))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all actors, and leave the cluster if we have connected to it."""
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        if self._ending:
            await asyncio.wait(self._ending, timeout=_PATIENCE)
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._in_thread(self.abandon)
        except TimeoutError:
            _log.warning("the Ray cluster did not let us go within %g s", _PATIENCE)
        self._threads.shutdown(wait=False)

    async def _in_thread(self, blocks: Callable[..., T], *args: Any) -> T:
        """Run something that blocks in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, blocks, *args)

    def abandon(self) -> None:
        """End all actors, and leave the cluster if we have connected to it. From any thread."""
        actors, self._actors = self._actors, {}
        for actor in actors.values():
            _kill(actor)
        if self._owns:
            import ray

            self._owns = False
            ray.shutdown()


async def _awaited(reference: Any) -> str:
    return str(await reference)


def _kill(actor: Any) -> None:
    import ray

    try:
        ray.kill(actor)
    except Exception as error:  # the cluster is gone, and the actor with it
        _log.debug("an actor could not be ended: %s", redact(repr(error)))


def _is_over(error: Exception) -> bool:
    """Tell whether an actor will never answer, so that another is to be made."""
    from ray.exceptions import ActorDiedError, RuntimeEnvSetupError

    return isinstance(error, (ActorDiedError, RuntimeEnvSetupError))


def _reason(error: Exception) -> str:
    """Say in one line why an actor does not answer."""
    text = " ".join(str(error).split())
    if "No module named 'headgate" in text:
        return "headgate is not installed on the nodes of the Ray cluster: add it to their image, or to runtime_env"
    return f"an actor of Ray could not start a host: {type(error).__name__}: {text[:500]}"


def _described(resources: Mapping[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if not name.startswith("node:")}
    parts = []
    for name, amount in sorted(shown.items()):
        is_memory = name in ("memory", "object_store_memory")
        parts.append(f"{name}: {amount / 2**30:.1f} GiB" if is_memory else f"{name}: {amount:g}")
    return ", ".join(parts)
