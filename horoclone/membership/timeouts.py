"""How long the membership of a job waits for what. All in seconds; what a user sets (--elastic-timeout) is in Limits.

A member asks the coordinator at least once a second (client.SLICE_S), so each of these is several heartbeats. After
how long a silent member is given up stands with the failure detector (bootstrap/failure_detector.py).
"""

# --- finding the coordinator
COORDINATOR_TIMEOUT_S = 10.0  # a coordinator that is silent and has not ended is looked for elsewhere
REFUSED_S = 10.0  # process 0 must have refused us before we believe that it is of this job

# --- who is waited for when a generation is formed
# those who are enough wait so long for others that are being started: interpreters start
FIRST_GENERATION_S = 30.0
TOGETHER_S = 2.0  # a newcomer waits so long for others, so that one interruption brings all
# survivors wait so long for newcomers that hold no commit yet: theirs is on its way or never comes
UNSYNCHRONISED_S = 0.1
FIND_S = 10.0  # after a failover members are waited for so much longer: they have to find the new coordinator
PROGRESS_S = 10.0  # in the job, after which a member has not failed at once

# --- pauses
FED_S = 0.1  # between two times that a newcomer which is given a commit says whether it has it
ASK_AGAIN_S = 0.2  # between two attempts to reach a coordinator
HAND_OVER_S = 5.0  # that a coordinator which ends waits for the others to go on without it
LOOK_EVERY_S = 0.05  # between two looks whether they do
SAY_EVERY_S = 10.0  # between two messages that say what a process waits for
