"""What clients and workers say to each other: messages, sessions, bulk transfers, and the transport below them."""
