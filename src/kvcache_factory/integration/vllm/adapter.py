"""VLLMCacheAdapter: puts a manager of this process behind a vLLM engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...config import dump_config
from ...errors import ConfigError, MissingDependencyError
from ..base import CacheAdapter
from .control import Door
from .conversation import Talk, continued, talk_of
from .install import bind, bind_remote, core_of
from .owner import hand_over

if TYPE_CHECKING:
    from ...manager import CacheManager

CONNECTOR = {"kv_connector": "KVCacheFactoryConnector", "kv_connector_module_path": __package__, "kv_role": "kv_both"}
"""What ``--kv-transfer-config`` needs to say."""


_DOORS: list[Door] = []  # their directories live as long as this process


class VLLMCacheAdapter(CacheAdapter):
    """Gives a vLLM engine a cache and sessions.  Make one with :meth:`attach`, or an engine with :meth:`engine_args`.

    After :meth:`attach`, ``engine.generate(prompts=..., sampling_params=..., request_id=...)`` runs prompts to their
    end without disturbing other requests, and requests inside ``manager.use_session(id)`` belong to that session.
    """

    engine = "vllm"

    def __init__(self, engine: Any, manager: CacheManager) -> None:
        super().__init__()
        self.manager = manager
        self._engine = engine
        self._talks: dict[str, Talk] = {}
        self._waiting: list[Any] = []
        self._own: set[str] = set()
        self._add = engine.add_request
        self._step = engine.step
        self._unfinished = engine.has_unfinished_requests

    # -- making and attaching -----------------------------------------------------------------------------------------

    @staticmethod
    def engine_args(manager: CacheManager, model: str, **options: Any) -> dict[str, Any]:
        """Keyword arguments for ``EngineArgs`` or ``LLM`` that put *manager* behind the engine.

        In the same process the engine uses *manager* itself; where vLLM runs its engine in a child process, that makes
        a manager of the same description, and *manager* reaches it after :meth:`attach`.  *options* are other engine
        arguments; ``kv_connector_extra_config`` holds settings of the connector.
        """
        try:
            from vllm.config import KVTransferConfig
        except ImportError as error:
            raise MissingDependencyError.of("vllm", "vllm", "VLLMCacheAdapter") from error
        extra = {**describe(manager), **options.pop("kv_connector_extra_config", {})}
        transfer = KVTransferConfig(**CONNECTOR, kv_load_failure_policy="recompute", kv_connector_extra_config=extra)
        return {"model": model, **options, "kv_transfer_config": transfer}

    @classmethod
    def attach(cls, engine: Any, manager: CacheManager) -> VLLMCacheAdapter:
        """Put *manager* behind *engine*, an ``LLMEngine`` or ``LLM``.

        An engine in this process may have been made without a connector.  One in a child process must have been made
        while this process held a manager, or with ``--kv-transfer-config``: a ConfigError says how.  Raises LayoutError
        for models whose KV cannot be restored exactly.
        """
        engine = getattr(engine, "llm_engine", engine)
        if getattr(engine, "kvcache_factory", None) is not None:
            raise ConfigError("this engine has an adapter already; detach() it first")
        core = core_of(engine)
        if core is not None:
            bind(core, manager)
        else:
            bind_remote(engine, manager)
        adapter = cls(engine, manager)
        adapter._hook()
        return adapter

    def detach(self) -> None:
        """Take the added methods from the engine again; idempotent.  The connector stays, as vLLM cannot lose one."""
        if getattr(self._engine, "kvcache_factory", None) is self:
            for name in ("add_request", "step", "has_unfinished_requests", "generate", "kvcache_factory"):
                vars(self._engine).pop(name, None)

    def _hook(self) -> None:
        engine = self._engine
        engine.add_request = self._add_request
        engine.step = self._step_all
        engine.has_unfinished_requests = self._has_unfinished
        engine.generate = self.generate
        engine.kvcache_factory = self

    # -- requests -----------------------------------------------------------------------------------------------------

    def generate(self, prompts: Any, sampling_params: Any, request_id: str | None = None, **options: Any) -> list[Any]:
        """Run *prompts*, one or a list, to their end and return their ``RequestOutput``, in order.

        *sampling_params*: one for all, or a list.  *request_id*: name of the request; with several prompts, a number is
        added.  *options* go to ``add_request``.  Other requests go on, and their outputs come from ``engine.step()``.
        """
        listed = list(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, str) else [prompts]
        if listed and all(isinstance(token, int) for token in listed):
            listed = [{"prompt_token_ids": listed}]
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(listed)
        base = request_id if request_id is not None else f"kvf-{os.urandom(6).hex()}"
        names = [base] if len(listed) == 1 else [f"{base}-{number}" for number in range(len(listed))]
        done: dict[str, Any] = {}
        self._own.update(names)
        try:
            for name, prompt, param in zip(names, listed, params, strict=True):
                self._engine.add_request(name, prompt, param, **options)
            while len(done) < len(names):
                for output in self._observed_step():
                    if output.request_id not in names:
                        self._waiting.append(output)
                    elif output.finished:
                        done[output.request_id] = output
        except BaseException:
            self._engine.abort_request([name for name in names if name not in done])
            raise
        finally:
            self._own.difference_update(names)
        return [done[name] for name in names]

    def _add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """``engine.add_request``: inside a session, a text prompt goes on from what was said."""
        session, history = self.manager.current
        if session is not None:
            talk = talk_of(session)
            prompt = continued(talk, prompt, history, self._encode)
            if len(args) < 6 and not kwargs.get("session_id"):
                kwargs["session_id"] = session.id
            if history != "none":
                self._talks[request_id] = talk
        self._count(requests=1)
        try:
            return self._add(request_id, prompt, params, *args, **kwargs)
        except BaseException:
            self._talks.pop(request_id, None)
            raise

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._engine.get_tokenizer().encode(text, add_special_tokens=False)]

    def _observed_step(self) -> list[Any]:
        outputs = list(self._step())
        for output in outputs:
            if output.finished:
                self._ended(output)
        return outputs

    def _ended(self, output: Any) -> None:
        reused = getattr(output, "num_cached_tokens", 0) or 0
        self._count(lookups=1, hits=int(reused > 0), reused_tokens=reused)
        talk = self._talks.pop(output.request_id, None)
        with self._guard("recording a conversation"):
            if talk is not None and output.prompt_token_ids is not None and output.outputs:
                answer = output.outputs[0]
                ids = [*output.prompt_token_ids, *answer.token_ids]
                talk.record(ids, self._engine.get_tokenizer().decode(ids, skip_special_tokens=True))

    def _step_all(self) -> list[Any]:
        """``engine.step``: also what others' requests produced while :meth:`generate` was at work."""
        waiting, self._waiting = self._waiting, []
        return waiting if waiting else self._observed_step()

    def _has_unfinished(self) -> bool:
        return bool(self._waiting) or self._unfinished()


def describe(manager: CacheManager) -> dict[str, Any]:
    """Extra configuration by which a connector finds *manager* in this process, or makes its like in another."""
    door = Door()
    _DOORS.append(door)
    here = {"attached": hand_over(manager), "attached_pid": os.getpid()}
    return {"manager": dump_config(manager.config), **here, "control": str(door.path)}
