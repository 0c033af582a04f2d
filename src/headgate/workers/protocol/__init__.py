"""What clients and workers say to each other.

`wire` has the messages. `client_session` and `worker_session` decide what is sent and what an answer means (pure).
`bulk` and `shared_memory` send what is too long for a frame. `transport` opens channels and binds servers; no other
module imports grpc. Imports `core`, `context`, the values of `workers.model`, the definitions of functions in
`workers.serialization` and the reservations in `workers.server.admission`. Begin with `client_session`.
"""
