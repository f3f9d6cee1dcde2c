"""The one thing that is put on a model: a callable in place of its bound ``generate``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin

from ...errors import ConfigError, LayoutError
from .layout import base_model


class GenerateHook:
    """Stands on one model instance as ``model.generate`` and sends every call through an adapter.

    A copy of the model, by ``copy.deepcopy`` or by pickle, is another model that nobody attached: it gets its plain
    ``generate`` back, bound to itself.
    """

    def __init__(self, model: Any, through: Callable[..., Any]) -> None:
        self.model = model
        self.original = plain_generate(model)
        self._through = through
        functools.update_wrapper(self, self.original)  # signature and documentation stay readable

    def put(self) -> None:
        """Take the place of ``model.generate``."""
        self.model.generate = self

    def remove(self) -> bool:
        """Put back what was there; False when something else has taken the place since, which is left alone."""
        if vars(self.model).get("generate") is not self:
            return False
        del self.model.generate
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(self.original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.model))
        return self if copied is None else plain_generate(copied)

    def __reduce__(self) -> Any:
        return plain_generate, (self.model,)


def plain_generate(model: Any) -> Any:
    """The ``generate`` of a model's class, bound to *model*."""
    return types.MethodType(type(model).generate, model)


def check_free(model: Any) -> None:
    """Raise ConfigError when ``model.generate`` is taken, and LayoutError when it is not the one of Transformers."""
    own = vars(model).get("generate")
    name = type(base_model(model)).__name__
    if isinstance(own, GenerateHook):
        raise ConfigError(f"this {name} is attached already; call detach() on its adapter first")
    if own is not None and getattr(own, "__func__", None) is not type(model).generate:
        raise ConfigError(f"something else replaced generate on this {name}; attach before it does, or remove it")
    if getattr(type(base_model(model)), "generate", None) is not GenerationMixin.generate:
        raise LayoutError(
            f"{name} does not generate by the method of GenerationMixin, so its calls cannot be understood"
        )
