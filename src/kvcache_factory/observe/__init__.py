"""Sinks for what happens in a manager."""
