"""Adapters: one for each engine, each in a module that imports only its own engine."""
