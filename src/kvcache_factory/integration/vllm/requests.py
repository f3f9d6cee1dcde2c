"""What the scheduler's side knows of each request that vLLM works on."""

from __future__ import annotations

import time
from typing import Any

from ...block.key import KeyChain, MediaSpan
from ...block.plan import Match
from ...engine.io import Ticket
from ...keyspace import KeySpace
from ...policy.base import REUSE_HINTS, ReuseHint


class TrackedRequest:
    """One request of vLLM: its keys, what was found for it, and how many of its blocks are stored.

    The chain grows with the request and is never computed twice.
    """

    def __init__(self, request: Any, space: KeySpace) -> None:
        self.request = request
        self.id: str = request.request_id
        self.space = space
        self.session: str | None = session_of(request)
        self.reuse_hint: ReuseHint = reuse_hint_of(request)
        self.chain: KeyChain = space.chain(media=media_spans(request))
        self.match: Match | None = None
        self.local_tokens = 0
        self.loaded_tokens = 0
        self.saved = 0
        self.refresh: Ticket | None = None
        self.prefetch: Ticket | None = None
        self.looked_at = -1
        self.held_before = 0
        self.awaited_tokens = 0
        self.prefetched_since = 0.0
        self.waiting_since: float | None = None
        self.load_step = -1
        self.declined = False
        """Whether the last look at slower tiers ended with the judgement that computing is faster."""
        self.came = time.monotonic()
        self.answering = False

    def grow(self, tokens: int | None = None) -> None:
        """Let the chain cover the first *tokens* tokens of the request, all of them by default; drafts are not among
        them."""
        known = self.request.all_token_ids
        end = len(known) if tokens is None else min(tokens, len(known))
        if end > self.chain.num_tokens:
            self.chain.extend(known[self.chain.num_tokens : end])

    @property
    def ready_blocks(self) -> int:
        """Leading blocks of the match that are in the first tier, as they are: what is encoded there is deeper."""
        segments = self.match.segments if self.match is not None else ()
        held = len(segments[0].rows) if segments and segments[0].tier == 0 else 0
        return min(held, self.space.ready_in_memory(self.chain)) if held else 0

    @property
    def fetched_blocks(self) -> int:
        """Those of them that were brought from slower tiers for this request."""
        return max(self.ready_blocks - self.held_before, 0)

    def forget_match(self) -> None:
        """The lease is gone: look again when the request is scheduled again."""
        self.match = None
        self.prefetch = None
        self.looked_at = -1
        self.waiting_since = None


def cacheable(request: Any) -> bool:
    """Whether the KV of a request follows from token ids and media: no embeddings, no input that streams in."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None and not request.resumable


def session_of(request: Any) -> str | None:
    """The session that a request names, never by its salt."""
    if request.session_id:
        return str(request.session_id)
    named = (request.kv_transfer_params or {}).get("session_id")
    return str(named) if named else None


def reuse_hint_of(request: Any) -> ReuseHint:
    """What a request says about its session's return; a word that is none says nothing."""
    said = (request.kv_transfer_params or {}).get("reuse_hint")
    return said if said in REUSE_HINTS else "unknown"


def media_spans(request: Any) -> list[MediaSpan]:
    """Where pictures and other media stand for tokens, by the digests of their content."""
    return [
        MediaSpan(feature.mm_position.offset, feature.mm_position.length, str(feature.identifier).encode())
        for feature in request.mm_features
    ]
