"""Replays traces through the engine's own index, tiers and policies, without moving a byte."""
