"""The code of `script_jobs.py` as a module: workers import its functions and classes."""

from __future__ import annotations

import asyncio

import script_jobs

if __name__ == "__main__":
    asyncio.run(script_jobs.serve())
