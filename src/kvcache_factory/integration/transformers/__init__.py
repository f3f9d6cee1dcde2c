"""Transformers: plain ``model.generate(...)`` reuses and saves KV, from version 4.57 on.

adapter = TransformersCacheAdapter.attach(model, manager, tokenizer=tokenizer)
model.generate(**inputs)                    # as before; now it loads what it has seen
adapter.chat(session, messages)             # a conversation that keeps its own token ids
adapter.detach()
"""

from .adapter import TransformersCacheAdapter
from .chat import ChatReply

__all__ = ["ChatReply", "TransformersCacheAdapter"]
