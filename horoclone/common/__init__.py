"""Modules under the names at which Horovod's users expect them; what they offer lives elsewhere in the package."""
