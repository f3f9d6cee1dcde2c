"""When a request's first token is there: when the model has run forward once."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from .layout import base_model

if TYPE_CHECKING:
    from ...keyspace import KeySpace


class FirstToken:
    """Watches one call of ``generate`` from its beginning; inside the context, the first forward pass is waited for.

    Only passes of the thread that entered count, since others may use the model at the same time.
    """

    def __init__(self, model: Any, wanted: bool) -> None:
        self._model = base_model(model)
        self._wanted = wanted
        self._begun = time.perf_counter()
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
            self._handle = self._model.register_forward_hook(self._ran)

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _ran(self, *_: object) -> None:
        if self._space is not None and threading.get_ident() == self._thread:
            self._space.first_token(time.perf_counter() - self._begun)
            self._space = None
