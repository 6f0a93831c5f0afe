"""`horoclone top`: a running job in a terminal. table.py makes the lines, screen.py shows them and reads keys. Needs rich."""
