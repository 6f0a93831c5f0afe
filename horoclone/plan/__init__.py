"""`horoclone plan`: which way to train a model over ranks and links is the fastest, from what is measured here.

What was measured (profile.py), what it costs to send (costs.py), the strategies and their replays (strategies.py), the
table (table.py), the command (command.py). Knows no framework; horoclone/plan/torch measures and runs.
"""
