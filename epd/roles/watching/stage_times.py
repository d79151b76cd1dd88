"""How long stages, hops and tokens take at one process, and how its transfers ended.

Theory of operation
-------------------
Hardly anything is measured while work is in progress. A machine's story has the time of each change
of its state. When a request has ended, rows are there, or a commit is acknowledged, the times in
its states are added up and counted into buckets. Only steps, and at the gateway the time between
two tokens, are counted as they come. Twenty times a second the lateness of the event loop is
counted. Every heartbeat carries all counts, so a lost one costs nothing; `/metrics` shows them.

The names of stages are those of the spans of a trace (`epd.records.STAGES`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from epd.fsm.encoding import Encoding
from epd.fsm.generation import Generation
from epd.fsm.kernel import Machine
from epd.fsm.outgoing import Outgoing
from epd.fsm.room import Room
from epd.keys import is_kv
from epd.messages import KvOffer
from epd.observed import LinkCount
from epd.records import STAGES, Counted, Histogram
from epd.scheduling.step_cost import Rate

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
NBYTES = tuple(float(1 << power) for power in range(12, 35, 2))  # 4 KiB to 16 GiB
LAG = "epd_loop_lag_seconds"
STEP = "epd_step_seconds"
GAP = "epd_inter_token_seconds"
MEAN_GAP = "epd_time_per_output_token_seconds"
TRANSFERS = "epd_transfers_total"
LINK_NBYTES = "epd_link_nbytes_total"
KINDS: dict[str, tuple[str, tuple[float, ...]]] = {
    "epd_stage_seconds": ("time in a stage: of a request, or of an image", SECONDS),
    "epd_hop_seconds": ("from the first byte's write to the last's, of rows or KV", SECONDS),
    "epd_hop_nbytes": ("bytes written for an image's rows or a prompt's KV", NBYTES),
    STEP: ("time of a step on its device", SECONDS),
    LAG: ("what is due at an event loop waits so long for its turn", SECONDS),
    GAP: ("between two deliveries of tokens to one client", SECONDS),
    MEAN_GAP: ("of an answer's tokens behind the first one, the mean", SECONDS),
}
COUNTS = {
    TRANSFERS: "ended rooms: delivered, cancelled, expired (out of time) or failed",
    LINK_NBYTES: "bytes written to a peer's memory",
}
DECODING = ("WAITING_FOR_REMOTE_KV", "DECODING")
MOVING = ("STREAMING", "WRITING")

Labels = tuple[tuple[str, str], ...]


class StageTimes:
    """The histograms of one process."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.rows_cost = Rate(now_s)  # of a byte to another instance
        self._counts: dict[tuple[str, Labels], list[int]] = {}
        self._sums: dict[tuple[str, Labels], float] = {}
        self._totals: Counter[tuple[str, Labels]] = Counter()
        self._told: tuple[Histogram, ...] | None = ()
        self._token_times: dict[str, tuple[float, float]] = {}  # of open requests: first and last

    def told(self) -> tuple[Histogram, ...]:
        """All of them, since the process began."""
        if self._told is None:
            self._told = tuple(
                Histogram(
                    name=name, labels=labels, counts=tuple(counts), total=self._sums[name, labels]
                )
                for (name, labels), counts in sorted(self._counts.items())
            )
        return self._told

    def counts(self) -> tuple[Counted, ...]:
        """All of them, since the process began."""
        return tuple(
            Counted(name=name, labels=labels, value=value)
            for (name, labels), value in sorted(self._totals.items())
        )

    def links(self) -> Iterator[LinkCount]:
        """Bytes by link, since the process began."""
        for (name, labels), nbytes in sorted(self._totals.items()):
            if name == LINK_NBYTES:
                yield LinkCount(**dict(labels), nbytes=nbytes)

    def note_stages(self, machine: Machine) -> None:
        """Once for each machine, when what it makes is there or given up."""
        spent_s: dict[Labels, float] = {}
        for state, lasted_s in _stays(machine):
            if stage := STAGES.get((machine.table.name, state)):
                labels: Labels = (("role", _role(machine, state)), ("stage", stage))
                spent_s[labels] = spent_s.get(labels, 0.0) + lasted_s
        for labels, lasted_s in spent_s.items():
            self._observe("epd_stage_seconds", labels, lasted_s)

    def note_hop(self, outgoing: Outgoing, transport: str) -> None:
        """Once for each room, by its producer, when all has arrived."""
        hop = "kv" if is_kv(outgoing.key) else "rows"
        labels = (("hop", hop), ("transport", transport))
        moving_s = sum(lasted_s for state, lasted_s in _stays(outgoing) if state in MOVING)
        self._observe("epd_hop_seconds", labels, moving_s)
        self._observe("epd_hop_nbytes", labels, outgoing.sent_nbytes)
        if hop == "rows" and transport != "local":
            self.rows_cost.observe(outgoing.sent_nbytes, moving_s)
        link = (("peer", outgoing.peer.instance_id), ("transport", transport))
        is_here = transport == "local"
        self._totals[LINK_NBYTES, link] += (
            outgoing.sent_nbytes if is_here else outgoing.egress_nbytes
        )

    def note_room(self, end: str, room: Room) -> None:
        """Once for each end of a room, in its terminal state."""
        hop = "kv" if is_kv(room.key) else "rows"
        labels = (("end", end), ("hop", hop), ("outcome", room.state.name.lower()))
        self._totals[TRANSFERS, labels] += 1

    def note_step(self, num_decodes: int, num_prompt_tokens: int, elapsed_s: float) -> None:
        """Once for each step that did not fail."""
        kind = "mixed" if num_decodes and num_prompt_tokens else "prompts"
        labels = (("batch", kind if num_prompt_tokens else "decodes"),)
        self._observe(STEP, labels, elapsed_s)

    def note_lag(self, late_s: float) -> None:
        """Now and then: so much later than it should have been, the event loop did something."""
        self._observe(LAG, (), late_s)

    def note_token(self, generation: Generation) -> None:
        """Tokens of it go to its client now."""
        now_s = self._now_s()
        first_s, last_s = self._token_times.get(generation.key, (now_s, 0.0))
        if last_s:
            self._observe(GAP, (), now_s - last_s)
        self._token_times[generation.key] = first_s, now_s

    def note_answer(self, generation: Generation) -> None:
        """Its answer has ended."""
        first_s, last_s = self._token_times.pop(generation.key, (0.0, 0.0))
        if last_s and (num_gaps := len(generation.token_ids) - 1) > 0:
            self._observe(MEAN_GAP, (), (last_s - first_s) / num_gaps)

    def _observe(self, name: str, labels: Labels, value: float) -> None:
        key, (_, bounds) = (name, labels), KINDS[name]
        if key not in self._counts:
            self._counts[key], self._sums[key] = [0] * (len(bounds) + 1), 0.0
        self._counts[key][bisect_left(bounds, value)] += 1
        self._sums[key] += value
        self._told = None


def _stays(machine: Machine) -> Iterator[tuple[str, float]]:
    """The states that it has left, and how long it was in each."""
    since_s: float | None = None
    for entry in machine.story:
        since_s = entry.at_s if since_s is None else since_s
        if entry.source != entry.target:
            yield entry.source, entry.at_s - since_s
            since_s = entry.at_s


def _role(machine: Machine, state: str) -> str:
    if isinstance(machine, Generation):
        return "gateway"
    if isinstance(machine, Encoding):
        return "encode"
    received = isinstance(getattr(machine, "message", None), KvOffer)
    return "decode" if received or state in DECODING else "prefill"
