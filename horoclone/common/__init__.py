"""Modules at the names where Horovod's users expect them; the code is elsewhere in the package."""
