"""Invariant 2: tokens are exactly the golden sequence, without gap or repeat, over migrations, and
so are the log-probabilities of those who asked for them."""

from __future__ import annotations

from epd_lab.sim.checkers.base import Checker
from epd_lab.sim.client import Record


class GoldenTokens(Checker):
    name = "tokens"

    def at_end(self) -> None:
        for record in self.context.clients.records:
            self._check(record)

    def _check(self, record: Record) -> None:
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
            stopped = golden[-1] in record.ask.sampling().stop_token_ids
            expected = "stop" if stopped else "length"
            if record.finish_reason != expected:
                self.violate(f"{who} finished by {record.finish_reason}, not {expected}")
        self._check_logprobs(record, who)
        for image in record.ask.images:
            if image[1].flaw in ("broken", "unencodable") and record.finish_reason:
                self.violate(f"{who} was answered without its damaged image (F40)")

    def _check_logprobs(self, record: Record, who: str) -> None:
        """One for each token, and the prompt's with the first; none where nobody asked."""
        asked = record.ask.sampling().tells_logprobs
        golden = record.ask.said()[: len(record.tokens)] if asked else ()
        got = tuple(record.logprobs)
        if got != golden:
            pairs = zip(got, golden, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(golden)))
            self.violate(
                f"{who} was told {len(got)} log-probabilities of {len(golden)}, wrong from {at} on:"
                f" {got[at : at + 1]} not {golden[at : at + 1]}"
            )
