"""`horoclone top`: table.py makes the lines, screen.py shows them in a terminal and reads keys. Needs rich."""
