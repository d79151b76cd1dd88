"""Effects, owned things and states of REQUEST."""

from __future__ import annotations

from epd.fsm.kernel import Effect, Owned, State


class Do(Effect):
    ACQUIRE_EMBEDDINGS = "want every item's rows"
    RELEASE_EMBEDDINGS = "drop the references to rows"
    ENQUEUE = "join the queue for the batch"
    EXTEND = "the batch may compute up to the next image that lacks"
    DEQUEUE = "leave the queue or the batch"
    OFFER_KV = "ask the decode instance for blocks"
    WITHDRAW_OFFER = "the decode instance's blocks are not needed"
    PUSH_KV = "let decode have the KV that is final"
    HAND_OVER_KV = "give the blocks to the transfer: its bytes are ready"
    MOVE_KV = "ask another decode instance for blocks, and give the own ones to the transfer"
    BEQUEATH = "let the attempt that has its KV sent elsewhere have the blocks"
    REFUSE_MOVE = "tell the gateway that it cannot move"
    START_DECODING = "join the decode batch"
    RESERVE_BLOCKS = "join the queue for blocks, for remote KV"
    CANCEL_TRANSFER = "stop the transfer of remote KV"
    RELEASE_BLOCKS = "return the blocks to the pool"
    RETURN_PASSED = "return blocks behind the window to the pool"
    EMIT_TOKENS = "send new tokens to the gateway"
    SEND_FAILURE = "tell the gateway why"
    SEND_ABORTED = "confirm the abort to the gateway"
    ARM_LEASE = "hold the blocks for a while, among others that are held"
    END_LEASE = "hold them no longer"
    ARM_GRACE = "look again later whether the step or transfer has ended"
    REPORT_HANG = "the device does not answer: say so in health and log"
    REPORT_SPANS = "send the story to the gateway, for the timeline"


class Own(Owned):
    QUEUE_PLACE = "a place in the queue for the batch", Do.DEQUEUE
    BATCH_PLACE = "a place in the batch", Do.DEQUEUE
    LEASE = "a place among what is held for others", Do.END_LEASE
    BLOCKS = "KV blocks", Do.RELEASE_BLOCKS, Do.HAND_OVER_KV, Do.MOVE_KV, Do.BEQUEATH
    EMBEDDINGS = "references to rows, asked for or here", Do.RELEASE_EMBEDDINGS
    OFFER = "room for its KV at decode, asked for or granted", Do.WITHDRAW_OFFER, Do.HAND_OVER_KV
    REMOTE_KV = "a transfer under way into blocks that are the transfer's"


class S(State):
    ARRIVED = "asks for what it needs first"
    WAITING = "in the queue", Own.QUEUE_PLACE, Own.EMBEDDINGS
    WAITING_FOR_EMBEDDINGS = "its rows are loading", Own.EMBEDDINGS
    RUNNING = (
        "its prompt is being computed",
        *(Own.BATCH_PLACE, Own.BLOCKS, Own.EMBEDDINGS, Own.OFFER),
    )
    WAITING_MID_PROMPT = (
        "computed up to an image whose rows are loading",
        *(Own.BATCH_PLACE, Own.BLOCKS, Own.EMBEDDINGS, Own.OFFER),
    )
    PREEMPTED = (
        "gave its blocks up for an older request; will be computed again",
        *(Own.QUEUE_PLACE, Own.EMBEDDINGS, Own.OFFER),
    )
    TRANSFERRING = "the KV transfer has the blocks, and goes its own way"
    WAITING_FOR_REMOTE_KV = "its KV is on its way", Own.REMOTE_KV
    DECODING = "one token a step", Own.BATCH_PLACE, Own.BLOCKS
    MOVING = "its steps under way are the last ones here; another attempt gets its KV", Own.BLOCKS
    ABORTING = "ended for the client; a step still uses its memory", Own.BLOCKS, Own.EMBEDDINGS
    CALLED_OFF = "ended for the client; the transfer of its KV still writes", Own.REMOTE_KV
    HELD = "answered; kept for the request that will go on with it", Own.LEASE, Own.BLOCKS
    FINISHING = "its last token is sent; the step launched ahead still runs", Own.BLOCKS
    FINISHED = "over"
    FAILED = "over; the gateway was told why"
