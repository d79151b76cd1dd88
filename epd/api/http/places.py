"""Places of open requests, and what a key may have: none of them fills the gateway alone.

The gateway itself bounds how many are open (`limits.max_open_requests`). Of these, a key gets a
share where there are others that it could crowd out.  A place is held until the answer has left, so
that answers which no client reads count. One request of any permitted size fits.

Beside them stand the limits of a key (`KeyLimits`), by OpenAI's names in the answer's headers.
Tokens are estimated when a request comes: four bytes of text each, and all that it lets its answer
have.  What it was wrong by is set right at its end.  A request that got no place costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from epd.api.http.errors import ApiError
from epd.api.http.identity import Caller
from epd.config import KeyLimits, Limits
from epd.scheduling.admission.comebacks import Comebacks
from epd.scheduling.admission.rates import Bucket

MAX_ACCOUNTS = 4096  # then the one that was idle longest begins anew
NBYTES_PER_TOKEN = 4
NAMES = {
    kind: [f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset")]
    for kind in ("requests", "tokens")
}  # of headers
Headers = list[tuple[bytes, bytes]]


class Account:
    """Of one key: what it has open, and has left of its minute."""

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self.limits = limits
        self.open: list[float] = []  # since when each place is taken
        self.comebacks = Comebacks()
        given = zip(NAMES, (limits.requests_per_minute, limits.tokens_per_minute), strict=True)
        self.buckets = {kind: Bucket(most, now_s) for kind, most in given if most}

    def headers(self, now_s: float) -> Headers:
        """Of each limit that it has: how much, how much is left, when all is there again."""
        found: Headers = []
        for kind, bucket in self.buckets.items():
            left, reset_s = bucket.level(now_s), bucket.wait_s(bucket.per_minute, now_s)
            shown = str(bucket.per_minute), str(max(0, int(left))), f"{round(reset_s, 3):g}s"
            found += zip(NAMES[kind], map(str.encode, shown), strict=True)
        return found


class Bill:
    """The headers of a request's answer, and the tokens that it turned out to have."""

    def __init__(self, headers: Headers) -> None:
        self.headers = headers  # of its answer
        self.num_tokens = 0


class Places:
    """Of one gateway, by key."""

    def __init__(
        self,
        limits: Limits,
        num_keys: Callable[[], int],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = round(limits.max_open_requests * limits.max_open_share_per_key)
        self._num_keys = num_keys
        self._limits = limits
        self._now_s = now_s
        self._accounts: dict[str, Account] = {}  # the one used last is the last

    @contextmanager
    def taken(self, caller: Caller, count: int = 1, num_tokens: int = 0) -> Iterator[Bill]:
        """So many, meanwhile; `num_tokens`: as estimated.  Raises ApiError 429."""
        account, now_s = self._account(caller), self._now_s()
        self._check_open(account, count, now_s)
        amounts = {"requests": 1, "tokens": num_tokens}
        for kind, bucket in account.buckets.items():
            if bucket.wait_s(amounts[kind], now_s):
                wait_s = bucket.promise_s(amounts[kind], now_s)
                message = (
                    f"this API key has used its {bucket.per_minute} {kind} per minute; this "
                    f"request takes {amounts[kind]}, and fits in {wait_s:.1f} s"
                )
                code, shown = "rate_limit_exceeded", account.headers(now_s)
                raise ApiError(429, message, code=code, headers=shown, retry_after_s=wait_s)
        for kind, bucket in account.buckets.items():
            bucket.take(amounts[kind], now_s)
        account.open += [now_s] * count
        bill = Bill(account.headers(now_s))
        try:
            yield bill
        except ApiError as error:
            if error.may_be_retried and not bill.num_tokens:
                self._give_back(account, "requests", 1)
            raise
        finally:
            for _ in range(count):
                account.open.remove(now_s)
            account.comebacks.freed(self._now_s() - now_s)
            self._give_back(account, "tokens", num_tokens - bill.num_tokens)

    def _give_back(self, account: Account, kind: str, amount: int) -> None:
        if (bucket := account.buckets.get(kind)) is not None:
            bucket.take(-amount, self._now_s())

    def _check_open(self, account: Account, count: int, now_s: float) -> None:
        """That it may have so many more open; the first request of a key may have any number."""
        most = self._share if self._num_keys() > 1 else 0
        most = min(filter(None, (most, account.limits.concurrency)), default=0)
        num_open = len(account.open)
        if not most or not num_open or num_open + count <= most:
            return
        message = (
            f"this API key has {num_open} requests open, where {most} may be; "
            "try again when one of them has ended"
        )
        wait_s = account.comebacks.refused("", account.open, now_s)
        shown = account.headers(now_s)
        raise ApiError(429, message, code="overloaded", headers=shown, retry_after_s=wait_s)

    def _account(self, caller: Caller) -> Account:
        name, limits = caller.share, caller.limits or self._limits.per_key
        account = self._accounts.pop(name, None)
        if account is None or account.limits != limits:
            account = Account(limits, self._now_s())
        self._accounts[name] = account
        if len(self._accounts) > MAX_ACCOUNTS:
            idle = (name for name, one in self._accounts.items() if not one.open)
            del self._accounts[next(idle)]
        return account
