"""Measurements of running jobs, read from outside: page.py is one rank's, job.py finds the jobs of this user.

Needs nothing native and no framework; what writes the pages is the core (csrc/engine/page).
"""
