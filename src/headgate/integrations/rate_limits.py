"""What the headers of an answer say about rate limits: the reader that `http_errors`, the transports and quotas use."""

from __future__ import annotations

from headgate.resources.rate_limits import Limit, RateLimits, may_be_spent, read_rate_limits

__all__ = ["Limit", "RateLimits", "may_be_spent", "read_rate_limits"]
