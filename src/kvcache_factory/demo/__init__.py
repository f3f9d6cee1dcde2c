"""The main job, shown on a real model: a conversation that does not re-read its own past."""
