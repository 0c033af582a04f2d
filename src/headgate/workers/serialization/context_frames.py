"""What is set in a caller's Context, on its way with a call: both ends of it, with the codec of this room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headgate.context.chains import CHAIN, NONE, VALUES, present
from headgate.context.travel import Exchange, outgoing, received, refused, warn, warn_and_go_on
from headgate.core.redaction import log_exception
from headgate.errors import InvalidArgument
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.serialization.pickling import dump_whole

if TYPE_CHECKING:
    from headgate.workers.protocol.messages import Answer, Outgoing
    from headgate.workers.server.running_call import RunningCall


def nothing() -> bool:
    """Is nothing set in this Context, and was nothing ever asked of it? As a rule."""
    return VALUES.get() is NONE and CHAIN.get() is None


# -- at the caller ----------------------------------------------------------------------------------------------------


def sent(tag: str, most: int, exchange: Exchange | None = None, *, lenient: bool = False) -> bytes:
    """What goes with a call, or with a step of one that has an exchange. Errors name what cannot. To be asked when all
    else of the call is pickled: a token in it makes an id for this Context necessary, and this tells the id."""
    data = outgoing(dump_whole) if exchange is None else exchange.send(dump_whole, lenient=lenient)
    if 0 < most < len(data) and not lenient:
        raise InvalidArgument(
            f"the context variables set when {tag} is called take {len(data):,} bytes, and max_payload is {most:,}",
            remedy="Set less, pass it as an argument in parts, or open the pool with a higher `max_payload`.",
        )
    return data


def came_back(call: Outgoing, answer: Answer, running: Any, *, skipped: bool = False) -> list[str]:
    """Take over what came with an answer; what of it could not be read, for `tell`. `skipped`: nobody takes it."""
    if not answer.context:
        return []
    scope = None if running is None else running.scope
    exchange = call.exchange
    if exchange is None:
        return received(answer.context, lambda data: loads(data, scope))
    failures: list[str] = exchange.receive(answer.context, lambda data: loads(data, scope), skipped=skipped)
    return failures


def came_back_late(call: Outgoing, answers: Sequence[Answer], running: Any) -> None:
    """The same for one that was cancelled: what cannot be read is not worth more than that."""
    for answer in answers:
        warn_and_go_on(came_back(call, answer, running), call.form.tag)


def tell(tag: str, failures: Sequence[str], error: BaseException | None = None) -> None:
    """Warn of it; an exception that came with it says so too, before its remote traceback. With a filter that makes
    this an error, it is raised from that exception."""
    if error is not None:
        notes: list[str] = list(getattr(error, "__notes__", ()))
        try:
            BaseException.__setattr__(error, "__notes__", [*notes[:-1], *failures, *notes[-1:]])
        except BaseException:  # its class does not like to be changed
            pass
    try:
        warn(failures, tag)
    except Warning as strict:
        raise strict from error


# -- at the worker ----------------------------------------------------------------------------------------------------


def arrived(running: RunningCall, data: bytes) -> None:
    """Set in this Context what came with a call, or with a step of it."""
    if running.exchange is None:
        running.exchange = Exchange("worker")
    failures = running.exchange.receive(data, lambda value: loads(value, running.scope))
    if failures:
        warn(failures, running.begun.function.tag)


def changed(running: RunningCall) -> bytes:
    """What goes back with a result or an item. Never fails: an outcome is worth more."""
    exchange = running.exchange
    if exchange is None:
        if nothing():
            return b""
        exchange = running.exchange = Exchange("worker")
    tag, limit = running.begun.function.tag, running.stream.max_payload
    try:
        data = exchange.send(dump_whole, lenient=True, tag=tag, most=limit)
    except BaseException as error:
        log_exception("headgate.workers", "what %s set in its Context cannot be told to its caller", tag)
        data = refused(f"what {tag} set in its Context cannot be written down ({type(error).__name__})")
    return data


def ended(running: RunningCall) -> bytes:
    """The same for the last time: nothing will run in this Context any more."""
    data = changed(running)
    chain = present()
    if chain is not None:
        chain.end()
    return data
