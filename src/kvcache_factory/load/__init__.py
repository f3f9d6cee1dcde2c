"""Load: simulated users against a real adapter, and what drifts meanwhile."""
