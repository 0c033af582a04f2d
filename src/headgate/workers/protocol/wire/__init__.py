"""The messages of the protocol: `wire.proto` defines them, `wire_pb2` is generated from it (`make wire`)."""

CONVERSE = "/headgate.wire.v1.Worker/Converse"
STOP = "/headgate.wire.v1.Worker/Stop"
STATUS = "/headgate.wire.v1.Worker/Status"
