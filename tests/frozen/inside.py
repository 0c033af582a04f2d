"""Every name below the public ones that the recordings need. A module that moves changes this file and no other here.

The recordings themselves do not change with it: a moved module must send, write and read the same.
"""

from __future__ import annotations

from headgate import errors as error_module
from headgate.context.travel import Exchange, outgoing, refused
from headgate.core.clock import clock
from headgate.core.events import Event
from headgate.observe.events import ActionTaken
from headgate.tasks.model import View
from headgate.workers import events as worker_events
from headgate.workers.model import FunctionForm, RoutineOptions
from headgate.workers.protocol.bulk import Borrowed, BulkPayload
from headgate.workers.protocol.client_session import ClientSession
from headgate.workers.protocol.messages import NEWEST, OLDEST, Outgoing, Peer
from headgate.workers.protocol.wire.wire_pb2 import Probe, ToClient, ToWorker
from headgate.workers.protocol.worker_session import WorkerSession
from headgate.workers.routines import as_routine
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.serialization.functions import PortableFunction
from headgate.workers.serialization.pickling import (
    dump_arguments,
    dump_exception,
    dump_sent,
    dump_thrown,
    dump_whole,
    dumps,
    load_arguments,
    load_exception,
)

CONVERSE = "/headgate.wire.v1.Worker/Converse"
"""The method of the stream, as gRPC names it."""

RECORDED_NAMES = {"ProtocolViolation": "ConversationBroken"}
"""Classes that were renamed since: their names now, and the names in the recordings."""

__all__ = [
    "CONVERSE",
    "NEWEST",
    "OLDEST",
    "RECORDED_NAMES",
    "ActionTaken",
    "Borrowed",
    "BulkPayload",
    "ClientSession",
    "Event",
    "Exchange",
    "FunctionForm",
    "Outgoing",
    "Peer",
    "PortableFunction",
    "Probe",
    "RoutineOptions",
    "ToClient",
    "ToWorker",
    "View",
    "WorkerSession",
    "as_routine",
    "clock",
    "dump_arguments",
    "dump_exception",
    "dump_sent",
    "dump_thrown",
    "dump_whole",
    "dumps",
    "error_module",
    "load_arguments",
    "load_exception",
    "loads",
    "outgoing",
    "refused",
    "worker_events",
]
