"""What compression costs, measured on a real model and a real text."""
