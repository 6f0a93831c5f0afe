"""Measurements of running jobs, read from outside: rank_metrics.py is one rank's, job.py finds the jobs of this user.

Needs nothing native and no framework; what writes them is the core (csrc/engine/rank_metrics).
"""
