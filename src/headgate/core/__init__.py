"""What every room stands on: clock, events, waiters, cancellation. No pool knows another through here."""
