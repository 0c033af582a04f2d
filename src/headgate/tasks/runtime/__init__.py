"""Running tasks: what submits, starts, interrupts, ends, records and reports them."""
