"""Who may start, with what, now: the limits of scarce things. Pure: time is an argument, and nothing here waits."""
