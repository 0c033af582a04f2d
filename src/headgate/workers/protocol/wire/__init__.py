"""The wire: `wire.proto` says what travels, `wire_pb2` is made from it (`make wire`)."""

CONVERSE = "/headgate.wire.v1.Worker/Converse"
STOP = "/headgate.wire.v1.Worker/Stop"
