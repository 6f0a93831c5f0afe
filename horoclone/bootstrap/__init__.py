"""How the processes of a job find each other before the core connects them. Standard library only, no native code."""
