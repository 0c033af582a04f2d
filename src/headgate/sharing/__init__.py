"""What processes share through a store: the port, the thread that every store has, and the protocols on top.

`states.SharedState` is the port that pools use. `transactions.Transactions` implements it once, above a small port
(`transactions.Backend`) that `sqlite`, `postgres` and `memory` implement. `protocol` is the frame around every kind of
shared state and `link` carries its messages; `slots` and `claims` are two kinds.
Imports `errors`, `core`, `gate`. Begin with `states`.
"""
