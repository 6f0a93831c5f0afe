"""What `import horovod` finds where horoclone is installed, on PYTHONPATH too: it puts horoclone in its place.

A single file, because a real Horovod is a folder: neither overwrites the other, and in one place the folder goes first.
"""

from horoclone import horovod_alias

horovod_alias.stand_for_horovod()
