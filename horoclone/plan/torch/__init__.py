"""What `horoclone plan` does on the ranks of a PyTorch model: build it, measure it, run strategies of training it.

ranks.py has what is called once per rank; horoclone/plan/launching.py names it.
"""
