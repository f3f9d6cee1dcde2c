"""The adapter: puts a cache behind ``model.generate`` of one model instance."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ...block.identity import Identity
from ...errors import ConfigError, UnsupportedGenerationError
from ..base import CacheAdapter, Rate
from .calls import Bypass, Call, NotServed, read_call
from .chat import ChatReply, Conversation, Message
from .first_token import FirstToken
from .hook import GenerateHook, check_free, plain_generate
from .layout import base_model, cache_argument, describe
from .pruning import PruningMethod
from .request import Request
from .reuse import Reuse
from .special import Generated, request_maker
from .weights import WeightWatch, adapter_digest, fingerprint

if TYPE_CHECKING:
    from ...keyspace import KeySpace
    from ...manager import CacheManager
    from ...policy.compression import CompressionPolicy
    from ...session import Session

_NUMBERS = itertools.count(1)
_CONVERSATION = "transformers"


class TransformersCacheAdapter(CacheAdapter):
    """Makes plain ``model.generate(...)`` reuse and save KV.  Make one with :meth:`attach`.

    Safe to call from several threads as far as the model is.
    """

    engine = "transformers"

    def __init__(self, model: Any, manager: CacheManager, tokenizer: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.manager = manager
        self.tokenizer = tokenizer
        self._options = options
        self._prefix = f"tf{next(_NUMBERS)}"
        self._numbers = itertools.count(1)
        self._refreshing = threading.Lock()
        self._hook: GenerateHook | None = None
        self._cacheable = True
        self._prefill = Rate(0.0)
        self._watch: WeightWatch
        self._register()
        self._argument = cache_argument(model)

    @classmethod
    def attach(
        cls,
        model: Any,
        manager: CacheManager,
        *,
        tokenizer: Any = None,
        model_id: str | None = None,
        namespace: str = "default",
        salt: str = "",
        block_tokens: int | None = None,
        strict: bool = False,
    ) -> TransformersCacheAdapter:
        """Put *manager* behind ``model.generate`` of this instance; the model's code and class stay as they are.

        Args:
            model: a decoder-only Transformers model with full attention in every layer, or a PEFT-like wrapper of one.
            manager: where KV is kept; other models and engines may share it.
            tokenizer: needed by :meth:`chat` only.
            model_id: a name to vouch for instead of the fingerprint of configuration and weights.
            namespace, salt: keep deployments and tenants apart (see Identity).
            block_tokens: tokens of a storage block; None: what the manager says, 64 by default.
            strict: raise UnsupportedGenerationError for assisted decoding instead of running it without the cache.

        Raises LayoutError, naming layers and reason, for a model whose KV cannot be restored exactly, ConfigError when
        the model is attached already, and what ``manager.register`` raises.
        """
        if not callable(getattr(model, "generate", None)):
            raise ConfigError(f"attach(model={model!r:.60}): give a Transformers model, which has `generate`")
        if not callable(getattr(manager, "register", None)):
            raise ConfigError(f"attach(manager={manager!r:.60}): give a CacheManager")
        check_free(model)
        options = {
            "model_id": model_id,
            "namespace": namespace,
            "salt": salt,
            "block_tokens": manager.config.storage_tokens() if block_tokens is None else block_tokens,
            "strict": strict,
        }
        adapter = cls(model, manager, tokenizer, options)
        adapter._hook = GenerateHook(model, adapter._generate)
        adapter._hook.put()
        return adapter

    def detach(self) -> None:
        """Give the model its own ``generate`` back; idempotent.  What was saved stays in the manager."""
        hook, self._hook = self._hook, None
        if hook is not None and not hook.remove():
            self._log.warning("detach", "model.generate was replaced after attach and is left as it is")

    @property
    def attached(self) -> bool:
        """Whether ``model.generate`` goes through this adapter."""
        return self._hook is not None and vars(self.model).get("generate") is self._hook

    @property
    def space(self) -> KeySpace:
        """The model's key space in the manager, for the identity and the geometry of blocks."""
        return self._space

    def status(self) -> dict[str, Any]:
        """What is hooked, under which identity, and what has been served: plain values."""
        return {
            **super().status(),
            "version": transformers.__version__,
            "model": type(base_model(self.model)).__name__,
            "attached": self.attached,
            "hooked": ["generate"] if self.attached else [],
            "cache_argument": self._argument,
            "fingerprint": self._space.identity.model,
            "lora": self._space.identity.lora,
            "identity": self._space.identity.digest.hex(),
            "block_tokens": self._space.block_tokens,
        }

    def refresh(self) -> None:
        """Read weights, adapters and layout again, as after ``attach``; for weights that were changed by hand.

        Raises what :meth:`attach` raises.
        """
        with self._refreshing:
            self._register()
        self._count(refreshes=1)

    def chat(self, session: Session | str, messages: Sequence[Message], **options: Any) -> ChatReply:
        """Answer the last of *messages* (dicts with ``role`` and ``content``) in a session of the manager.

        Pass the whole conversation each time, earlier answers as they were given.  The session keeps the token ids, so
        that every full block of earlier turns is found again; edits and restarts are noticed.  *options* go to
        ``generate`` (``max_new_tokens``, ``streamer``, ...); ``template`` holds arguments of the chat template, and
        ``reuse_hint`` says whether the session will be back (by default what the session says, else "returns").  After
        :meth:`detach` the conversation goes on without the cache.

        Raises ConfigError without a tokenizer, with no messages, or with messages that the template cannot write, and
        UnknownSessionError.
        """
        if self.tokenizer is None:
            raise ConfigError("chat needs the tokenizer: attach(model, manager, tokenizer=tokenizer)")
        if not isinstance(messages, Sequence) or not messages:
            raise ConfigError("chat needs at least one message, such as {'role': 'user', 'content': 'Hello'}")
        template, said = options.pop("template", {}), options.pop("reuse_hint", None)
        with self.manager.use_session(session if isinstance(session, str) else session.id) as current:
            talk: Conversation = current.data.setdefault(_CONVERSATION, Conversation())
            with talk.lock:
                text, prompt = talk.prompt(self.tokenizer, messages, **template)
                known = current.reuse_hint if current.reuse_hint != "unknown" else "returns"
                output, request = self._answer(prompt, talk, options, said if said is not None else known)
                sequence = (output if isinstance(output, torch.Tensor) else output.sequences)[0]
                answer_ids = [int(token) for token in sequence[len(prompt) :]]
                answer = str(self.tokenizer.decode(answer_ids, skip_special_tokens=True))
                talk.record(messages, text, prompt, answer_ids, answer)
        return ChatReply(answer, answer_ids, len(prompt), request.reused_tokens if request is not None else 0)

    def generate(
        self,
        *args: Any,
        prune: PruningMethod | str | None = None,
        reuse: Reuse | None = None,
        compress: CompressionPolicy | None = None,
        rank_blocks: bool = False,
        **kwargs: Any,
    ) -> Generated:
        """``model.generate(*args, **kwargs)`` with one thing that plain ``generate`` never does, and a report on it.

        Args:
            prune: keep a part of the prompt's KV, by a method or its name such as ``"snapkv:keep=0.5"``.
            reuse: take runs of equal tokens from other sequences too, moved and computed again in part.
            compress: encode what lies behind the end of the live cache, as the policy says.
            rank_blocks: exact; have the last queries' attention order which blocks leave for a slower tier first.

        What is approximate (``prune``, ``reuse``, a lossy ``compress``) is for this call only and never stored.

        Raises ConfigError for what cannot be meant, and UnsupportedGenerationError where the call or the model cannot
        be served so.
        """
        asked, make = request_maker(self.model, prune, reuse, compress, rank_blocks)
        if not self.attached:
            raise ConfigError("the adapter is detached; attach it again")
        options = {"asked": asked, "make": make} if asked else {}
        output, request = self._run(plain_generate(self.model), args, kwargs, **options)
        return Generated(output, request.report() if request is not None else {})

    # -- one request --------------------------------------------------------------------------------------------------

    def _answer(
        self, prompt: list[int], talk: Conversation, options: dict[str, Any], reuse_hint: str
    ) -> tuple[Any, Request | None]:
        ids = torch.tensor([prompt], dtype=torch.long, device=base_model(self.model).device)
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
        original = plain_generate(self.model)
        if not self.attached:
            return original(**arguments), None
        if talk.chain is None or talk.chain.identity != self._space.identity:
            talk.chain = self._space.chain()
        return self._run(original, (), arguments, chain=talk.chain, reuse_hint=reuse_hint)

    def _generate(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(original, args, kwargs)[0]

    def _run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
    ) -> tuple[Any, Request | None]:
        wanted = self.manager.config.enable_metrics or self._space.asks_remotely
        first_token = FirstToken(self.model, wanted, self._prefill)
        request = self._open(args, kwargs, options)
        if request is None:
            return original(*args, **kwargs), None
        generated = 0
        try:
            extra = {self._argument: request.cache, **request.call.overrides}
            with first_token.of(request.space), request.watching():
                output = original(*args, **{**kwargs, **extra})
            with self._guard("saving"):
                sequences = output if isinstance(output, torch.Tensor) else output.sequences
                generated = max(int(sequences.shape[1]) - request.call.ids.shape[1], 0)
                if self._still_current(request):
                    attentions = getattr(output, "attentions", None)
                    saved = request.save(sequences.detach().cpu().numpy(), generated, attentions)
                    self._count(saved_blocks=saved)
            return output, request
        finally:
            with self._guard("releasing"):
                request.close(generated)

    def _open(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> Request | None:
        """A request whose cache is ready, or None where Transformers must go on alone."""
        request: Request | None = None
        reason, asked = Bypass.FAILED, options.pop("asked", "")
        with self._guard("looking up"):
            try:
                call = read_call(self.model, args, kwargs)
                if self._space.closed:
                    raise NotServed(Bypass.CLOSED)
                self._stay_current()
                request = self._request(call, options)
                request.open()
                self._served(request)
                return request
            except NotServed as refusal:
                reason = refusal.reason
        if request is not None:
            with self._guard("releasing"):
                request.close()
        self._bypass(reason.value)
        if asked and reason is not Bypass.FAILED:
            raise UnsupportedGenerationError(f"generate({asked}) cannot serve this call: {reason.value}")
        if reason is Bypass.ASSISTED and self._options["strict"]:
            raise UnsupportedGenerationError(
                "assisted and prompt-lookup decoding feed the whole prompt again behind a cached prefix, which corrupts"
                " the output; detach the adapter, or attach with strict=False to run such requests without the cache"
            )
        return None

    def _request(self, call: Call, options: dict[str, Any]) -> Request:
        name = f"{self._prefix}-{next(self._numbers)}"
        chain = options.get("chain")
        if chain is not None and chain.identity != self._space.identity:
            options = {**options, "chain": None}
        make: Callable[..., Request] = options.get("make", Request)
        options = {key: value for key, value in options.items() if key != "make"}
        return make(self.model, self._space, call, name, self._device, self._prefill, **options)

    def _served(self, request: Request) -> None:
        self._count(
            requests=1,
            lookups=len(request.rows),
            hits=request.hits,
            prompt_tokens=request.prompt_tokens,
            reused_tokens=request.reused_tokens,
        )

    # -- identity -----------------------------------------------------------------------------------------------------

    def _stay_current(self) -> None:
        """Register again when the weights are no longer those that the key space was made for."""
        with self._refreshing:
            if self._watch.changed():
                # Until it has succeeded, and not once more for every request when it fails: reading weights takes long.
                self._cacheable = False
                self._watch = WeightWatch(self.model)
                self._register()
                self._count(refreshes=1)
            if not self._cacheable:
                raise NotServed(Bypass.LAYOUT)

    def _still_current(self, request: Request) -> bool:
        """Whether the weights that *request* ran with are, as far as can be seen, those of its key space."""
        return request.space is self._space and not self._watch.changed()

    def _register(self) -> None:
        options = self._options
        watch = WeightWatch(self.model)
        spec, device = describe(self.model, options["block_tokens"])
        identity = Identity(
            model=fingerprint(self.model, options["model_id"]),
            kv_dtype=spec.dtype.value,
            block_tokens=spec.block_tokens,
            lora=adapter_digest(self.model),
            salt=options["salt"],
            namespace=options["namespace"],
        )
        self._space = self.manager.register(spec, identity)
        self._watch, self._device, self._cacheable = watch, device, True
