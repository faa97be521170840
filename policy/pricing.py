"""Tokens → US dollars, from the dated table in configs/policy.yaml. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from policy.settings import Price
from tools.records import Usage

#: A dated snapshot costs what its alias costs: gpt-5-2025-08-07, claude-haiku-4-5-20251001.
_DATE = re.compile(r"-(\d{8}|\d{4}-\d{2}-\d{2})$")


def price_of(model: str, prices: Mapping[str, Price]) -> Price | None:
    """None for a model that the table does not name: its cost is then counted as 0, and the CLI says so."""
    return prices.get(model) or prices.get(_DATE.sub("", model))


def usage(
    model: str,
    prices: Mapping[str, Price],
    *,
    fresh_tokens: int,
    cache_read_tokens: int = 0,
    cache_write_tokens: int = 0,
    output_tokens: int = 0,
) -> Usage:
    """Token and cost counts of one request. ``input_tokens`` of the result is the sum of the three kinds of input."""
    price = price_of(model, prices)
    cost = 0.0
    if price:
        cost = (
            fresh_tokens * price.input
            + cache_read_tokens * price.cache_read
            + cache_write_tokens * (price.cache_write or price.input)
            + output_tokens * price.output
        ) / 1e6
    return Usage(
        input_tokens=fresh_tokens + cache_read_tokens + cache_write_tokens,
        output_tokens=output_tokens,
        cached_tokens=cache_read_tokens,
        cost_usd=cost,
    )
