"""Invariant 2: tokens are exactly the golden sequence, without gap or repeat, over migrations."""

from __future__ import annotations

from epd.sim.checkers.base import Checker
from epd.sim.golden import EOS


class GoldenTokens(Checker):
    name = "tokens"

    def at_end(self) -> None:
        for record in self.context.clients.records:
            golden = record.ask.answer()
            got = tuple(record.tokens)
            who = f"request {record.ask.index} ({record.request_id})"
            staged = tuple(record.staged)
            if staged != golden[: len(staged)]:
                self.violate(f"{who} was told {staged} of its prompt, not {golden[:1]}")
            if got != golden[: len(got)]:
                pairs = zip(got, golden, strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(golden))
                self.violate(f"{who} differs from the golden tokens at {at}: {got} not {golden}")
            elif record.finish_reason == "length" and got != golden:
                pass  # its time was over: `deadlines` looks whether it was
            elif record.finish_reason and got != golden:
                self.violate(f"{who} ended after {len(got)} of {len(golden)} tokens")
            elif record.finish_reason:
                stopped = record.ask.stops_at_eos and golden[-1] == EOS
                expected = "stop" if stopped else "length"
                if record.finish_reason != expected:
                    self.violate(f"{who} finished by {record.finish_reason}, not {expected}")
            for picture in record.ask.pictures:
                if picture[1].flaw in ("broken", "unencodable") and record.finish_reason:
                    self.violate(f"{who} was answered without its damaged picture (F40)")
