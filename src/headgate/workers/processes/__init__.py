"""Worker processes on this machine: the keeper that starts them, and what each of them runs."""
