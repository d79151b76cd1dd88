"""Which transport a pair of instances uses: decided at the join, by both sides alike.

Theory of operation
-------------------
An instance offers transports, each with a *domain*: a name that is equal at two instances exactly
if that transport can carry bytes between them.  For shared memory it names the host and the mount
of /dev/shm, so that containers with one of their own are apart.  For a listener on loopback it
names the network namespace; for one that other hosts reach it is empty.  For a shared directory it
is a token in the directory.  So reachability is compared, never guessed from addresses.

Each lists its offers best first (`rank` of `epd.transport.backend`).  One from outside this project
was asked for by its name, and goes before all that leave the process.  A pair uses the first that
both offer with the same domain.  The function is pure and symmetric: gateway and both ends compute
it from the same records and need not agree by messages.  `--transport NAME` makes an instance offer
that one alone.

Only hops that a request can take matter: from an encoder to a prefill instance, and from a prefill
instance to a decode instance.  A pair of such roles that has nothing in common is refused at the
join, with what each of them offers.

A pair of `auto` falls back where a better way would be there if something were not missing, at one
of them, or between two GPUs of a host.  That both are on other hosts is no fault of theirs.
"""

from __future__ import annotations

from epd.messages import InstanceInfo, TransportOffer

BETWEEN_GPUS = "cuda"  # on one host
HOPS = (("encode", "prefill"), ("prefill", "decode"))


def common(own: tuple[TransportOffer, ...], its: tuple[TransportOffer, ...]) -> tuple[str, ...]:
    """Transports that can carry bytes between the two, the best one first."""
    places = [(own.index(offer) + its.index(offer), offer.name) for offer in own if offer in its]
    return tuple(name for _, name in sorted(places))


def choose(own: InstanceInfo, its: InstanceInfo) -> str:
    """The transport of this pair; empty if they have none in common."""
    return next(iter(common(own.transports, its.transports)), "")


def fallback(own: InstanceInfo, its: InstanceInfo) -> str:
    """Which better way this pair does not use, and why; empty if it uses the best."""
    name = choose(own, its)
    share_host = own.host_id.partition(":")[0] == its.host_id.partition(":")[0]
    for one, other in ((own, its), (its, own)):
        better = [offer.name for offer in other.transports]
        better = better[: better.index(name)] if name in better else []
        for lack in one.lacks:
            on_gpus = lack.name == BETWEEN_GPUS
            lacked_by_both = on_gpus and any(also.name == lack.name for also in other.lacks)
            if (lacked_by_both or lack.name in better) and (share_host or not on_gpus):
                return f"not {lack.name}: {one.address.instance_id} lacks it: {lack.reason}"
    both = all(BETWEEN_GPUS in (o.name for o in info.transports) for info in (own, its))
    if both and share_host and name not in {"", "local", BETWEEN_GPUS}:
        return (
            f"not {BETWEEN_GPUS}: both are on one host, but their GPUs do not reach each other, or "
            "their containers or users differ"
        )
    return ""


def exchange(own: InstanceInfo, its: InstanceInfo) -> bool:
    """Whether a request may move bytes between the two."""
    pairs = ((own.roles, its.roles), (its.roles, own.roles))
    return any(sends in a and takes in b for a, b in pairs for sends, takes in HOPS)


def objection(present: InstanceInfo, joining: InstanceInfo) -> str:
    """Why the two cannot be in one cluster; empty if they can."""
    if not exchange(present, joining) or choose(present, joining):
        return ""
    return (
        f"no transport in common: {describe(present)}; {describe(joining)}; start both with a "
        "--transport that reaches from one to the other"
    )


def describe(info: InstanceInfo) -> str:
    offers = (
        f"{offer.name} ({offer.domain})" if offer.domain else offer.name
        for offer in info.transports
        if offer.name != "local"  # of use in one process only
    )
    return f"{info.address.instance_id} offers {', '.join(offers) or 'none'}"
