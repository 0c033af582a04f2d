"""What every other package uses: clock, events and topics, argument checks, wait queue, cancellation, redaction.

May import `headgate.errors` only, and knows no pool. There is no entry point: import the module that has the name.
"""
