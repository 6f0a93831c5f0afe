"""Lets the processes of a job find each other before the core connects them. Standard library only, no native code.

detect.py reads from the environment who started this process, exchange.py gets every rank to one rendezvous server
(rendezvous.py, client.py).
"""
