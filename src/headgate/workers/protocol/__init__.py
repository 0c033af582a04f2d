"""The protocol between clients and workers: messages, sessions, bulk payloads and the transport.

`client_session` and `worker_session` decide what is sent and what an answer means; they are pure. `bulk`,
`bulk_channel` and `shared_memory` move payloads that are too long for a frame. Only `transport` imports grpc. May
import `errors`, `core`, `context`, `workers.model`, and of the packages beside it only `serialization.definitions` and
`server.admission`. Entry points: `client_session.ClientSession`, `worker_session.WorkerSession`.
"""
