"""Placement by predicted completion: what waits at an instance, times what it costs there.

Theory of operation
-------------------
A device does one thing at a time, so an instance is asked how many seconds of images and prompts
wait there (`Backlog`, times the costs that it has measured).  Who decodes there takes turns with
them: between two steps of decodes the device works for a quantum at most.  From these two follows
when something more would be done (`_Forecast.done_s`).

- **Prefill**: where the prompt, less its cached part, and its answer would be done first: with its
  rows' hops, and the best place to decode it from there.  What another holds of it and this one
  would compute again is also taken from those who come until the queues are empty.  So under load
  a prefix is worth more than the time of its own request.
- **Encode**, image by image, those before it counted: until its prompt can go on, with the hop of
  its rows, plus what it takes from all others (`delay_s`).  Encoded elsewhere, an image saves its
  own prompt the time of the tower at most, for at prefill it waits for those before it anyway.  So
  under load its delay of others counts: of prompts at prefill, or of streams at decode.  A queue
  that has not been empty for long will not be soon, and also delays those who come until then; a
  stream goes on beside what delays it.  It leaves prefill only for an encoder better by
  `MOVE_GAIN`, by `SHARE_GAIN` if that has prompts of its own: replicas that share their images end
  all late.  Of equal ones the one by rendezvous hashing on `mm_hash` (Thaler and Ravishankar 1998):
  equal images meet.
- **Decode**: where the answer is done first: its steps, with one more sequence in them, in turns
  with the prompts that wait there and their images.  Images of prompts that are computed elsewhere
  do not count, for they are there because few decode.  If answers fled them, one of two equal
  instances would have all images and the other all answers.  It leaves prefill, or who holds the
  prompt's KV, only for one that is better by `MOVE_GAIN`: KV moves, and the request then depends on
  two instances.

No herd: each choice changes the next one's backlog at once, without a heartbeat.  Equal devices do
not measure quite the same: they differ by chance, and by what they had to do.  So all count as the
fastest, but for those that are surely slower by more than `ALIKE`: an instance that was slow long
ago is asked again.  What nobody has measured yet costs what is usual (`USUAL`): only ratios count
then.  With nothing to choose from nothing is computed.

`epd plan --set placement=fixed` compares it with counting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from epd.messages import InstanceInfo, StageCosts
from epd.observed import StageLoad
from epd.scheduling.placement import Candidate, Image, Needs, busyness, weight

USUAL = StageCosts(patch_s=3e-6, token_s=15e-6, step_s=4e-3, sequence_s=5e-5, nbyte_s=5e-10)
COMPUTED = ("patch_s", "token_s", "step_s", "sequence_s")
COSTS = (*COMPUTED, "nbyte_s")
HOP_S = 0.001  # grant, write, commit
ANSWER_TOKENS = 64  # of an answer that count: nobody knows how long it will be
STREAM_WORTH = 2  # who decodes counts for so many who wait: all that is left of it is later
MANY_SERVED = 50  # of these, more say no more of how soon a queue will be empty
MOVE_GAIN = 0.1  # of the time of these, which makes decoding or encoding elsewhere worth it,
SHARE_GAIN = 0.3  # and encoding where other prompts are computed
ALIKE = 1.5  # times the fastest


class _Forecast:
    """When one instance would be done with what waits there."""

    __slots__ = (
        "_backlog",
        "_has_prompts",
        "_quantum_s",
        "costs",
        "images_s",
        "prompts_s",
        "ready_s",
    )

    def __init__(self, candidate: Candidate, costs: StageCosts) -> None:
        self._backlog = backlog = candidate.backlog
        self._quantum_s = candidate.load.costs.quantum_s
        self._has_prompts = "prefill" in candidate.roles
        self.costs = costs
        self.images_s = self.encode_s(backlog.num_patches)
        self.ready_s = costs.token_s * backlog.num_ready
        self.prompts_s = costs.token_s * backlog.num_tokens

    def encode_s(self, num_patches: int) -> float:
        return self.costs.patch_s * num_patches

    def step_s(self, count: int) -> float:
        return self.costs.step_s + self.costs.sequence_s * count if count else 0.0

    def done_s(self, work_s: float) -> float:
        """So much, in turns with decodes."""
        turns = 1.0 + work_s / self._quantum_s if self._quantum_s else 1.0
        return work_s + turns * self.step_s(self._backlog.num_decoding)

    def encoded_s(self, more_s: float) -> float:
        """When so much more is encoded, in turns with prompts and decodes."""
        images_s = self.images_s + more_s
        return self.done_s(images_s + min(images_s, self.ready_s))

    def delay_s(self, more_s: float) -> float:
        """What so much more to do costs the prompts and streams that are there, all together."""
        backlog = self._backlog
        return more_s * (backlog.num_prompts + STREAM_WORTH * backlog.num_decoding)

    def token_s(self) -> float:
        """A step with one more of those who decode here, or will."""
        return self.step_s(self._backlog.num_sequences + 1)

    def answer_s(self, num_tokens: int) -> float:
        """An answer of so many tokens, in turns with prompts that wait here, and their images."""
        work_s = self.work_s if self._has_prompts else 0.0
        if self._quantum_s:
            work_s = min(work_s, num_tokens * self._quantum_s)
        return num_tokens * self.token_s() + work_s

    @property
    def work_s(self) -> float:
        return self.images_s + self.prompts_s


class PredictedRule:
    """See `placement.Rule`."""

    def __init__(self, asked: Needs, candidates: Sequence[Candidate]) -> None:
        self._asked = asked
        self._candidates = candidates

    @cached_property
    def _forecasts(self) -> dict[str, _Forecast]:
        usual = _usual(c.load.costs for c in self._candidates)
        return {
            c.instance_id: _Forecast(c, _completed(c.load.costs, usual)) for c in self._candidates
        }

    @cached_property
    def _num_to_come(self) -> int:
        """Prompts that will come before none waits: about as many as have come since none did,
        anywhere, for one that comes goes there."""
        served = [c.backlog.num_served for c in self._candidates if "prefill" in c.roles]
        return min([*served, MANY_SERVED])

    def prefill(self, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Candidate:
        held = self._asked.held
        most = max(held.get(c.instance_id, 0.0) for c in prefills)

        def completion_s(prefill: Candidate) -> float:
            forecast = self._forecasts[prefill.instance_id]
            share = held.get(prefill.instance_id, 0.0)
            whole_s = forecast.costs.token_s * self._asked.num_tokens
            prompt_s = whole_s * (1.0 - share)
            rows_s = sum(self._rows_s(image, prefill) for image in self._asked.images)
            answer_s = min(self._answer_s(prefill, decode) for decode in decodes)
            others_s = whole_s * (most - share) * self._num_to_come
            return forecast.done_s(forecast.work_s + prompt_s) + others_s + rows_s + answer_s

        return min(prefills, key=lambda c: (completion_s(c), *busyness(c)))

    def decode(self, prefill: Candidate, decodes: Sequence[Candidate]) -> Candidate:
        return min(
            decodes,
            key=lambda c: (
                self._answer_s(prefill, c),
                c is not prefill,
                self._forecasts[c.instance_id].work_s,
                -c.load.free_kv_blocks,
                c.instance_id,
            ),
        )

    def encoder(self, image: Image, encoders: Sequence[Candidate], prefill: Candidate) -> Candidate:
        here = self._forecasts[prefill.instance_id]
        waits_s = here.done_s(here.images_s + here.ready_s)

        def cost_s(encoder: Candidate) -> float:
            """Until its prompt can go on, and what it takes from others."""
            forecast = self._forecasts[encoder.instance_id]
            image_s = forecast.encode_s(image.num_patches)
            others_s, gain = forecast.delay_s(image_s), MOVE_GAIN
            if "prefill" in encoder.roles:
                others_s += image_s * self._num_to_come
                gain = SHARE_GAIN
            if encoder is prefill:
                return here.done_s(here.images_s + here.ready_s + image_s) + others_s
            rows_s = forecast.encoded_s(image_s) + self._hop_s(image, encoder)
            return (max(rows_s, waits_s) + others_s) / (1.0 - gain)

        costs = {c.instance_id: cost_s(c) for c in encoders}
        least_s = min(costs.values())
        best = [c for c in encoders if costs[c.instance_id] == least_s]
        chosen = max(best, key=lambda c: (c is prefill, weight(image.mm_hash, c.instance_id)))
        forecast = self._forecasts[chosen.instance_id]
        forecast.images_s += forecast.encode_s(image.num_patches)
        return chosen

    def _rows_s(self, image: Image, prefill: Candidate) -> float:
        """What its rows cost at this prefill beyond what they cost everywhere."""
        known, name = self._asked.known, prefill.instance_id
        places = (*known.resident(image.mm_hash), *known.in_flight(image.mm_hash))
        is_here = name in places if places else "encode" in prefill.roles
        return 0.0 if is_here else self._hop_s(image, prefill)

    def _hop_s(self, image: Image, one: Candidate) -> float:
        contract = one.info.row_contract
        nbytes = image.num_rows * contract.row_nbytes if contract is not None else 0
        return HOP_S + nbytes * self._forecasts[one.instance_id].costs.nbyte_s

    def _answer_s(self, prefill: Candidate, decode: Candidate) -> float:
        """To decode there what was computed here."""
        num_tokens = min(self._asked.max_tokens, ANSWER_TOKENS)
        answer_s = self._forecasts[decode.instance_id].answer_s(num_tokens)
        if decode is prefill:
            return answer_s * (1.0 - MOVE_GAIN)
        held = self._asked.held.get(decode.instance_id, 0.0)
        answer_s *= 1.0 - MOVE_GAIN * held
        nbytes = (1.0 - held) * _kv_nbytes(decode.info, self._asked.num_tokens)
        return answer_s + HOP_S + nbytes * self._forecasts[prefill.instance_id].costs.nbyte_s


class Outlook(NamedTuple):
    """What one more request would find, in predicted seconds."""

    waits_s: float  # until instances get to it: the least busy ones of each stage that it needs
    parallel: int  # how many instances share such work
    num_ahead: int  # prompts at the least busy one
    prices: tuple[float, float]  # of a patch, and of a token of a prompt
    is_measured: bool  # else these are ratios, no seconds
    is_sure: bool = True  # by more than a few steps, which may have been held up

    def first_token_s(self, queued_s: float, own_s: float) -> float:
        """From now, behind so many seconds of work that no instance has got yet."""
        return self.waits_s + queued_s / self.parallel + own_s


def outlook(candidates: Sequence[Candidate], *, with_images: bool) -> Outlook:
    """For one with images to encode, or without."""
    usual = _usual(c.load.costs for c in candidates)
    stages: dict[str, list[float]] = {"encode": [], "prefill": []}
    for one in candidates:
        forecast = _Forecast(one, _completed(one.load.costs, usual))
        work_s = forecast.done_s(forecast.work_s) if forecast.work_s else 0.0
        for stage in stages.keys() & one.roles:
            stages[stage].append(work_s)
    if not with_images:
        stages["encode"] = []
    waits_s = max((min(waits) for waits in stages.values() if waits), default=0.0)
    num_ahead = min((c.backlog.num_prompts for c in candidates if "prefill" in c.roles), default=0)
    needed = {
        "token_s": True,
        "patch_s": with_images,
        "step_s": any(c.backlog.num_decoding for c in candidates),
    }
    costs = [cost for cost, is_needed in needed.items() if is_needed]
    told = [c.load.costs for c in candidates]
    measured = (any(getattr(t, cost) for t in told) for cost in costs)
    sure = (any(getattr(t, cost) and cost not in t.unsure for t in told) for cost in costs)
    parallel, prices = max(1, *map(len, stages.values())), (usual["patch_s"], usual["token_s"])
    return Outlook(waits_s, parallel, num_ahead, prices, all(measured), all(sure))


def predicted_loads(candidates: Sequence[Candidate]) -> Iterator[StageLoad]:
    """Of each stage of each of these: the images and prompts that wait there; what a step of
    those takes who decode there."""
    usual = _usual(c.load.costs for c in candidates)
    for one in candidates:
        forecast = _Forecast(one, _completed(one.load.costs, usual))
        stages = {
            "encode": forecast.images_s,
            "prefill": forecast.prompts_s,
            "decode": forecast.step_s(one.backlog.num_decoding),
        }
        for stage in one.roles:
            yield StageLoad(instance=one.instance_id, stage=stage, load_s=stages[stage])


def predicted_waits(candidates: Sequence[Candidate], max_running: int) -> dict[str, float]:
    """How long each of these could work at once: on images, on prompts whose images are encoded,
    and in rounds of answers that have begun."""
    usual, waits = _usual(c.load.costs for c in candidates), {}
    for one in candidates:
        forecast = _Forecast(one, _completed(one.load.costs, usual))
        num = one.backlog.num_decoding
        answers_s = num / max_running * ANSWER_TOKENS * forecast.step_s(num)
        waits[one.instance_id] = forecast.images_s + forecast.ready_s + answers_s
    return waits


def _kv_nbytes(info: InstanceInfo, num_tokens: int) -> int:
    """Of a prompt, as it moves: of layers with a window, the last one."""
    layout = info.kv_layout
    return layout.rows.needed(num_tokens, 1) * layout.block_nbytes if layout is not None else 0


def _usual(told: Iterable[StageCosts]) -> dict[str, float]:
    """The least that was measured of each.  Without a measurement: the usual cost, scaled by the
    mean ratio of measured to usual costs."""
    all_, least = list(told), {}
    for name in COSTS:
        known = [value for costs in all_ if (value := getattr(costs, name))]
        if known:
            least[name] = min(known)
    ratios = [least[name] / getattr(USUAL, name) for name in COMPUTED if name in least]
    scale = sum(ratios) / len(ratios) if ratios else 1.0
    scales = dict.fromkeys(COMPUTED, scale)
    return {n: least.get(n, getattr(USUAL, n) * scales.get(n, 1.0)) for n in COSTS}


def _completed(costs: StageCosts, usual: dict[str, float]) -> StageCosts:
    """Its own where it is another kind of device."""
    sure = (name for name in COSTS if name not in costs.unsure)
    own = {name: value for name in sure if (value := getattr(costs, name)) > ALIKE * usual[name]}
    return StageCosts(**{**usual, **own})
