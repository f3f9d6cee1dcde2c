"""When a request's first token is there: when the model has run forward once; and how fast it computes prompts."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from ..base import MIN_TOKENS, Rate
from .layout import base_model

if TYPE_CHECKING:
    from ...keyspace import KeySpace


class FirstToken:
    """Watches one call of ``generate`` from its beginning; inside the context, the first forward pass is waited for.

    Only passes of the thread that entered count, since others may use the model at the same time.

    Parameters
    ----------
    prefill:
        Learns how many tokens the model computes in a second.
    """

    def __init__(self, model: Any, wanted: bool, prefill: Rate) -> None:
        self._model = base_model(model)
        self._wanted = wanted
        self._prefill = prefill
        self._begun = self._entered = time.perf_counter()
        self._space: KeySpace | None = None
        self._thread = 0
        self._handle: Any = None

    def of(self, space: KeySpace) -> FirstToken:
        """Tell *space* when it is there."""
        self._space = space
        return self

    def __enter__(self) -> None:
        if self._wanted:
            self._thread = threading.get_ident()
            self._entered = time.perf_counter()
            self._handle = self._model.register_forward_hook(self._ran, with_kwargs=True)

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _ran(self, _: object, args: tuple[Any, ...], *rest: Any) -> None:
        # To a pass of another thread torch may give no keywords: it looks up who wants them while this one leaves.
        if self._space is None or threading.get_ident() != self._thread:
            return
        ids = rest[0].get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.is_cuda:
            torch.cuda.synchronize(ids.device)  # the pass has only been launched
        now = time.perf_counter()
        if isinstance(ids, torch.Tensor) and ids.numel() >= MIN_TOKENS:
            self._prefill.measured(ids.numel(), now - self._entered)
        self._space.first_token(now - self._begun)
        self._space = None
