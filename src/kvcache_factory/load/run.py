"""A run: users at their seats, workers that answer them, samples of what could drift."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..backend import Backend, CPUBackend, DiskBackend, HierarchicalBackend
from ..errors import ConfigError, MissingDependencyError
from ..manager import CacheManager
from .prometheus import Prometheus
from .report import counts, drift
from .sampling import Row, sample
from .statistics import BUILT_IN, Statistics
from .users import SYSTEM_PROMPTS, Shape, Tokens, User, system_prompt
from .watch import Watch

NAME = "load"
"""Of the manager, in metrics and on the page."""
VOCABULARY, CONTEXT, BLOCK_TOKENS = 4096, 1536, 16
SAMPLES = 240
"""Samples of a run, at most two a second."""
Progress = Callable[..., None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    duration_s: float
    users: int = 32
    workers: int = 2
    """Threads that answer."""
    think_s: float = 4.0
    """Mean time that a user thinks."""
    memory_mb: int = 48
    """Budget of the memory tier in MiB: some of what the users said has to leave."""
    disk: Path | None = None
    """Directory of a disk tier below it."""
    seed: int = 1
    statistics: Statistics = BUILT_IN
    metrics_port: int | None = None
    """Where to serve metrics meanwhile; they are read at the end."""
    prometheus: str | None = None
    """Address of a Prometheus server that scrapes this port; it is asked after a scrape of the end."""

    def __post_init__(self) -> None:
        if not self.duration_s > 0 or not self.think_s >= 0:
            raise ConfigError(f"duration_s={self.duration_s} must be above 0, think_s={self.think_s} at least 0")
        if self.users < 1 or self.workers < 1 or self.memory_mb < 1:
            raise ConfigError(
                f"users={self.users}, workers={self.workers} and memory_mb={self.memory_mb} must be at least 1"
            )
        if self.prometheus is not None and self.metrics_port is None:
            raise ConfigError(
                f"prometheus={self.prometheus!r} needs metrics_port (--metrics-port): the port that it scrapes"
            )


def tiny_model(seed: int = 0) -> Any:
    """Two layers with random weights, in float32: every request is real, and a second holds many of them.

    Raises MissingDependencyError without torch and transformers.
    """
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingDependencyError.of("transformers", "transformers", "the load generator") from error
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT + CONTEXT // 4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def run_load(plan: Plan, progress: Progress = lambda *_: None) -> list[Row]:
    """Run it and report.

    Rows: ``kind`` is ``count`` (``name``, ``own``: what the generator counted, ``ledger``: what the manager did,
    ``metrics`` and ``page``: what its port says, ``prometheus``: what that server has scraped, ``agree``), ``drift``
    (``name``, ``early``, ``late``: of the second and the last quarter, ``change``, ``flat``) or ``sample`` (one
    moment).  Tokens, bytes and milliseconds, as ``unit`` says.

    Raises ConfigError when the Prometheus server does not answer, before anything runs, or does not scrape.
    """
    server = Prometheus(plan.prometheus, NAME) if plan.prometheus is not None else None
    if server is not None:
        server.now()
    model = tiny_model(plan.seed)
    with CacheManager(_backend(plan), name=NAME, enable_metrics=True, metrics_port=plan.metrics_port) as manager:
        run = Run(plan, model, manager)
        try:
            run.go(progress)
        finally:
            run.close()
        if server is not None:
            progress(plan.duration_s, plan.duration_s, "waiting for a last scrape")
            server.wait_for_scrape(server.now())
        rows = counts(run.watch, run.adapter, manager, server.reader() if server is not None else None)
        return [*rows, *drift(run.samples, run.watch, run.begun), *run.samples]


def _backend(plan: Plan) -> Backend:
    memory = CPUBackend(size_gb=plan.memory_mb / 1024, huge_pages=False)
    if plan.disk is None:
        return memory
    return HierarchicalBackend([memory, DiskBackend(str(plan.disk), size_gb=plan.memory_mb / 256, segment_mb=16)])


class Run:
    """The state of a run."""

    def __init__(self, plan: Plan, model: Any, manager: CacheManager) -> None:
        from ..integration.transformers import TransformersCacheAdapter

        self.plan, self.model, self.manager = plan, model, manager
        self.adapter = TransformersCacheAdapter.attach(model, manager, model_id="load", block_tokens=BLOCK_TOKENS)
        self.watch = Watch(model, BLOCK_TOKENS)
        self.samples: list[Row] = []
        self.begun = 0.0
        shape = Shape(VOCABULARY, CONTEXT, min(CONTEXT / plan.statistics.context_tokens, 1.0))
        self._shape = shape
        self._users = [User(number, plan.statistics, shape, plan.seed) for number in range(plan.users)]
        self._due: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        self._over = False
        self._failures: list[BaseException] = []

    def go(self, progress: Progress) -> None:
        """Answer the users for as long as the plan says; raises what a worker raised."""
        progress(0, self.plan.duration_s, "warming up")
        self._warm_up()
        self.begun = time.perf_counter()
        end = self.begun + self.plan.duration_s
        self._due = [(self.begun + user.pause(self.plan.think_s), user.number) for user in self._users]
        heapq.heapify(self._due)
        workers = [threading.Thread(target=self._work, name=f"load-{n}") for n in range(self.plan.workers)]
        for worker in workers:
            worker.start()
        every = max(self.plan.duration_s / SAMPLES, 0.5)
        try:
            while (now := time.perf_counter()) < end and not self._failures:
                progress(now - self.begun, self.plan.duration_s, f"{self.watch.counts.requests} requests")
                self._sample(now)
                time.sleep(min(every, max(end - now, 0)))
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for worker in workers:
                worker.join()
        if self._failures:
            raise self._failures[0]
        self.manager.wait()
        self._sample(time.perf_counter())

    def close(self) -> None:
        """Leave the model alone."""
        self.watch.close()
        self.adapter.detach()

    def _warm_up(self) -> None:
        """What every conversation begins with is stored, kernels are compiled, and memory has been touched."""
        for number in range(SYSTEM_PROMPTS):
            self._answer(system_prompt(number, self._shape), 1, 0)
        while self.manager.state()["tiers"][0]["prefaulted"] < 1:
            time.sleep(0.05)

    def _work(self) -> None:
        try:
            while (user := self._next()) is not None:
                self._serve(user)
                with self._changed:
                    heapq.heappush(self._due, (time.perf_counter() + user.pause(self.plan.think_s), user.number))
                    self._changed.notify()
        except BaseException as error:
            self._failures.append(error)

    def _next(self) -> User | None:
        with self._changed:
            while not self._over:
                left = self._due[0][0] - time.perf_counter() if self._due else None
                if left is not None and left <= 0:
                    return self._users[heapq.heappop(self._due)[1]]
                self._changed.wait(left)
        return None

    def _serve(self, user: User) -> None:
        before = user.session
        question = user.ask()
        if question.new_session:
            self.manager.destroy_session(before)
            self.manager.create_session(user.session, labels={"tenant": user.tenant})
        with self.manager.use_session(user.session):
            user.heard(self._answer(question.prompt, question.answer_tokens, question.repeated))

    def _answer(self, prompt: Tokens, tokens: int, repeated: int) -> Tokens:
        import torch

        self.watch.begin()
        ids = torch.from_numpy(prompt)[None]
        mask = torch.ones_like(ids)
        output = self.model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        conversation: Tokens = np.asarray(output[0].numpy())
        self.watch.end(prompt, repeated, len(conversation) - len(prompt))
        return conversation

    def _sample(self, now: float) -> None:
        own = self.watch.first_tokens.nbytes + sum(user.nbytes for user in self._users)
        self.samples.append(sample(self.manager, self.watch, own, now - self.begun))
